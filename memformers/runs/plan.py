"""The plan of a comparison: ``compare.json``, beside the folders of its runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memformers.common.files import config_from_dict, read_json
from memformers.runs.folder import COMPARISON

BASELINE = "transformer-xl"
"""The arm that the others are compared with, if there is one of this name."""


@dataclass(frozen=True)
class Planned:
    """Which arm and seed a run is."""

    arm: str
    seed: int


@dataclass(frozen=True)
class PlannedArm:
    """An arm: a name, and the settings in which it differs from the training that all share."""

    name: str
    settings: dict[str, Any]
    """By their dotted names, such as ``model.mem_len``."""


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, finished or not."""

    train: dict[str, Any]
    """The training that all share, of the first seed."""
    arms: tuple[PlannedArm, ...]
    runs: dict[str, Planned] = field(default_factory=dict)
    """By the names of their folders, in the order in which they are trained."""
    commands: tuple[str, ...] = ()
    """Those that began it and went on with it."""


def read_plan(folder: Path) -> Plan | None:
    """The plan of the comparison in ``folder``; None if there is none, because the runs were not trained
    together. ValueError for one that can't be read."""
    path = folder / COMPARISON
    return config_from_dict(Plan, read_json(path), str(path)) if path.is_file() else None


def run_name(arm: str, seed: int, first: int) -> str:
    """The name of a run's folder: that of its arm, and beyond the ``first`` seed the seed."""
    return arm if seed == first else f"{arm}-seed{seed}"


def runs_of(arms: Sequence[str], seeds: Sequence[int]) -> dict[str, Planned]:
    """All arms of the first seed, then of the next, so that a comparison that stops early is still fair."""
    return {run_name(arm, seed, seeds[0]): Planned(arm, seed) for seed in seeds for arm in arms}


def baseline_of(arms: Sequence[str]) -> str:
    """The arm that the others are compared with: Transformer-XL, or else the first one."""
    return BASELINE if BASELINE in arms else arms[0]


def compared_with(runs: Mapping[str, Planned], name: str) -> str:
    """The run with which a dashboard compares the run ``name``: that of the baseline from the same seed, and
    for the baseline that of the first other arm; empty if there is no other run."""
    same_seed = {run.arm: other for other, run in runs.items() if run.seed == runs[name].seed}
    del same_seed[runs[name].arm]
    return same_seed[baseline_of(list(same_seed))] if same_seed else ""
