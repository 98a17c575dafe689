#!/bin/sh
# grain 0.2.18: a DataLoader's Batch puts other samples together, and gives more batches, with more workers.
#
# Each worker takes every n-th sample, and batches its own. So a batch isn't of consecutive samples, the last batch
# of each worker may be smaller, and drop_remainder drops up to one batch for each worker. An epoch's number of steps,
# and with it a schedule or the average of batches' losses in an evaluation, depends on worker_count; where a batch is
# to continue the texts of the one before, it no longer does.
# Guess: workers change the speed, not the data, as in PyTorch's DataLoader with its batches of one sampler.
# Output seen: 10 samples in batches of 4: without workers 0,1,2,3 4,5,6,7 8,9; with 2 workers 0,2,4,6 1,3,5,7 8 9
# drop_remainder, batches of 5: without workers 10 samples, with 3 workers 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile grain==0.2.18 numpy==2.3.5
cd "$folder"
cat > batches.py <<'PYTHON'
import sys

import grain
from absl import flags


def batches(n_workers, size=4, drop_remainder=False):
    return [
        batch.tolist()
        for batch in grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, 10, 1),
            sampler=grain.samplers.IndexSampler(num_records=10, shuffle=False, num_epochs=1),
            operations=[grain.transforms.Batch(size, drop_remainder=drop_remainder)],
            worker_count=n_workers,
        )
    ]


def shown(values):
    return " ".join(",".join(map(str, batch)) for batch in values)


if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    alone, with_two = batches(0), batches(2)
    kept_alone = sum(map(len, batches(0, 5, True)))
    kept_with_three = sum(map(len, batches(3, 5, True)))
    print(
        f"10 samples in batches of 4: without workers {shown(alone)}; with 2 workers {shown(with_two)}\n"
        f"drop_remainder, batches of 5: without workers {kept_alone} samples, with 3 workers {kept_with_three}"
    )
    assert alone == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], alone
    assert with_two == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]], with_two
    assert kept_alone == 10
    assert kept_with_three == 0
PYTHON
"$folder/venv/bin/python" batches.py
