#!/bin/sh
# torch 2.13.0, CPU: LayerNorm adds its weights' gradients in bfloat16 if its input is bfloat16, also under autocast.
#
# Each thread adds row after row in the input's dtype, even if the weights and their gradients are float32. A bfloat16
# sum of ones stops at 256, where the next number is 258: with one thread, a bias that should get 8192 gets 256.
# RMSNorm, Linear and, for float32 inputs, LayerNorm add in float32. A bfloat16 Embedding stops in the same way, for a
# frequent token.
# Guess: all sums over tokens are float32, and a float32 gradient was added in float32.
# Output seen: 8192 ones: LayerNorm bfloat16 256, its weights float32 under autocast 256, float32 8192; RMSNorm
# bfloat16 8192; Linear bfloat16 8192; Embedding bfloat16 256
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn

torch.set_num_threads(1)
N_TOKENS = 8192


def gradient(module, x, weight):
    """Of one weight, when all outputs have the gradient 1."""
    output = module(x)
    output.backward(torch.ones_like(output))
    return weight.grad.flatten()[0]


BF16 = torch.bfloat16
ones = torch.ones(N_TOKENS, 4)
rows = torch.randn(N_TOKENS, 4, generator=torch.Generator().manual_seed(0))
low = nn.LayerNorm(4, dtype=BF16)
in_autocast = nn.LayerNorm(4)
full = nn.LayerNorm(4)
rms = nn.RMSNorm(4, dtype=BF16)
linear = nn.Linear(4, 4, dtype=BF16)
embedding = nn.Embedding(2, 4, dtype=BF16)
seen = [gradient(low, rows.to(BF16), low.bias)]
with torch.autocast("cpu", BF16):
    output = in_autocast(rows.to(BF16))
output.backward(torch.ones_like(output))
seen.append(in_autocast.bias.grad[0])
seen.append(gradient(full, rows, full.bias))
seen.append(gradient(rms, ones.to(BF16), rms.weight))
seen.append(gradient(linear, ones.to(BF16), linear.bias))
seen.append(gradient(embedding, torch.zeros(N_TOKENS, dtype=torch.long), embedding.weight))
values = [int(gradient) for gradient in seen]
print(
    "8192 ones: LayerNorm bfloat16 {}, its weights float32 under autocast {}, float32 {}; RMSNorm bfloat16 {}; "
    "Linear bfloat16 {}; Embedding bfloat16 {}".format(*values)
)
assert seen[1].dtype == torch.float32
assert values == [256, 256, 8192, 8192, 8192, 256], values
PYTHON
