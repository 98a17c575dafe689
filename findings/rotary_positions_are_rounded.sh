#!/bin/sh
# rotary-embedding-torch 0.9.1, torch 2.13.0: queries and keys in bfloat16 are rotated by positions in bfloat16.
#
# The positions get the dtype of the queries, though the module's frequencies are float32. bfloat16 has 8 bits of
# precision: from 256 on, neighbors share a position, from 512 on groups of four, and so on. So with bfloat16
# weights, keys of a long memory or context can't be distinguished by position, without an error. Queries and
# keys in float32, rotated and then converted, are right.
# Guess: positions are integers or float32, as the frequencies, and only the result is rounded.
# Output seen: distinct rotations of 1024 positions: float32 1024, rotated in bfloat16 513; at position 1023 the angle is
# off by 1.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 rotary-embedding-torch==0.9.1 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from rotary_embedding_torch import RotaryEmbedding

LENGTH = 1024


def rotate(dtype):
    module = RotaryEmbedding(dim=64)
    queries = torch.ones(1, 1, LENGTH, 64, dtype=dtype)
    rotated = module.rotate_queries_or_keys(queries)
    assert next(module.parameters()).dtype == torch.float32
    return rotated[0, 0].float()


def count_distinct(rotated):
    return len(torch.unique(rotated, dim=0))


exact = rotate(torch.float32)
rounded = rotate(torch.bfloat16)
# The first pair of features turns by one radian per position.
angles = [torch.atan2(x[:, 1], x[:, 0]) for x in (exact, rounded)]
error = torch.remainder(angles[1] - angles[0] + torch.pi, 2 * torch.pi) - torch.pi
n_distinct = [count_distinct(x) for x in (exact, rounded)]
print(
    f"distinct rotations of {LENGTH} positions: float32 {n_distinct[0]}, rotated in bfloat16 {n_distinct[1]}; "
    f"at position {LENGTH - 1} the angle is off by {error[-1].abs():.2f}"
)
assert n_distinct[0] == LENGTH, n_distinct
assert n_distinct[1] <= LENGTH * 0.6, n_distinct
assert error[:256].abs().max() < 0.02, error[:256].abs().max()
assert error.abs().max() > 0.9, error.abs().max()
PYTHON
