#!/bin/sh
# webdataset 1.0.2: with_epoch(n) ends an epoch after n samples, and each epoch begins with the same ones.
#
# with_epoch gives a large data set short epochs. It is, says the documentation, islice over the dataset: of a new
# iterator each time, so the next epoch doesn't go on where the last one ended, not even after repeat(), and training
# never sees the rest. shardshuffle doesn't help: without a seed, one is drawn when the dataset is built, and each
# epoch shuffles the shards alike (an open pull request, github.com/webdataset/webdataset/pull/502, is about
# this). detshuffle=True and resampled=True do reach other samples.
# Guess: n epochs of 1/n of the data are one pass over it; shuffled shards are shuffled again in each epoch.
# Output seen: of 18 samples, 9 epochs of 4 reach: with_epoch 4, repeat and with_epoch 4, shardshuffle 4, detshuffle 13
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile webdataset==1.0.2 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io
import tarfile

import webdataset as wds

for shard in range(6):
    with tarfile.open(f"{shard}.tar", "w") as archive:
        for i in range(3):
            info = tarfile.TarInfo(f"{shard}{i}.txt")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"text"))
SHARDS = "{0..5}.tar"


def reached(dataset):
    """The number of different samples in 9 epochs of 4."""
    keys = set()
    for _ in range(9):
        keys.update(sample["__key__"] for sample in dataset.with_epoch(4))
    return len(keys)


in_order = reached(wds.WebDataset(SHARDS, shardshuffle=False))
repeated = reached(wds.WebDataset(SHARDS, shardshuffle=False).repeat(9))
shuffled = reached(wds.WebDataset(SHARDS, shardshuffle=100))
by_epoch = reached(wds.WebDataset(SHARDS, shardshuffle=100, detshuffle=True, seed=3))
print(
    f"of 18 samples, 9 epochs of 4 reach: with_epoch {in_order}, repeat and with_epoch {repeated}, "
    f"shardshuffle {shuffled}, detshuffle {by_epoch}"
)
assert (in_order, repeated, shuffled) == (4, 4, 4)
assert by_epoch > 4, by_epoch
PYTHON
