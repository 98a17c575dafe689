#!/bin/sh
# torch 2.13.0: FlopCounterMode counts no operation of attention on a CPU, nor of an LSTM.
#
# The counter knows the operators of attention on a GPU. On a CPU, scaled_dot_product_attention is another operator,
# without a formula, and counts as 0, forward and backward; the same attention as two products counts in full. So
# on a CPU a model with fused attention seems to need fewer operations than the same model without, and the
# longer its keys or memory, the more is missing. LSTM counts 0 and LSTMCell in full. There is no warning.
# Guess: both forms count the same, or an operator without a formula is reported.
# Output seen: attention fused 0, as products 16384, with backward 0 and 49152; LSTM 0, LSTMCell 16384
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

LENGTH, N_HEADS, D_HEAD = 16, 2, 8


def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def products(q):
    return (q @ q.mT / D_HEAD**0.5).softmax(-1) @ q


def fused(q):
    return F.scaled_dot_product_attention(q, q, q)


def step_lstm_cell(cell, x):
    state = None
    for vector in x:
        state = cell(vector, state)


q = torch.randn(1, N_HEADS, LENGTH, D_HEAD, requires_grad=True)
torch.testing.assert_close(fused(q), products(q))
with torch.no_grad():
    forward = [count(lambda f=f: f(q)) for f in (fused, products)]
both = [count(lambda f=f: f(q).sum().backward()) for f in (fused, products)]
x = torch.randn(16, 1, 8)
with torch.no_grad():
    of_lstm = count(lambda: nn.LSTM(8, 8)(x))
    of_cell = count(lambda: step_lstm_cell(nn.LSTMCell(8, 8), x))
print(
    f"attention fused {forward[0]}, as products {forward[1]}, with backward {both[0]} and {both[1]}; "
    f"LSTM {of_lstm}, LSTMCell {of_cell}"
)
expected = 2 * (2 * N_HEADS * LENGTH * LENGTH * D_HEAD)
assert forward == [0, expected], forward
assert both == [0, 3 * expected], both
assert of_lstm == 0, of_lstm
assert of_cell == 16 * 2 * (2 * 8 * 4 * 8), of_cell
PYTHON
