#!/bin/sh
# rotary-embedding-torch 0.9.1, torch 2.13.0: with xpos, a query beside cached keys is scaled otherwise than in the whole text.
#
# xpos scales queries up and keys down by a power of their place, counted from the middle. For keys,
# rotate_queries_with_cached_keys takes the middle of all keys, for queries the middle of the queries alone. The two no
# longer cancel: scores of the same query and keys differ from those of rotate_queries_and_keys, the more the
# longer the text before it. Without xpos, both are equal. So a model that is trained on whole texts gets other
# attention when it generates token by token.
# Guess: scores depend on the distance alone, whether or not keys come from a cache.
# Output seen: largest error of scores of the last query, relative: without xpos 0.00; with xpos and 32 keys 0.01,
# 256 keys 0.11, 1024 keys 0.22
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 rotary-embedding-torch==0.9.1 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from rotary_embedding_torch import RotaryEmbedding

LENGTHS = (32, 256, 1024)


def compute_error(use_xpos, length):
    """Of scores of the last query with all keys, relative to the largest score."""
    queries, keys = torch.randn(2, 1, 1, length, 64, generator=torch.Generator().manual_seed(0))
    if use_xpos:
        rotated, rotated_keys = RotaryEmbedding(dim=32, use_xpos=True).rotate_queries_and_keys(queries, keys)
    else:
        module = RotaryEmbedding(dim=32)
        rotated = module.rotate_queries_or_keys(queries)
        rotated_keys = module.rotate_queries_or_keys(keys)
    expected = rotated[:, :, -1:] @ rotated_keys.mT
    module = RotaryEmbedding(dim=32, use_xpos=use_xpos)
    rotated, rotated_keys = module.rotate_queries_with_cached_keys(queries[:, :, -1:], keys)
    scores = rotated @ rotated_keys.mT
    return ((scores - expected).abs().max() / expected.abs().max()).item()


plain = max(compute_error(False, length) for length in LENGTHS)
with_xpos = [compute_error(True, length) for length in LENGTHS]
print(
    f"largest error of scores of the last query, relative: without xpos {plain:.2f}; with xpos and "
    f"32 keys {with_xpos[0]:.2f}, 256 keys {with_xpos[1]:.2f}, 1024 keys {with_xpos[2]:.2f}"
)
assert plain < 1e-4, plain
assert with_xpos[1] > 0.02, with_xpos
assert with_xpos[0] < with_xpos[1] < with_xpos[2], with_xpos
PYTHON
