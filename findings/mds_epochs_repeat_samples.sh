#!/bin/sh
# mosaicml-streaming 0.10.0, torch 2.13.0: an epoch repeats samples until canonical nodes have the same number.
#
# Samples are dealt to num_canonical_nodes, and a node that has one less gets one twice; len() gives the number
# without them. The setting fixes one order for any number of machines, but it repeats samples also where one process
# reads everything, in order, without a DataLoader. shuffle_algo="py1s" or "py2s" sets it to 64, also for 10 samples. A
# loss over a validation set then counts some samples twice, and a copy of the set has documents twice. With the
# default algorithm, py1e, it is 1 for one machine.
# Guess: a single process reads each sample once, and len(samples) of them.
# Output seen: of 10 samples: default 10, num_canonical_nodes=3 12, py2s 64; len() 10 10 10; with 3 nodes 0 3 6 1 4 7 2 5 8 2
# 5 9
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 mosaicml-streaming==0.10.0 numpy==2.3.5
cd "$folder"
# streaming's classes for images import torchvision, whose build may not fit the one of torch. Nothing here needs it.
mkdir -p torchvision/transforms
echo "" > torchvision/__init__.py
echo "CIFAR10 = VisionDataset = object" > torchvision/datasets.py
echo "" > torchvision/transforms/__init__.py
echo "to_tensor = None" > torchvision/transforms/functional.py
PYTHONPATH=. "$folder/venv/bin/python" - <<'PYTHON' 2> log || { cat log; exit 1; }
from streaming import MDSWriter, StreamingDataset

with MDSWriter(out="samples", columns={"number": "int"}) as writer:
    for i in range(10):
        writer.write({"number": i})


def epoch(**options):
    dataset = StreamingDataset(local="samples", batch_size=1, shuffle=False, **options)
    return [sample["number"] for sample in dataset], len(dataset)


by_default, n_default = epoch()
three_nodes, n_three = epoch(num_canonical_nodes=3)
py2s, n_py2s = epoch(shuffle_algo="py2s")
print(
    f"of 10 samples: default {len(by_default)}, num_canonical_nodes=3 {len(three_nodes)}, py2s {len(py2s)}; "
    f"len() {n_default} {n_three} {n_py2s}; with 3 nodes {' '.join(map(str, three_nodes))}"
)
assert by_default == list(range(10)), by_default
assert three_nodes == [0, 3, 6, 1, 4, 7, 2, 5, 8, 2, 5, 9], three_nodes
assert len(py2s) == 64, len(py2s)
assert (n_default, n_three, n_py2s) == (10, 10, 10)
PYTHON
