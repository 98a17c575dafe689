#!/bin/sh
# torchmetrics 1.9.0, torch 2.13.0: metrics of a MetricCollection whose first batch gave equal states share one forever.
#
# To compute less, a MetricCollection compares the states after the first update. Metrics of equal states become a group,
# and from then on only the first of them is updated. The settings aren't compared: perplexity of all tokens and of
# all but padding have equal counts after a batch without padding, and stay equal whatever follows. If the first batch
# has padding, both are right. compute_groups=False or named groups avoid it.
# Guess: each metric of a collection computes what it would compute alone.
# Output seen: perplexity without padding: alone 8.59, in a collection 7.60, as of all tokens; padding first: 8.59 and
# 8.59
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math

import torch
from torchmetrics import MetricCollection
from torchmetrics.text import Perplexity

PADDING = 0


def perplexities(batches):
    collection = MetricCollection({"all": Perplexity(), "no_padding": Perplexity(ignore_index=PADDING)})
    alone = Perplexity(ignore_index=PADDING)
    for logits, targets in batches:
        collection.update(logits, targets)
        alone.update(logits, targets)
    values = collection.compute()
    return alone.compute().item(), values["no_padding"].item(), values["all"].item()


torch.manual_seed(0)
full = torch.randn(2, 4, 5), torch.randint(1, 5, (2, 4))
logits, targets = torch.randn(2, 4, 5), torch.randint(1, 5, (2, 4))
targets[:, 2:] = PADDING
padded = logits, targets
alone, shared, of_all = perplexities([full, padded])
print(
    f"perplexity without padding: alone {alone:.2f}, in a collection {shared:.2f}, as of all tokens; ", end=""
)
alone_2, shared_2, of_all_2 = perplexities([padded, full])
print(f"padding first: {alone_2:.2f} and {shared_2:.2f}")
assert shared == of_all
assert not math.isclose(shared, alone, rel_tol=0.01)
assert math.isclose(shared_2, alone_2, rel_tol=1e-5)
assert not math.isclose(shared_2, of_all_2, rel_tol=0.01)
assert math.isclose(alone_2, alone, rel_tol=1e-5)
PYTHON
