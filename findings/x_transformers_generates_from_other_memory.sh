#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0: XLAutoregressiveWrapper.generate reads a token twice at each new segment.
#
# While it generates, the memory that a call returns is the segment's memory and the last token, since the others came
# from the cache. When a segment is full, generate reads it again as a whole, but with that memory, and appends
# it: the segment's last token but one is in the memory twice, all older tokens are one position further
# away, and so for each segment. Greedy texts differ from those of the same model that reads everything in one call,
# though the memory holds everything. Only the segments of the prompt and the first new one are exact.
# Guess: with a memory that holds everything, generation equals that of a model without segments.
# Output seen: memory and segment of the calls 0+4 4+2 4+3 5+4 9+1 9+2 9+3 10+4 14+1; 1 of 8 texts as without segments
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 x-transformers==2.31.10 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from x_transformers import Decoder, TransformerWrapper, XLAutoregressiveWrapper

torch.manual_seed(0)
layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
model = TransformerWrapper(
    num_tokens=20, max_seq_len=4, max_mem_len=100, use_abs_pos_emb=False, attn_layers=layers
).eval()
wrapper = XLAutoregressiveWrapper(model)
N_NEW = 12


@torch.no_grad()
def read_all(ids):
    for _ in range(N_NEW):
        newest = model(ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, newest], dim=1)
    return ids[:, -N_NEW:]


prompts = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(0))

# In segments, the model itself computes the logits of one call.
with torch.no_grad():
    first, memory = model(prompts[:, :4], return_mems=True)
    second, _ = model(prompts[:, 4:], mems=memory, return_mems=True)
    assert torch.allclose(torch.cat([first, second], dim=1), model(prompts), atol=1e-4)

calls = []


def count(module, args, options):
    memory = options["mems"]
    n_memory = 0 if memory is None else memory[0].shape[1]
    calls.append(f"{n_memory}+{args[0].shape[1]}")


hook = model.register_forward_pre_hook(count, with_kwargs=True)
generated = wrapper.generate(prompts, N_NEW, temperature=0.0)
hook.remove()
n_equal = (generated == read_all(prompts)).all(dim=1).sum().item()
seen = " ".join(calls[:9])
print(f"memory and segment of the calls {seen}; {n_equal} of 8 texts as without segments")
assert seen == "0+4 4+2 4+3 5+4 9+1 9+2 9+3 10+4 14+1", seen
assert n_equal < 8, n_equal
PYTHON
