#!/bin/sh
# torch 2.13.0, CPU: the mean of cross_entropy is percents off for bfloat16 logits, the mean of its terms is not.
#
# nll_loss and cross_entropy add the losses of all tokens in bfloat16. For equal logits over 50 classes each loss is
# 3.90625, but their mean over 10,000 tokens comes out as 4.0: a perplexity of 54.6 instead of 50. The error depends
# on the number of tokens, so batches of different sizes can't be compared. Gradients are right. The same losses with
# reduction="none" and mean() give 3.90625, and float32 logits 3.91202.
# Guess: a mean of equal numbers is that number; reductions add in float32, as mean() does.
# Output seen: 256 tokens: 3.984375; 10000 tokens: 4.0; 1000000 tokens: 3.984375; terms, then mean: 3.90625; float32:
# 3.91202
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

torch.set_num_threads(1)


def losses(n_tokens, **options):
    logits = torch.zeros(n_tokens, 50, dtype=torch.bfloat16)
    return F.cross_entropy(logits, torch.zeros(n_tokens, dtype=torch.long), **options)


terms = losses(10_000, reduction="none").mean().item()
exact = F.cross_entropy(torch.zeros(10_000, 50), torch.zeros(10_000, dtype=torch.long)).item()
sizes = (256, 10_000, 1_000_000)
means = [losses(n).item() for n in sizes]
for n, mean in zip(sizes, means, strict=True):
    print(f"{n} tokens: {mean}", end="; ")
print(f"terms, then mean: {terms}; float32: {exact:.5f}")
assert terms == 3.90625, terms
assert abs(exact - 3.91202) < 1e-4, exact
assert all(mean >= 1.015 * terms for mean in means), means
PYTHON
