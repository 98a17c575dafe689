#!/bin/sh
# memorizing-transformers-pytorch 0.4.1, torch 2.13.0: a full kNN memory is emptied, and later returns other tokens.
#
# When an index would hold more than max_memories, all of it is dropped, not the oldest. The first segment after that
# can't be found until the next one. The index counts its entries from 0 again, while keys and values are stored where
# the last ones ended, and searching takes the index's numbers as places in that store. Where the two differ, a query
# gets the keys and values of other tokens than it found, with no error; a model attends to them.
# Guess: the newest max_memories entries stay, and a stored key is found with its value.
# Output seen: max_memories 16, segments of 4; what the first key of each of 12 segments, searched right after it was
# stored, returns: 0 4 8 12 nothing 20 24 28 32 nothing 36 40; stored were 0 4 8 12 16 20 24 28 32 36 40 44
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 memorizing-transformers-pytorch==0.4.1 \
    faiss-gpu==1.15.1 einops-exts==0.0.4 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from memorizing_transformers_pytorch import KNNMemory

N_SEGMENTS = 12
SEGMENT_LEN = 4
WIDTH = 8
generator = torch.Generator().manual_seed(0)
memory = KNNMemory(dim=WIDTH, max_memories=16, multiprocessing=False)
stored, returned = [], []
for i in range(N_SEGMENTS):
    keys = torch.randn(1, SEGMENT_LEN, WIDTH, generator=generator)
    keys = torch.nn.functional.normalize(keys, dim=-1)  # as the attention does, so each key is nearest to itself
    positions = torch.arange(i * SEGMENT_LEN, (i + 1) * SEGMENT_LEN).float()
    values = positions[None, :, None].expand_as(keys)  # a token's value is its position in the text
    memory.add(torch.stack([keys, values], dim=-2))
    found, is_found = memory.search(keys[:, :1], 1)
    stored.append(int(positions[0]))
    returned.append(int(found[0, 0, 0, 1, 0]) if is_found.item() else "nothing")
print(
    "max_memories 16, segments of 4; what the first key of each of 12 segments, searched right after it was\n"
    f"stored, returns: {' '.join(map(str, returned))}; stored were {' '.join(map(str, stored))}"
)
assert returned[:4] == stored[:4]
assert returned[4] == returned[9] == "nothing"
assert returned[10:] == [36, 40]
PYTHON
