#!/bin/sh
# block-recurrent-transformer-pytorch 0.4.4, torch 2.13.0: qk_rmsnorm_scale does nothing, and normed attention is flat.
#
# Recurrent layers normalize queries and keys to length 1 and should multiply their products by 8. The attention
# computes that factor and doesn't pass it on; the logits are divided by sqrt(dim_head) as without the norm, so they
# lie between -1/8 and 1/8 for heads of 64. At the start of training, no position gets more than 1.28 times the weight
# of another: each layer with memory takes nearly the mean of what it sees. With use_flash_attn it is the same.
# Guess: qk_rmsnorm_scale scales the logits, as in x-transformers.
# Output seen: a query equal to the first of 64 keys gives it a weight of 0.018 with a scale of 1, 0.018 with 8 and
# 0.018 with 1000; without the norm 0.984; softmax of 8 times the cosines 0.968
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 block-recurrent-transformer-pytorch==0.4.4 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from block_recurrent_transformer_pytorch.block_recurrent_transformer_pytorch import Attention

N_KEYS = 64
WIDTH = 64
torch.manual_seed(0)
keys = torch.randn(1, N_KEYS, WIDTH)
query = keys[:, None, :1]  # batch, heads, queries, width
values = torch.eye(N_KEYS)[None]  # so the output is the weights


@torch.no_grad()
def first_weight(**options):
    return Attention(WIDTH, **options)(query, keys, values)[0, 0, 0, 0].item()


scaled = [first_weight(qk_rmsnorm=True, qk_rmsnorm_scale=scale) for scale in (1, 8, 1000)]
plain = first_weight(qk_rmsnorm=False)
cosines = torch.cosine_similarity(keys[0, :1], keys[0])
expected = (8 * cosines).softmax(0)[0].item()
flat = (cosines / WIDTH**0.5).softmax(0)[0].item()
print(
    "a query equal to the first of 64 keys gives it a weight of {:.3f} with a scale of 1, {:.3f} with 8 and\n"
    "{:.3f} with 1000; ".format(*scaled)
    + f"without the norm {plain:.3f}; softmax of 8 times the cosines {expected:.3f}"
)
assert scaled[0] == scaled[1] == scaled[2], scaled
assert abs(scaled[0] - flat) < 1e-5, (scaled, flat)
assert expected > 10 * scaled[0], expected
PYTHON
