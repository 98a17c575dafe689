#!/bin/sh
# torch 2.13.0: within one autocast block, a model computes with the weights of its first call, whatever they are now.
#
# Autocast caches the low-precision copy of each weight until the block ends, and does not notice that an optimizer
# has changed the weight. A loop of training steps inside one torch.autocast block, or a model that learns while it
# reads a text in one, has a constant loss, while its float32 weights move further and further. There is no error
# and no warning. cache_enabled=False, or a block for each step, is right.
# Guess: a weight that was changed in place is cast again.
# Output seen: one block: 4.000 4.000 4.000; a block a step: 4.000 1.448 0.517; no cache: 4.000 1.448 0.517
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from contextlib import nullcontext

import torch


def losses(around_all, around_step):
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 2.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    seen = []
    with around_all():
        for _ in range(3):
            with around_step():
                loss = layer(torch.ones(1, 1)).float().square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


def autocast(cache_enabled=True):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)


one_block = losses(autocast, nullcontext)
by_step = losses(nullcontext, autocast)
no_cache = losses(lambda: autocast(cache_enabled=False), nullcontext)
shown = [" ".join(f"{x:.3f}" for x in values) for values in (one_block, by_step, no_cache)]
print("one block: %s; a block a step: %s; no cache: %s" % tuple(shown))
assert one_block == [4.0, 4.0, 4.0]
assert by_step == no_cache
assert by_step[2] < 0.6
PYTHON
