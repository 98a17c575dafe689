#!/bin/sh
# torch 2.13.0: the learning rate of torch.optim.Adafactor is an upper bound: step t uses at most 1 / sqrt(t).
#
# A constant rate of 0.1 is constant for 100 steps, and then falls as 1 / sqrt(t); a warmup that ends at step 1000
# with 0.1 never gets beyond 0.03. get_last_lr() and param_groups show the rate that was set. In the paper and in
# transformers, this decay belongs to the relative step size, and a rate that one sets is used as it is
# (relative_step=False). A search for a better rate sees no difference between large ones.
# Guess: with a constant lr and constant gradients, each step is as large as the first.
# Output seen: lr 0.5, size of step 1 0.500, 4 0.500, 5 0.447, 25 0.200, 100 0.100; lr 0.2, of step 100 0.100; lr shown 0.5
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import math

import torch


def sizes_of_steps(learning_rate):
    """The changes of a weight that is 1 before each of 100 steps, with a gradient of 1."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adafactor([weight], lr=learning_rate, weight_decay=0.0)
    sizes = []
    for _ in range(100):
        weight.data.fill_(1.0)
        weight.grad = torch.ones(4)
        optimizer.step()
        sizes.append(1.0 - weight[0].item())
    return sizes, optimizer.param_groups[0]["lr"]


sizes, shown = sizes_of_steps(0.5)
smaller, _ = sizes_of_steps(0.2)
seen = ", ".join(f"{step} {sizes[step - 1]:.3f}" for step in (1, 4, 5, 25, 100))
print(f"lr 0.5, size of step {seen}; lr 0.2, of step 100 {smaller[-1]:.3f}; lr shown {shown}")
for rate, of_rate in ((0.5, sizes), (0.2, smaller)):
    for i, size in enumerate(of_rate):
        assert math.isclose(size, min(rate, (i + 1) ** -0.5), rel_tol=1e-3), (rate, i, size)
assert shown == 0.5
PYTHON
