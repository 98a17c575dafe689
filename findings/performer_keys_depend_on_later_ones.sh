#!/bin/sh
# performer-pytorch 1.1.4, torch 2.13.0: with the softmax kernel, causal attention depends on later tokens.
#
# The features of a key are exp(x - m) + 0.0001, where m is the largest x of the whole text. m would cancel between
# the attention's two sums, but the constant doesn't: one large key anywhere later makes the earlier keys' features
# small beside it, and their weights equal. So a language model's loss on a text isn't of what comes before each token,
# and generation, which lacks the rest, computes otherwise than training. A model's initial weights hardly show it,
# since their keys are small. generalized_attention=True has no such maximum.
# Guess: causal=True means that later tokens don't matter.
# Output seen: normal queries, keys and values, of 64 keys the last multiplied by 1, 2 and 3: the first 32 outputs
# change by up to 0.00, 0.94 and 1.13, their mean size is 0.27; generalized 0.00, 0.00 and 0.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 performer-pytorch==1.1.4 setuptools==80.9.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import contextlib
import io

import torch
from performer_pytorch import FastAttention

torch.manual_seed(0)
with contextlib.redirect_stdout(io.StringIO()):  # it says that its CUDA code is absent
    softmax = FastAttention(32, causal=True)
    generalized = FastAttention(32, causal=True, generalized_attention=True)
queries, keys, values = torch.randn(3, 1, 1, 64, 32)


def early(attention, factor):
    changed = keys.clone()
    changed[..., -1, :] *= factor
    return attention(queries, changed, values)[..., :32, :]


def changes(attention):
    return [(early(attention, factor) - early(attention, 1)).abs().max().item() for factor in (1, 2, 3)]


of_softmax, of_generalized = changes(softmax), changes(generalized)
size = early(softmax, 1).abs().mean().item()
print(
    "normal queries, keys and values, of 64 keys the last multiplied by 1, 2 and 3: the first 32 outputs\n"
    "change by up to {:.2f}, {:.2f} and {:.2f}, ".format(*of_softmax)
    + f"their mean size is {size:.2f}; "
    + "generalized {:.2f}, {:.2f} and {:.2f}".format(*of_generalized)
)
assert of_softmax[2] > size, of_softmax
assert max(of_generalized) == 0, of_generalized
PYTHON
