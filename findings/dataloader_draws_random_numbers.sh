#!/bin/sh
# torch 2.13.0: every pass over a DataLoader draws from the global generator, also in order and without workers.
#
# iter(DataLoader(data)) draws a seed for worker processes, even with num_workers=0, shuffle=False and a map-style
# dataset. So an evaluation in the middle of a training changes the dropout and the initializations that come after
# it, and two trainings of one seed that are evaluated at different steps differ. DataLoader(generator=...) draws
# the seed from there and leaves the global generator alone.
# Guess: reading in order in this process uses no random numbers.
# Output seen: plain loop same, DataLoader changed, DataLoader with a generator same
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.utils.data import DataLoader

data = torch.arange(8)


def outcome(read):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for _ in read():
        pass
    return "same" if torch.equal(before, torch.get_rng_state()) else "changed"


seen = [
    outcome(lambda: data.split(2)),
    outcome(lambda: DataLoader(data, batch_size=2, shuffle=False, num_workers=0)),
    outcome(lambda: DataLoader(data, batch_size=2, generator=torch.Generator())),
]
print("plain loop %s, DataLoader %s, DataLoader with a generator %s" % tuple(seen))
assert seen == ["same", "changed", "same"], seen
PYTHON
