"""The results of runs, read from their folders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.runs.atomic_dir import numbered
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, PROBE, RESULT, SAMPLE, read_metrics
from memformers.runs.plan import read_plan


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, read."""

    folder: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, float]]
    result: dict[str, Any] | None
    """None for a run that didn't end well."""
    sample: str
    arm: str
    """Its name among the runs beside it: an arm of an experiment, which has a run for each seed."""
    label: str = ""
    """The name of the arm in tables and figures; empty for those without another name."""

    @property
    def model(self) -> str:
        """Its model's name."""
        return str(self.config["model"]["model"])

    @property
    def seed(self) -> int:
        """The seed of its initial weights."""
        return int(self.config["seed"])


def read_runs(folder: Path) -> list[FinishedRun]:
    """The run in ``folder``, or those in its sub-folders: for a comparison all arms of one seed, then of the
    next; otherwise the one with the least memory first. Runs that were not compared get the names of their
    models, if these differ."""
    places = [folder] if (folder / FACTS).is_file() else [p.parent for p in folder.glob(f"*/{FACTS}")]
    runs = [read_run(place) for place in map(Path.resolve, places)]
    if not runs:
        raise UserError(f"{folder} holds no run: {FACTS} is neither in it nor in a sub-folder.")
    runs.sort(key=lambda run: (run.facts["memory"]["one_layer"], run.folder))
    if plan := read_plan(folder):
        order, labels = list(plan.runs), {arm.name: arm.label for arm in plan.arms}
        runs.sort(key=lambda run: order.index(run.folder.name) if run.folder.name in order else len(order))
        arms = {name: run.arm for name, run in plan.runs.items()}
        names = [arms.get(run.folder.name, run.arm) for run in runs]
        return [replace(r, arm=arm, label=labels.get(arm, "")) for r, arm in zip(runs, names, strict=True)]
    differ = len({run.model for run in runs}) == len(runs)
    return [replace(run, arm=run.model) for run in runs] if differ else runs


def one_of_each_arm(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """The first of each arm's ``runs``."""
    return list({run.arm: run for run in reversed(runs)}.values())[::-1]


def read_run(folder: Path) -> FinishedRun:
    """The run in a folder; a run that was stopped has no result and no sample."""
    sample = folder / SAMPLE
    result = read_json(folder / RESULT) if (folder / RESULT).exists() else None
    return FinishedRun(
        folder=folder,
        config=read_json(folder / CONFIG),
        facts=read_json(folder / FACTS),
        metrics=read_metrics(folder),
        result=result,
        sample=sample.read_text(encoding="utf-8") if sample.exists() else "",
        arm=folder.name,
    )


def read_probe(folder: Path) -> dict[str, Any] | None:
    """The results of a probe of the runs in ``folder``; None if there was none, or if a run has been removed
    or trained further since then."""
    if not (folder / PROBE).exists():
        return None
    found = read_json(folder / PROBE)
    probed = found.get("checkpoints", {})
    places = {name: folder if (folder / FACTS).is_file() else folder / name for name in probed}
    is_current = all(
        place.resolve().name == name and newest_checkpoint(place) == probed[name]
        for name, place in places.items()
    )
    return found if probed and is_current else None


def newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint, the tokens seen by then; empty if there is none."""
    return next((path.name for path in numbered(folder / CHECKPOINTS)), "")
