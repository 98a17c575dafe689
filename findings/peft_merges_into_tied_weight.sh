#!/bin/sh
# peft 0.21.2, torch 2.13.0: merging LoRA of a tied head also changes the embedding, and so the model's output.
#
# The adapter of a head adds to the head's output alone. merge_and_unload adds it to the head's weight, which is the
# embedding's parameter, too; the merged model reads other embeddings and computes other logits. For a module
# without a transformers config there is no warning. The same adapter of an untied head merges exactly.
# Guess: a merged model computes what the adapted one did, or the merge is refused.
# Output seen: untied equal True, tied equal False, still tied True, warnings 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@torch.no_grad()
def merge(tied):
    torch.manual_seed(0)
    adapted = get_peft_model(Model(tied), LoraConfig(target_modules=["head"], r=2))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(weight, std=0.5)
    before = adapted(torch.arange(5))
    merged = adapted.merge_and_unload()
    is_tied = merged.head.weight is merged.embed.weight
    return torch.allclose(before, merged(torch.arange(5)), atol=1e-5), is_tied


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    untied, _ = merge(False)
    tied, is_tied = merge(True)
n_warnings = sum("tie" in str(w.message) for w in caught)
print(f"untied equal {untied}, tied equal {tied}, still tied {is_tied}, warnings {n_warnings}")
assert (untied, tied, is_tied, n_warnings) == (True, False, True, 0)
PYTHON
