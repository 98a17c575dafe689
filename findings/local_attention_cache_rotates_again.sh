#!/bin/sh
# local-attention 1.11.2, torch 2.13.0: LocalTransformer.generate with its default cache rotates keys again in each step.
#
# A step rotates all cached keys by their places in the window, and stores the rotated keys; the next step
# rotates them once more. From the third token on, the logits are others, and greedy text differs from that of
# use_kv_cache=False, which agrees with the model's forward pass. With use_dynamic_pos_bias=True, which has no
# rotation, both agree.
# Guess: the cache holds keys before the rotation, and a cache changes only speed.
# Output seen: error of logits by step: rotary 0.00 0.00 0.01 0.02 0.19 0.02, bias 0.00 0.00 0.00 0.00 0.00 0.00;
# of 40 greedy tokens differ: rotary 16, bias 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 local-attention==1.11.2 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from local_attention import LocalTransformer

N_STEPS = 6


def build(use_dynamic_pos_bias):
    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=20,
        max_seq_len=64,
        dim=32,
        depth=2,
        dim_head=16,
        heads=2,
        local_attn_window_size=16,
        use_dynamic_pos_bias=use_dynamic_pos_bias,
    )
    with torch.no_grad():
        for weight in model.parameters():  # so that a difference shows
            if weight.dim() > 1:
                weight.mul_(2)
    return model.eval()


@torch.no_grad()
def compute_errors(model):
    """Of logits with a cache, token by token from the first, relative to the logits' standard deviation."""
    expected = model(text)
    cache = None
    errors = []
    for i in range(N_STEPS):
        logits, cache = model(text[:, : i + 1], cache=cache, return_cache=True)
        error = (logits[:, -1] - expected[:, i]).abs().max() / expected.std()
        errors.append(error.item())
    return errors


def count_different(model):
    cached = model.generate(text, 40, temperature=0.0)
    plain = model.generate(text, 40, temperature=0.0, use_kv_cache=False)
    return (cached != plain).sum().item()


text = torch.randint(20, (1, 12), generator=torch.Generator().manual_seed(0))
rotary, bias = build(False), build(True)
errors = [compute_errors(model) for model in (rotary, bias)]
n_different = [count_different(model) for model in (rotary, bias)]
shown = [" ".join(f"{error:.2f}" for error in of_model) for of_model in errors]
print(
    f"error of logits by step: rotary {shown[0]}, bias {shown[1]}; of 40 greedy tokens differ: "
    f"rotary {n_different[0]}, bias {n_different[1]}"
)
assert max(errors[0][:2]) < 1e-4, errors
assert max(errors[0]) > 0.02, errors
assert max(errors[1]) < 1e-4, errors
assert n_different[0] > 0, n_different
assert n_different[1] == 0, n_different
PYTHON
