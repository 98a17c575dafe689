"""A recall experiment that takes a moment."""

from pathlib import Path

import pytest
from filelock import FileLock

from memformers.comparison.experiment import run_experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.report import plotting
from tests.fixtures import make_tiny


@pytest.fixture(scope="session")
def done(for_all):
    """The folder of an experiment of all arms from two seeds; to be read only."""
    folder: Path = for_all / "recall"
    with FileLock(for_all / "recall.lock"), pytest.MonkeyPatch.context() as patch:
        make_tiny(patch)
        patch.setattr(plotting, "save", lambda _, path: path.touch())
        if not (folder / "report.html").exists():
            run_experiment(RecallConfig(seeds=2).experiment(), folder)
    return folder
