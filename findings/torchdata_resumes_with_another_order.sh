#!/bin/sh
# torchdata 0.11.0, torch 2.13.0: with a generator, a resumed StatefulDataLoader reads later epochs in another order.
#
# state_dict holds where the sampler's random numbers began. The rest of the interrupted epoch is then right, so a
# test that compares it passes. In one process, the loader draws a number for its workers from the same generator before
# each epoch, and after loading these draws are in other places: from the next epoch on, a resumed run differs from an
# uninterrupted one. Without generator=, with it on the sampler instead, or with workers, all epochs are right.
# Guess: a stateful loader that resumes an epoch exactly continues exactly.
# Output seen: epochs as without interruption: generator of the loader True False False, of the sampler True True True,
# none True True True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 torchdata==0.11.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
DATA = list(range(10))


def build_generator():
    return torch.Generator().manual_seed(0)


def with_loaders_generator():
    return StatefulDataLoader(DATA, batch_size=2, shuffle=True, generator=build_generator())


def with_samplers_generator():
    return StatefulDataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, generator=build_generator()))


def without_generator():
    return StatefulDataLoader(DATA, batch_size=2, shuffle=True)


def read_epoch(batches):
    return [batch.tolist() for batch in batches]


def compare(build):
    """Whether each of three epochs is the same after an interruption in the first."""
    torch.manual_seed(0)
    loader = build()
    expected = [read_epoch(loader) for _ in range(3)]
    torch.manual_seed(0)
    loader = build()
    batches = iter(loader)
    start = [next(batches).tolist(), next(batches).tolist()]
    state = loader.state_dict()
    torch.manual_seed(0)
    resumed = build()
    resumed.load_state_dict(state)
    epochs = [start + read_epoch(resumed), read_epoch(resumed), read_epoch(resumed)]
    return [epoch == other for epoch, other in zip(epochs, expected, strict=True)]


results = [compare(build) for build in (with_loaders_generator, with_samplers_generator, without_generator)]
shown = [" ".join(str(is_equal) for is_equal in result) for result in results]
print(
    f"epochs as without interruption: generator of the loader {shown[0]}, of the sampler {shown[1]}, "
    f"none {shown[2]}"
)
assert results[0] == [True, False, False], results
assert results[1] == [True, True, True], results
assert results[2] == [True, True, True], results
PYTHON
