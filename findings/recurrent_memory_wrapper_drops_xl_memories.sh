#!/bin/sh
# recurrent-memory-transformer-pytorch 0.7.0, torch 2.13.0: the wrapper trains without XL memories and generates with them.
#
# A RecurrentMemoryTransformer keeps the last segment's keys and values by default, beside its memory tokens.
# RecurrentMemoryTransformerWrapper gets them back from each segment, and doesn't give them to the next one. Its generate
# and its backward pass with memory replay do. So loss and logits of the same weights on the same text are those of
# another model than the one that writes, and than the one that replay trains. With use_xl_memories=False, all are equal.
# Guess: forward, replay and generate carry the same memories.
# Output seen: loss plain 4.102, with replay 4.065; without XL memories 4.102, 4.102; greedy tokens that differ from the
# wrapper's own logits: 4 of 24, 0 without XL memories
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 recurrent-memory-transformer-pytorch==0.7.0 packaging==26.4 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

SEGMENT, N_TOKENS = 16, 20


def build(use_xl_memories):
    torch.manual_seed(0)
    model = RecurrentMemoryTransformer(
        num_tokens=N_TOKENS,
        dim=32,
        depth=2,
        dim_head=16,
        heads=2,
        num_memory_tokens=4,
        seq_len=SEGMENT,
        use_xl_memories=use_xl_memories,
    )
    with torch.no_grad():
        for weight in model.parameters():  # so that a difference shows
            if weight.dim() > 1:
                weight.mul_(3)
    return RecurrentMemoryTransformerWrapper(model).eval()


def compute_losses(wrapper):
    plain, _ = wrapper(text, return_loss=True)
    replayed = wrapper(text, memory_replay_backprop=True)
    return plain.item(), float(replayed)


@torch.no_grad()
def count_different(wrapper):
    """The greedy tokens of generate that aren't the wrapper's own most probable ones."""
    start = text[:, :20]
    written = wrapper.generate(start, length=44, temperature=0.0)
    read = torch.cat([start, written], dim=1)
    logits, _ = wrapper(read)
    return (logits[:, 19:-1].argmax(dim=-1) != written).sum().item()


text = torch.randint(N_TOKENS, (1, 4 * SEGMENT + 1), generator=torch.Generator().manual_seed(0))
plain, replayed = compute_losses(build(True))
plain_without, replayed_without = compute_losses(build(False))
n_different = [count_different(build(use_xl_memories)) for use_xl_memories in (True, False)]
print(
    f"loss plain {plain:.3f}, with replay {replayed:.3f}; without XL memories {plain_without:.3f}, "
    f"{replayed_without:.3f}; greedy tokens that differ from the wrapper's own logits: {n_different[0]} of 24, "
    f"{n_different[1]} without XL memories"
)
assert abs(plain - replayed) > 0.01, (plain, replayed)
assert abs(plain - plain_without) < 1e-6, (plain, plain_without)
assert abs(plain_without - replayed_without) < 1e-4, (plain_without, replayed_without)
assert n_different[0] > 0, n_different
assert n_different[1] == 0, n_different
PYTHON
