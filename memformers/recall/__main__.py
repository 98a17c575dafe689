"""``python -m memformers.recall FOLDER``: train and measure the arm that ``FOLDER/config.json`` describes, in
a process of its own, so that its peak memory and its random state are its own."""

import sys
from pathlib import Path

from memformers.common.command_line import plain_errors
from memformers.recall.config import read_run
from memformers.recall.training import train_arm

if __name__ == "__main__":
    with plain_errors():
        train_arm(read_run(Path(sys.argv[1])), Path(sys.argv[1]))
