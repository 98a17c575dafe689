"""A task: what the runs of an experiment read, how they are trained, and what is measured of them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from memformers.common.command_line import cli_errors
from memformers.common.files import config_from_dict
from memformers.common.machine import keep_freed_memory
from memformers.models.config import NetworkConfig
from memformers.models.registry import import_memory
from memformers.runs.plan import TaskInfo
from memformers.training.config import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)


class Task(Generic[Config]):
    """What the runs of an experiment read, and what is measured of them. ``Config`` is the class of a run's
    settings: a [`TrainConfig`][memformers.TrainConfig], with fields of the task."""

    name: str
    """In the plan of an experiment."""
    config: type[Config]
    """The class of a run's settings."""
    resumes = True
    """Whether a training run that was stopped continues; otherwise it starts again."""
    module: str
    """The module that trains a run in a separate process, as [`train_alone`][] does."""
    info = TaskInfo()
    """What reports need to know of a task outside of this package; the plan keeps it."""
    reporter = "memformers.report.document"
    """The module whose ``write_report(folder)`` writes the report and returns it. It is imported when all
    training runs have ended, so that none of them loads matplotlib."""

    def read_config(self, settings: Mapping[str, Any], source: str) -> Config:
        """The settings of a run from its ``config.json``; UserError, with their ``source``, if there is no
        such run."""
        return config_from_dict(self.config, settings, source)

    def find_data(self, runs: Mapping[str, Config], folder: Path) -> dict[str, Any]:
        """The settings with which all ``runs``, by name, read the same source, if there is one. UserError for
        one that can't be used, or isn't that of the runs in ``folder``."""
        return {}

    def train(self, folder: Path) -> None:
        """Train the run that ``config.json`` in ``folder`` describes."""
        raise NotImplementedError

    def network(self, config: Config) -> NetworkConfig | None:
        """The network of a run; None if it has no memory of this package."""
        return config.model

    def measure(self, base: TrainConfig, folder: Path) -> None:
        """Measure the trained models in ``folder`` together. ``base`` is what all arms share."""


def train_alone(task: Task[Any]) -> None:
    """Train the run in the folder named on the command line, with the file of its memory if it has one. Each
    run has a process, so that no state (labml's, peak memory, random numbers) can change the next one."""
    with cli_errors():
        keep_freed_memory()
        folder, *code = sys.argv[1:]
        for path in code:
            import_memory(path)
        task.train(Path(folder))
