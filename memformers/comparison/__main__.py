"""``python -m memformers.comparison FOLDER [SETTING=CLASS …]``: train the run that ``FOLDER/config.json``
describes, with these classes of the user's own.

An experiment trains each run in this way, in a separate process, so that the state of the process (labml's
state, peak memory, random state) can't influence the next run.
"""

import sys
from pathlib import Path

from memformers.common.command_line import plain_errors
from memformers.common.files import read_json
from memformers.common.machine import keep_freed_memory
from memformers.comparison.recall_training import RECALL
from memformers.comparison.text import TEXT
from memformers.models.registry import name_of
from memformers.runs.folder import CONFIG

if __name__ == "__main__":
    with plain_errors():
        keep_freed_memory()
        folder = Path(sys.argv[1])
        for path in sys.argv[2:]:
            name_of(path)
        task = RECALL if RECALL.name in read_json(folder / CONFIG) else TEXT
        task.train(folder)
