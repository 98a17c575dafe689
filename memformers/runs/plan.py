"""The plan of an experiment, ``experiment.json`` in its folder: its arms, and the runs of each of them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json
from memformers.runs.folder import EXPERIMENT

BASELINE = "transformer-xl"
"""The arm that the others are compared with, if an experiment has it."""


@dataclass(frozen=True)
class PlannedArm:
    """An arm of a plan."""

    name: str
    config: dict[str, Any]
    """All settings of its trainings, of the first seed, as in a run's ``config.json``."""
    label: str = ""
    """The name in tables and figures; empty for the arm's name."""


@dataclass(frozen=True)
class Planned:
    """A run: an arm's training from one seed."""

    arm: str
    seed: int


@dataclass(frozen=True)
class TaskInfo:
    """Facts that a report and the live page need about a task outside of this package."""

    results: tuple[str, ...] = ()
    """The results in ``result.json`` besides the tokens, the times and the peak of memory."""
    memory_settings: tuple[str, ...] = ()
    """The dotted names of settings that choose the memory: arms that differ in them are compared fairly."""
    measure: dict[str, Any] = field(default_factory=dict)
    """What the arms are compared by: the fields of a ``Measure`` (report/arms.py)."""
    curves: dict[str, str] = field(default_factory=dict)
    """Descriptions of the task's metrics, by their names in ``metrics.jsonl``, the most telling one first."""


@dataclass(frozen=True)
class Plan:
    """All runs of an experiment, finished or not."""

    task: str
    """What is trained and measured, such as ``text`` or ``recall``."""
    settings: dict[str, Any]
    """The settings that the arms were derived from, of the first seed, as in a run's ``config.json``."""
    arms: tuple[PlannedArm, ...]
    runs: dict[str, Planned] = field(default_factory=dict)
    """By the names of their folders, in the order in which they are trained."""
    commands: tuple[str, ...] = ()
    scale: float = 1.0
    """The fraction of the usual number of tokens; below 1, the experiment is a trial."""
    task_info: TaskInfo = field(default_factory=TaskInfo)

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs.values()})


def read_plan(folder: Path) -> Plan | None:
    """The plan in ``folder``, also of an earlier version; None if there is none."""
    path = folder / EXPERIMENT
    if not path.is_file():
        return None
    plan = read_json(path)
    if isinstance(plan.get("arms"), list):
        try:
            plan["arms"] = [upgrade_arm(arm, plan.get("settings", {})) for arm in plan["arms"]]
        except (TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is broken: its settings and those of its arms don't fit.") from None
    return config_from_dict(Plan, plan, str(path))


def upgrade_arm(arm: Any, shared: Mapping[str, Any]) -> Any:
    """An arm of a plan, complete. Earlier versions stored only the settings in which it differs from the
    ``shared`` ones, by their dotted names, and the arm that it was compared with."""
    if not isinstance(arm, dict) or not isinstance(arm.get("settings"), dict):
        return arm
    config = deepcopy(dict(shared))
    for dotted, value in arm["settings"].items():
        *groups, name = dotted.split(".")
        group = config
        for inner in groups:
            group = group.setdefault(inner, {})
        group[name] = value
    return {"name": arm.get("name", ""), "config": config, "label": arm.get("label", "")}


def runs_of(arms: Sequence[str], seeds: Sequence[int]) -> dict[str, Planned]:
    """All arms of the first seed, then of the next, so that an experiment that stops early is still fair."""
    runs = {}
    for seed in seeds:
        for arm in arms:
            name = arm if seed == seeds[0] else f"{arm}-seed{seed}"
            runs[name] = Planned(arm, seed)
    return runs


def baseline_of(arms: Sequence[str]) -> str:
    """The arm that the others are compared with: Transformer-XL, or the first one."""
    return BASELINE if BASELINE in arms else arms[0]
