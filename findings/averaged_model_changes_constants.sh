#!/bin/sh
# torch 2.13.0: an exponential average with use_buffers=True changes constant integer buffers, and a count stands still.
#
# AveragedModel averages buffers, too, if use_buffers is true. For integers it computes in float32 and cuts the
# fraction off. d * x + (1 - d) * x of the same x is often just below x, so x becomes x - 1: with d = 0.9, a
# quarter of the numbers 0 … 2047 do, as in a buffer of positions or a table of ids. A count that grows by less than
# 1 / (1 - d) in each update never moves. With avg_fn instead of multi_avg_fn, a Boolean mask raises.
# Guess: averages of equal integers are the integers, or only floating-point buffers are averaged.
# Output seen: of 2048 constants, changed: decay 0.9 575, 0.99 0, 0.9999 418; a count of 100 steps is 1
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

N_POSITIONS = 2048


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("positions", torch.arange(N_POSITIONS))
        self.register_buffer("n_steps", torch.zeros((), dtype=torch.long))


def average(decay):
    model = Model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(100):
        model.n_steps += 1
        averaged.update_parameters(model)
    assert torch.equal(model.positions, torch.arange(N_POSITIONS))
    changed = averaged.module.positions != model.positions
    return int(changed.sum()), averaged.module.n_steps.item()


results = [average(decay) for decay in (0.9, 0.99, 0.9999)]
changed = [result[0] for result in results]
print(
    f"of {N_POSITIONS} constants, changed: decay 0.9 {changed[0]}, 0.99 {changed[1]}, 0.9999 {changed[2]}; "
    f"a count of 100 steps is {results[2][1]}"
)
assert changed[0] > 100, changed
assert changed[1] == 0, changed
assert changed[2] > 100, changed
assert results[2][1] == 1, results
PYTHON
