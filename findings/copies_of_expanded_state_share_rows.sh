#!/bin/sh
# torch 2.13.0: a deep copy of an expanded tensor is one row in memory, and resetting the state of one stream resets all.
#
# A learned first state is expanded over the batch, and its copy is to be changed. clone() gives each stream a row of its
# own. copy.deepcopy, also of a module with such a buffer, pickle, and torch.save with torch.load keep the stride of
# 0: copy[0] = 1 writes to every row, without a message, and copy[mask] = 1 does so with a deprecation warning. Only
# some operations, such as copy.add_(1), refuse. Neither shape nor values show that a state is still expanded.
# Guess: a deep copy, and certainly a tensor read from a file, has its own elements.
# Output seen: of 4 rows, copy[0] = 1 changes: clone 1, deepcopy 4, deepcopy of a module 4, pickle 4, torch.load 4;
# copy[mask] = 1 for one row: clone 1, deepcopy 4, deepcopy of a module 4, pickle 4, torch.load 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy
import io
import pickle

import torch

FIRST_ROW = torch.tensor([True, False, False, False])


def expanded():
    return torch.zeros(3).expand(4, 3)


def of_a_module():
    module = torch.nn.Module()
    module.register_buffer("state", expanded())
    return copy.deepcopy(module).state


def saved_and_loaded():
    file = io.BytesIO()
    torch.save(expanded(), file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "clone": lambda: expanded().clone(),
    "deepcopy": lambda: copy.deepcopy(expanded()),
    "deepcopy of a module": of_a_module,
    "pickle": lambda: pickle.loads(pickle.dumps(expanded())),
    "torch.load": saved_and_loaded,
}


def n_changed_rows(state, rows):
    state[rows] = 1
    return int(state.any(dim=1).sum())


by_index = {name: n_changed_rows(build(), 0) for name, build in COPIES.items()}
by_mask = {name: n_changed_rows(build(), FIRST_ROW) for name, build in COPIES.items()}
shown = [", ".join(f"{name} {n}" for name, n in numbers.items()) for numbers in (by_index, by_mask)]
print(f"of 4 rows, copy[0] = 1 changes: {shown[0]}; copy[mask] = 1 for one row: {shown[1]}")
assert by_index.pop("clone") == by_mask.pop("clone") == 1
assert set(by_index.values()) == set(by_mask.values()) == {4}
try:
    copy.deepcopy(expanded()).add_(1)
    raise SystemExit("add_ no longer refuses an expanded tensor")
except RuntimeError:
    pass
PYTHON
