#!/bin/sh
# torch 2.13.0: Module.to(torch.bfloat16) keeps only the real part of complex weights; .bfloat16() leaves them complex.
#
# Linear recurrent units and state-space models such as S5 have complex weights. .to() with a real dtype converts
# these too: their angles, which are the frequencies of the recurrence, are gone, also by .to(torch.float32) of a
# model that is in float32 already. A process shows one warning, at the first of these conversions. .half(),
# .bfloat16(), .float() and .double() leave complex weights as they are, so a comparison after .double() still has
# the rounding of complex64.
# Guess: .to(torch.bfloat16) and .bfloat16() do the same, .double() gives complex128, and nothing loses a part.
# Output seen: 3+4j after .bfloat16() complex64 (3+4j), .double() complex64 (3+4j), .to(bfloat16) bfloat16 3.0,
# .to(float32) float32 3.0, .to(float64) float64 3.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor([3 + 4j]))
        self.skip = nn.Parameter(torch.ones(1))


def short(dtype):
    return str(dtype).removeprefix("torch.")


models = {".bfloat16()": Recurrence().bfloat16(), ".double()": Recurrence().double()}
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    models[f".to({short(dtype)})"] = Recurrence().to(dtype)
results = {name: f"{short(model.decay.dtype)} {model.decay.item()}" for name, model in models.items()}
print("3+4j after " + ", ".join(f"{name} {result}" for name, result in results.items()))
assert models[".double()"].skip.dtype == torch.float64
assert results == {
    ".bfloat16()": "complex64 (3+4j)",
    ".double()": "complex64 (3+4j)",
    ".to(bfloat16)": "bfloat16 3.0",
    ".to(float32)": "float32 3.0",
    ".to(float64)": "float64 3.0",
}
PYTHON
