#!/bin/sh
# litdata 0.2.76, torch 2.13.0: optimize writes each sample in the form of the first: longer lists are cut, shorter get zeros.
#
# A list's number of items and an array's dtype are stored once, from the first sample, and not compared with those of
# the next ones. Of lists of ids, longer documents lose their end and shorter ones end with zeros, which may be ids;
# later arrays of 64-bit ids are read as 32-bit ids, twice their number. There is no error, neither when writing nor
# when reading. Lists within a dict, and arrays of one dtype, are stored whole.
# Guess: samples have their own lengths, since the format is for texts; another dtype is converted or refused.
# Output seen: [7, 8] [3, 4, 5] [6] -> [7, 8] [3, 4] [6, 0]; in a dict [7, 8] [3, 4, 5] [6]; int32 [7, 8] and int64 [3, 4]
# -> [7, 8] [3, 0, 4, 0]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 litdata==0.2.76 numpy==2.3.5
cd "$folder"
cat > written.py <<'PYTHON'
import numpy as np
from litdata import StreamingDataset, optimize


def unchanged(sample):
    return sample


def read_back(name, samples):
    optimize(
        fn=unchanged, inputs=samples, output_dir=name, chunk_bytes="1MB", num_workers=1, verbose=False
    )
    return list(StreamingDataset(name))


def shown(documents):
    return " ".join(str(list(map(int, ids))) for ids in documents)


if __name__ == "__main__":
    documents = [[7, 8], [3, 4, 5], [6]]
    lists = read_back("lists", documents)
    dicts = [sample["ids"] for sample in read_back("dicts", [{"ids": ids} for ids in documents])]
    arrays = read_back("arrays", [np.array([7, 8], np.int32), np.array([3, 4], np.int64)])
    print(
        f"{shown(documents)} -> {shown(lists)}; in a dict {shown(dicts)}; int32 [7, 8] and int64 [3, 4] -> "
        f"{shown(arrays)}"
    )
    assert lists == [[7, 8], [3, 4], [6, 0]], lists
    assert dicts == documents, dicts
    assert [list(ids) for ids in arrays] == [[7, 8], [3, 0, 4, 0]], arrays
PYTHON
"$folder/venv/bin/python" written.py 2> log || { cat log; exit 1; }
