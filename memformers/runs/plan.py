"""The plan of an experiment: ``experiment.json``, beside the folders of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memformers.common.files import config_from_dict, read_json
from memformers.runs.folder import EXPERIMENT

BASELINE = "transformer-xl"
"""The arm that the others are compared with, if there is one of this name."""


@dataclass(frozen=True)
class Arm:
    """A name, and the settings in which its trainings differ from what all arms share."""

    name: str
    """The name on the command line and of its folders."""
    settings: dict[str, Any]
    """By their dotted names, such as ``model.mem_len``."""
    label: str = ""
    """The name in tables and figures; empty: the same."""
    rival: str = ""
    """The arm that an experiment of several tasks compares it with; empty: that of most arms."""


@dataclass(frozen=True)
class Planned:
    """Which arm and seed a run is."""

    arm: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """All runs of an experiment, finished or not."""

    task: str
    """What is trained and measured, such as ``text`` or ``recall``."""
    settings: dict[str, Any]
    """What all arms share, of the first seed, as a run's ``config.json`` has it."""
    arms: tuple[Arm, ...]
    runs: dict[str, Planned] = field(default_factory=dict)
    """By the names of their folders, in the order in which they are trained."""
    commands: tuple[str, ...] = ()
    """Those that began it and went on with it."""
    scale: float = 1.0
    """The fraction of the usual number of tokens; below 1, the experiment is a trial."""

    @property
    def seeds(self) -> int:
        """The number of seeds of each arm."""
        return len({run.seed for run in self.runs.values()})


def read_plan(folder: Path) -> Plan | None:
    """The plan of the experiment in ``folder``; None if there is none, because the runs were not trained
    together. UserError for one that can't be read."""
    path = folder / EXPERIMENT
    return config_from_dict(Plan, read_json(path), str(path)) if path.is_file() else None


def runs_of(arms: Sequence[str], seeds: Sequence[int]) -> dict[str, Planned]:
    """All arms of the first seed, then of the next, so that an experiment that stops early is still fair. A
    run has the name of its arm, and beyond the first seed the seed."""
    return {
        arm if seed == seeds[0] else f"{arm}-seed{seed}": Planned(arm, seed) for seed in seeds for arm in arms
    }


def baseline_of(arms: Sequence[str]) -> str:
    """The arm that the others are compared with: Transformer-XL, or else the first one."""
    return BASELINE if BASELINE in arms else arms[0]


def compared_with(runs: Mapping[str, Planned], name: str) -> str:
    """The run with which a dashboard compares the run ``name``: that of the baseline from the same seed, and
    for the baseline that of the first other arm; empty if there is no other run."""
    same_seed = {run.arm: other for other, run in runs.items() if run.seed == runs[name].seed}
    del same_seed[runs[name].arm]
    return same_seed[baseline_of(list(same_seed))] if same_seed else ""
