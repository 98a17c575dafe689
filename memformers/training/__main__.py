"""``python -m memformers.training FOLDER [--resume]``: train the run that ``FOLDER/config.json`` describes.

A comparison trains each model so, in a process of its own: what one run does to the process (labml's
state, peak memory, random state) can't reach the next.
"""

import sys
from pathlib import Path

from memformers.command_line import plain_errors
from memformers.files import config_from_dict, read_json
from memformers.run_folder import CONFIG
from memformers.training.config import TrainConfig
from memformers.training.run import train_run

if __name__ == "__main__":
    with plain_errors():
        folder = Path(sys.argv[1])
        config = read_json(folder / CONFIG)
        resume = sys.argv[2:] == ["--resume"]
        train_run(config_from_dict(TrainConfig, config, CONFIG), folder, resume=resume)
