"""The results of runs, read from their folders."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memformers.common.atomic_dir import numbered
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    EXPERIMENT,
    FACTS,
    PROBE,
    RESULT,
    SAMPLE,
    read_metrics,
)
from memformers.runs.plan import read_plan

CONFIG_HAS = {
    "model": {"model": str, "positions": str, "embedding": str, "compression": str},
    "data": str, "document_separator": str, "tokens": int, "optimizer": str, "seed": int,
}  # fmt: skip
"""What a report or a probe reads in ``config.json``, by the kind of each value."""
FACTS_HAVE = {
    "corpus": {"name": str, "source": str},
    "parameters": int,
    "memory": {"one_layer": int, "all_layers": int},
    "keys": float,
    "attention_operations": int,
    "environment": {
        "python": str, "platform": str, "packages": dict[str, str], "device": str, "threads": int | None,
    },
}  # fmt: skip
"""What they read in every ``run.json``, and below in that of a training on a text."""
TEXT_FACTS_HAVE = FACTS_HAVE | {
    "corpus": {
        "name": str, "source": str, "characters": int, "sha256": str, "stands_in_for_tiny_shakespeare": bool,
    },
}  # fmt: skip
PROGRESS = {
    "tokens": int, "seconds": float, "evaluation_seconds": float, "peak_memory_bytes": int | None,
}  # fmt: skip
RESULT_HAS = PROGRESS | {
    "loss": float, "bits_per_character": float, "accuracy": float, "evaluated_tokens": int,
    "loss_by_position": list[float], "prompt": str,
}  # fmt: skip
"""What they read in the ``result.json`` of a training on a text, and below in that of a recall run."""
BY_DISTANCE = {
    "edges": list[int], "accuracy": list[float | None], "asks": list[int],
    "by_place": dict[str, float | None], "asks_by_place": dict[str, int],
}  # fmt: skip
RECALL_RESULT_HAS = PROGRESS | {
    "recall": BY_DISTANCE, "within_reach": float | None, "controls": dict[str, Any],
}  # fmt: skip
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recall": (FACTS_HAVE, RECALL_RESULT_HAS),
    "agent": (FACTS_HAVE, PROGRESS | {"success": float, "controls": dict[str, Any]}),
    "text": (TEXT_FACTS_HAVE, RESULT_HAS),
}
"""What is read of a run on each task; all but a text have a part of this name in ``config.json``."""
PROBE_HAS = dict.fromkeys(("effective_context", "attention", "memory_ablation"), dict[str, Any] | None)


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

    @property
    def task(self) -> str:
        """What it was trained on."""
        return task_of(self.config)


def task_of(config: Mapping[str, Any]) -> str:
    """What the run of a ``config.json`` was trained on."""
    return next((task for task in TASKS if task in config), "text")


def read_runs(folder: Path, task: str = "text") -> list[FinishedRun]:
    """The run in ``folder``, or those in its sub-folders: for a comparison all arms of one seed, then of the
    next; otherwise the one with the least memory first. Runs that were not compared get the names of their
    models, if these differ.

    UserError for a folder without runs, for a broken file of a run, and for runs of another ``task``.
    """
    places = [folder] if (folder / FACTS).is_file() else [p.parent for p in folder.glob(f"*/{FACTS}")]
    runs = [read_run(place) for place in map(Path.resolve, places)]
    if not runs:
        raise UserError(f"{folder} holds no run: {FACTS} is neither in it nor in a sub-folder.")
    if other := next((run for run in runs if run.task != task), None):
        instead = f"name the folder of that, which has {EXPERIMENT}"
        if (folder / EXPERIMENT).exists():
            instead = "the program that made it measures and reports it; run that again with --resume"
        raise UserError(
            f"{other.folder} is a part of an experiment on {other.task}, not on {task}; {instead}."
        )
    runs.sort(key=lambda run: (run.facts["memory"]["one_layer"], run.folder))
    if plan := read_plan(folder):
        order, labels = list(plan.runs), {arm.name: arm.label for arm in plan.arms}
        runs.sort(key=lambda run: order.index(run.folder.name) if run.folder.name in order else len(order))
        arms = {name: run.arm for name, run in plan.runs.items()}
        names = [arms.get(run.folder.name, run.arm) for run in runs]
        return [replace(r, arm=arm, label=labels.get(arm, "")) for r, arm in zip(runs, names, strict=True)]
    differ = len({run.model for run in runs}) == len(runs)
    return [replace(run, arm=run.model) for run in runs] if differ else runs


def read_run(folder: Path) -> FinishedRun:
    """The run in a folder; a run that was stopped has no result and no sample."""
    sample, config = folder / SAMPLE, read_json(folder / CONFIG, CONFIG_HAS)
    of_facts, of_result = TASKS[task_of(config)]
    result = folder / RESULT
    return FinishedRun(
        folder=folder,
        config=config,
        facts=read_json(folder / FACTS, of_facts),
        metrics=read_metrics(folder),
        result=read_json(result, of_result) if result.exists() else None,
        sample=sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else "",
        arm=folder.name,
    )


def read_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a training on a text in ``folder``, or None if it has none; UserError for broken ones."""
    return read_json(folder / FACTS, TEXT_FACTS_HAVE) if (folder / FACTS).exists() else None


def read_probe(folder: Path) -> dict[str, Any] | None:
    """The results of a probe of the runs in ``folder``; None if there was none, or if a run has been removed
    or trained further since then."""
    if not (folder / PROBE).exists():
        return None
    probed = read_json(folder / PROBE, {"checkpoints": dict[str, str]})["checkpoints"]
    places = {name: folder if (folder / FACTS).is_file() else folder / name for name in probed}
    is_current = all(
        place.resolve().name == name and newest_checkpoint(place) == probed[name]
        for name, place in places.items()
    )
    return read_json(folder / PROBE, PROBE_HAS) if probed and is_current else None


def newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint, the tokens seen by then; empty if there is none."""
    return next((path.name for path in numbered(folder / CHECKPOINTS)), "")
