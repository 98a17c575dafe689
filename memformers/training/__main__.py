"""``python -m memformers.training FOLDER [--resume]``: train the run that ``FOLDER/config.json`` describes.

A comparison trains each model in this way, in a separate process, so that the state of the process (labml's
state, peak memory, random state) can't influence the next run.
"""

import sys
from pathlib import Path

from memformers.common.command_line import plain_errors
from memformers.training.config import read_train_config
from memformers.training.run import train_run

if __name__ == "__main__":
    with plain_errors():
        folder = Path(sys.argv[1])
        train_run(read_train_config(folder), folder, resume=sys.argv[2:] == ["--resume"])
