#!/bin/sh
# torch 2.13.0: load_state_dict(assign=True) makes one tied weight two parameters that share their numbers.
#
# A model with a tied embedding and head has one parameter. torch.save keeps the tie, as one storage; loading with
# assign=True puts a separate nn.Parameter at each of the two names, on that storage. The model computes the same,
# so nothing shows it, but each parameter has its own gradient, the optimizer steps both, and each step changes
# the shared numbers twice: with Adam, about twice as far. Without assign, the model stays tied.
# Guess: either the tie is kept, or the two become independent copies.
# Output seen: assign=False: 1 parameter, moves 0.10; assign=True: 2 parameters on 1 storage, moves 0.20
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def outcome(assign):
    model = Tied()
    model.load_state_dict(torch.load("model.pt"), assign=assign)
    before = model.embed.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tokens = torch.arange(4)
    nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
    optimizer.step()
    parameters = list(model.parameters())
    storages = {p.data_ptr() for p in parameters}
    return len(parameters), len(storages), (model.embed.weight - before).abs().max().item()


torch.manual_seed(0)
torch.save(Tied().state_dict(), "model.pt")
kept, assigned = outcome(False), outcome(True)
print(f"assign=False: {kept[0]} parameter, moves {kept[2]:.2f}; ", end="")
print(f"assign=True: {assigned[0]} parameters on {assigned[1]} storage, moves {assigned[2]:.2f}")
assert kept[:2] == (1, 1)
assert assigned[:2] == (2, 1)
assert abs(kept[2] - 0.1) < 0.001
assert abs(assigned[2] - 0.2) < 0.001
PYTHON
