"""Runs, read from their folders: while they are planned and trained, and when they have ended."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import numbered, read_json
from memformers.runs.card import known_card
from memformers.runs.folder import (
    CARD,
    CHECKPOINTS,
    CONFIG,
    EXPERIMENT,
    FACTS,
    METRICS,
    PROBE,
    RESULT,
    SAMPLE,
    flatten,
    in_use,
)
from memformers.runs.metrics import TOKENS, is_exact
from memformers.runs.plan import Planned, TaskInfo, read_plan
from memformers.runs.stored_metrics import StoredMetrics

CONFIG_HAS = ("model", "data", "max_tokens", "seed")
"""What a report reads in ``config.json``, and below in the other files."""
FACTS_HAVE = ("corpus", "parameters", "memory", "keys", "attention_operations", "environment")
PROGRESS = ("tokens", "seconds", "evaluation_seconds", "peak_memory_bytes")
RESULTS_HAVE = {
    "recall": (*PROGRESS, "recall", "within_reach", "controls"),
    "text": (
        *PROGRESS, "loss", "bits_per_character", "accuracy", "evaluated_tokens", "loss_by_position", "prompt",
    ),
}  # fmt: skip
"""By the tasks of the package; a run on recall has a part of this name in ``config.json``. The plan of
another task says what its results have."""
PLANNED = "planned"
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"


class Run:
    """A run's folder, read; ``update`` reads what is new. Missing or broken files count as empty."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.arm = folder.name
        """Its name among the runs beside it: an arm of an experiment, which has a run for each seed."""
        self.label = ""
        self.planned: Planned | None = None
        self.planned_task = ""
        """The task of the experiment that it is a part of."""
        self.task_info = TaskInfo()
        """What the plan says of a task outside of the package."""
        self.metrics = StoredMetrics(folder / METRICS)
        self.update()

    def update(self) -> None:
        self.metrics.read()
        files = [self.folder / name for name in (CONFIG, FACTS, RESULT, CARD)]
        self.statuses = [status_of(file) for file in files]
        self.is_alive = in_use(self.folder)
        self.config, self.facts, result, self.card = map(json_in, files, self.statuses)
        self.result = result or None

    def check(self) -> None:
        """Raise UserError for a file without what a report reads in it."""
        read_json(self.folder / CONFIG, dict.fromkeys(CONFIG_HAS, Any))
        read_json(self.folder / FACTS, dict.fromkeys(FACTS_HAVE, Any))
        if (self.folder / RESULT).exists():
            needed = RESULTS_HAVE.get(self.task, (*PROGRESS, *self.task_info.results))
            read_json(self.folder / RESULT, dict.fromkeys(needed, Any))
        self.metrics.check()

    @property
    def version(self) -> tuple[Any, ...]:
        """A value that changes whenever something else is to be shown."""
        return (self.metrics.offset, self.metrics.changed, self.arm, *self.state, *self.statuses)

    @property
    def model(self) -> str:
        model = self.config.get("model")
        return str(model.get("model", "")) if isinstance(model, dict) else ""

    @property
    def seed(self) -> int:
        seed = self.planned.seed if self.planned else self.config.get("seed")
        return seed if isinstance(seed, int) else 0

    @property
    def memory(self) -> float:
        """The positions that one layer of its model remembers; 0 if that isn't known."""
        memory = self.facts.get("memory")
        if not isinstance(memory, dict):
            return 0.0
        return finite_number(memory.get("one_layer")) or 0.0

    @property
    def task(self) -> str:
        if "recall" in self.config:
            return "recall"
        return self.planned_task or "text"

    @property
    def budget(self) -> float:
        return finite_number(self.config.get("max_tokens")) or 0.0

    @property
    def tokens(self) -> float:
        """How many tokens it has read."""
        if self.state[0] == FINISHED:
            return self.budget
        return min(self.last(TOKENS) or 0.0, self.budget)

    def last(self, name: str) -> float | None:
        values = self.metrics.points(name)[2]
        return float(values[-1]) if len(values) else None

    @property
    def sample(self) -> str:
        path = self.folder / SAMPLE
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def identity(self) -> str:
        return str(self.card.get("run", ""))

    @property
    def changed(self) -> float:
        """When it recorded last, or else began, in seconds since 1970; 0 if it has not begun."""
        return self.metrics.changed or finite_number(self.card.get("started")) or 0.0

    @property
    def startup_seconds(self) -> float | None:
        """From the start of its process by an experiment to its first step; None if there is no such time."""
        launched = finite_number(self.card.get("launched")) or 0.0
        started = finite_number(self.card.get("started")) or 0.0
        return started - launched if 0 < launched <= started else None

    @property
    def state(self) -> tuple[str, str]:
        """Whether it is planned, running, finished or stopped, and why it stopped."""
        status = str(self.card.get("status", "")).strip()
        if status == "completed" or (self.result and not status):
            return FINISHED, ""
        if status:
            return STOPPED, status.removeprefix("crashed: ")
        if self.is_alive:
            return RUNNING, ""
        return (STOPPED, "its process is gone") if self.changed else (PLANNED, "")

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings by their dotted names, None for those that its model doesn't use, without those that
        only a run that has started can know."""
        settings = dict(flatten(self.config))

        # Before a run starts, open settings aren't resolved yet.
        if not self.facts:
            settings = {name: value for name, value in settings.items() if value is not None}
            settings.pop("model.vocab_size", None)
        resolved = self.facts.get("resolved_settings")
        if isinstance(resolved, dict):
            settings |= {name: value for name, value in resolved.items() if name in settings}
        unused = self.facts.get("unused")
        if isinstance(unused, list):
            for name in settings:
                if name in unused:
                    settings[name] = None
        return settings


class Runs:
    """All runs in ``folder``, or the run that it is, started or only planned: in the order of the plan, else
    by memory. Runs that were not planned together get the names of their models, if these differ."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.all: list[Run] = []
        self.update()

    def update(self) -> None:
        plan = None
        self.plan_status = status_of(self.folder / EXPERIMENT)
        with contextlib.suppress(UserError, OSError):
            plan = read_plan(self.folder)
        planned = plan.runs if plan else {}
        labels = {arm.name: arm.label for arm in plan.arms} if plan else {}

        # The folders of runs, of which some are known already
        known = {run.folder: run for run in self.all}
        folders = {self.folder / name for name in planned}
        if any((self.folder / file).is_file() for file in (METRICS, FACTS)):
            folders.add(self.folder)
        else:
            for file in (METRICS, FACTS):
                folders |= {path.parent for path in self.folder.glob(f"*/{file}")}
        self.all = []
        for folder in folders:
            if folder in known:
                known[folder].update()
            self.all.append(known.get(folder) or Run(folder))

        # Their names
        models = [run.model for run in self.all]
        have_different_models = not plan and all(models) and len(set(models)) == len(models)
        for run in self.all:
            run.planned = planned.get(run.folder.name)
            if run.planned:
                run.arm = run.planned.arm
            else:
                run.arm = run.model if have_different_models else run.folder.resolve().name
            run.label = labels.get(run.arm, "")

        # Their task, which a single run has from the experiment that it is a part of
        experiment = plan
        if not plan and self.folder in folders:
            with contextlib.suppress(UserError, OSError):
                experiment = read_plan(self.folder.resolve().parent)
        if experiment:
            for run in self.all:
                run.planned_task = experiment.task
                run.task_info = experiment.task_info

        # Their order
        order = {name: i for i, name in enumerate(planned)}
        self.all.sort(key=lambda run: (order.get(run.folder.name, len(order)), run.memory, run.folder))

    @property
    def version(self) -> str:
        """A text that changes whenever something else is to be shown."""
        return repr((self.plan_status, [(run.folder.name, run.version) for run in self.all]))


