#!/bin/sh
# minGRU-pytorch 0.2.1, torch 2.13.0: minLSTM adds 0.5 to its state if more than one token follows in a call.
#
# A hidden value passes an activation g, x + 0.5 for positive x, before it enters the state. For several tokens,
# minLSTM passes the state it is given through g once more; for a single token it doesn't, and minGRU never does. So
# a text that is read in segments, as in training with a carried state, has other outputs than the text in one call,
# most at the start of each segment; reading token by token afterwards agrees with the whole text.
# Guess: how a text is split into calls doesn't matter, as in minGRU and nn.LSTM.
# Output seen: largest difference from the whole text, second half in one call: minGRU 0.00, minLSTM 0.37;
# token by token: minGRU 0.00, minLSTM 0.00; minLSTM in one call, with g undone before: 0.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 minGRU-pytorch==0.2.1 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLSTM import minLSTM

N_FIRST = 6
torch.manual_seed(0)
texts = torch.randn(2, 12, 16)


@torch.no_grad()
def differences(layer, undo=lambda state: state):
    whole = layer(texts)[:, N_FIRST:]
    _, first_state = layer(texts[:, :N_FIRST], return_next_prev_hidden=True)
    at_once = layer(texts[:, N_FIRST:], prev_hidden=undo(first_state))
    state = first_state
    by_token = []
    for token in texts[:, N_FIRST:].split(1, dim=1):
        output, state = layer(token, prev_hidden=state, return_next_prev_hidden=True)
        by_token.append(output)
    return [(outputs - whole).abs().max().item() for outputs in (at_once, torch.cat(by_token, dim=1))]


gru = differences(minGRU(16))
layer = minLSTM(16)
lstm = differences(layer)
undone, _ = differences(layer, lambda state: torch.where(state >= 0.5, state - 0.5, state.logit()))
print(
    f"largest difference from the whole text, second half in one call: minGRU {gru[0]:.2f}, minLSTM {lstm[0]:.2f};\n"
    f"token by token: minGRU {gru[1]:.2f}, minLSTM {lstm[1]:.2f}; "
    f"minLSTM in one call, with g undone before: {undone:.2f}"
)
assert max(gru) < 1e-4, gru
assert lstm[1] < 1e-4, lstm
assert lstm[0] > 0.1, lstm
assert undone < 1e-4, undone
PYTHON
