#!/bin/sh
# torch 2.13.0: DistributedDataParallel replaces a memory in a buffer by rank 0's before every forward in training.
#
# forward_sync_buffers, formerly broadcast_buffers, is on by default, for BatchNorm, and includes buffers with
# persistent=False. So a module that keeps its recurrent memory in a buffer continues rank 0's stream on all ranks.
# With forward_sync_buffers=False, or with a memory that is passed in and returned, each rank continues its own.
# Guess: a buffer that is not part of the state dict stays with its rank.
# Output seen: default: rank 0 [1, 2, 3], rank 1 [2, 3, 4]; forward_sync_buffers=False: rank 0 [1, 2, 3], rank 1 [2, 4, 6]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from pathlib import Path

Path("ranks.py").write_text("""
import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("memory", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.memory = self.memory + x.mean()
        return self.layer(x)


def main(rank, options):
    dist.init_process_group("gloo", init_method="file://" + options["file"], rank=rank, world_size=2)
    model = DistributedDataParallel(Summing(), forward_sync_buffers=options["sync"])
    memories = []
    for _ in range(3):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        memories.append(int(model.module.memory))
    with open(f"{options['name']}.{rank}", "w") as file:
        json.dump(memories, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    name = sys.argv[1]
    mp.spawn(main, ({"name": name, "file": sys.argv[2], "sync": name == "default"},), 2)
""")
import json
import os
import subprocess
import sys

seen = {}
for name in ("default", "forward_sync_buffers=False"):
    subprocess.run([sys.executable, "ranks.py", name, os.path.abspath(name + ".store")], check=True)
    seen[name] = [json.loads(Path(f"{name}.{rank}").read_text()) for rank in range(2)]
print("; ".join(f"{name}: rank 0 {a}, rank 1 {b}" for name, (a, b) in seen.items()))
assert seen["default"] == [[1, 2, 3], [2, 3, 4]]
assert seen["forward_sync_buffers=False"] == [[1, 2, 3], [2, 4, 6]]
PYTHON