def read_runs(folder: Path, task: str = "text") -> list[Run]:
    """The runs in ``folder`` that have started; UserError for what a report of this ``task`` can't read."""
    read_plan(folder)
    # Planned runs that haven't started have no facts.
    runs = [run for run in Runs(folder.resolve()).all if (run.folder / FACTS).exists()]
    if not runs:
        raise UserError(f"{folder} holds no run: {FACTS} is neither in it nor in a sub-folder.")
    for run in runs:
        run.check()
        if run.task != task:
            raise UserError(
                f"{run.folder} is a part of an experiment on {run.task}, not on {task}; name the folder with "
                f"its {EXPERIMENT}, or run the program that made it again with --resume."
            )
    return runs


def find_runs(folder: Path) -> list[Path]:
    """The folders of all runs with metrics in ``folder``, a run, a comparison, or several, by their start."""
    # A run, the runs of a comparison, and those of several.
    runs = []
    for pattern in (METRICS, f"*/{METRICS}", f"*/*/{METRICS}"):
        runs += [path.parent for path in sorted(folder.glob(pattern))]
    if not runs:
        raise UserError(f"{folder} holds no run: no {METRICS} in it or in its sub-folders.")
    started = {}
    for run in runs:
        card = known_card(run)
        started[run] = card.started if card else 0.0
    return sorted(runs, key=lambda run: started[run])


def read_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a training on a text."""
    path = folder / FACTS
    return read_json(path, dict.fromkeys(FACTS_HAVE, Any)) if path.exists() else None


def read_probe(folder: Path) -> dict[str, Any] | None:
    """The probe of the runs in ``folder``; None if there is none, or if a run has been removed or trained
    further since then."""
    if not (folder / PROBE).exists():
        return None
    probe = read_json(folder / PROBE, {"checkpoints": dict[str, str]})
    for name, checkpoint in probe["checkpoints"].items():
        run = folder if (folder / FACTS).is_file() else folder / name
        if run.resolve().name != name or newest_checkpoint(run) != checkpoint:
            return None
    ablation = probe.get("memory_ablation")
    if ablation and "costs" not in ablation:  # of an earlier version
        return None
    return probe


def newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint; empty if there is none."""
    for path in numbered(folder / CHECKPOINTS):
        return path.name
    return ""


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dotted names of the settings in which runs differ; a setting that a run lacks is no difference."""
    first_values: dict[str, Any] = {}
    differing: set[str] = set()
    for settings in runs:
        for name, value in settings.items():
            if value != first_values.setdefault(name, value):
                differing.add(name)
    return [name for name in first_values if name in differing]


def finite_number(value: Any) -> float | None:
    """A finite number; None for any other value, since a file may contain anything."""
    return float(value) if is_exact(value) and math.isfinite(value) else None


def status_of(path: Path) -> tuple[int, ...] | None:
    """What changes when the file in ``path`` does; None if it is missing."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


@lru_cache(maxsize=4096)
def json_in(path: Path, status: tuple[int, ...] | None) -> dict[str, Any]:
    """The JSON object in ``path``, read once for each ``status``; empty if it is missing or broken."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = json.loads(path.read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    return {}
