#!/bin/sh
# torch 2.13.0: with a tensor as learning rate, all groups of an optimizer have the last group's rate.
#
# A tensor avoids recompilation when a compiled step changes its rate, and with capturable=True it is needed. The
# optimizer puts this one tensor into every group, and a scheduler fills it in place, group after group: whatever
# LambdaLR computes for the first group is overwritten by the next, without a warning. With a float, each group has
# its own. The caller's tensor changes, too, so an optimizer that is built with it afterwards starts at another rate.
# A bug of this kind, with one group, was fixed (github.com/pytorch/pytorch/issues/126854).
# Guess: lr=torch.tensor(0.1) trains as lr=0.1 does.
# Output seen: float: rates 0.1 0.01; tensor: rates 0.01 0.01; the caller's tensor 0.01
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def rates(lr):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


tensor = torch.tensor(0.1)
as_float = rates(0.1)
as_tensor = rates(tensor)
callers = round(tensor.item(), 4)
print(
    f"float: rates {as_float[0]} {as_float[1]}; tensor: rates {as_tensor[0]} {as_tensor[1]}; "
    f"the caller's tensor {callers}"
)
assert as_float == [0.1, 0.01]
assert as_tensor == [0.01, 0.01]
assert callers == 0.01
PYTHON
