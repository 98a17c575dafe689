#!/bin/sh
# torch 2.13.0: a loaded learning-rate schedule has the length of the saved one, and after its end the rate rises again.
#
# load_state_dict of a scheduler replaces every attribute, so also those given to the constructor: T_max and eta_min of
# CosineAnnealingLR. A finished run that is continued with a longer cosine gets the old one: after T_max, the cosine
# turns and the rate rises to its peak. Nothing is raised. LambdaLR doesn't save its function, so the same cosine as
# a function has the new length.
# Guess: settings come from the constructor, and the state is the number of steps.
# Output seen: of 20 steps the 10 last after resuming at 10: CosineAnnealingLR T_max 10, 0.02 to 1.00; LambdaLR 0.42 to
# 0.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR


def cosine(step, n_steps):
    return (1 + math.cos(math.pi * step / n_steps)) / 2


def as_function(optimizer, n_steps):
    return LambdaLR(optimizer, lambda step: cosine(step, n_steps))


def rates(scheduler, n):
    values = []
    for _ in range(n):
        scheduler.optimizer.step()
        scheduler.step()
        values.append(scheduler.get_last_lr()[0])
    return values


def new(build, n_steps):
    return build(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), n_steps)


def resumed(build):
    """The scheduler and its rates in steps 11 to 20, after 10 steps of a schedule of 10."""
    first = new(build, 10)
    rates(first, 10)
    second = new(build, 20)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    return second, rates(second, 10)


built_in, turned = resumed(CosineAnnealingLR)
_, fell = resumed(as_function)
print(
    f"of 20 steps the 10 last after resuming at 10: CosineAnnealingLR T_max {built_in.T_max}, "
    f"{turned[0]:.2f} to {turned[-1]:.2f}; LambdaLR {fell[0]:.2f} to {fell[-1]:.2f}"
)
assert built_in.T_max == 10
assert turned == sorted(turned)
assert math.isclose(turned[-1], 1.0)
assert fell == sorted(fell, reverse=True)
assert math.isclose(fell[-1], 0.0, abs_tol=1e-9)
PYTHON
