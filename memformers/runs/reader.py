"""Runs, read from their folders: while they are planned and trained, and when they have ended."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.fields import matches
from memformers.common.files import numbered, read_json
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
    TOKENS,
    Metrics,
    flatten,
    in_use,
    known_card,
)
from memformers.runs.plan import Planned, read_plan

CONFIG_HAS = ("model", "data", "max_tokens", "seed")
"""What a report reads in ``config.json``, and below in the other files."""
FACTS_HAVE = ("corpus", "parameters", "memory", "keys", "attention_operations", "environment")
PROGRESS = ("tokens", "seconds", "evaluation_seconds", "peak_memory_bytes")
RESULTS_HAVE = {
    "recall": (*PROGRESS, "recall", "within_reach", "controls"),
    "agent": (*PROGRESS, "success", "controls"),
    "text": (
        *PROGRESS, "loss", "bits_per_character", "accuracy", "evaluated_tokens", "loss_by_position", "prompt",
    ),
}  # fmt: skip
"""By the task of a run; all but a text have a part of this name in ``config.json``."""
PLANNED, RUNNING, FINISHED, STOPPED = "planned", "running", "finished", "stopped"


class Run:
    """A run's folder, read; ``update`` reads what is new. What is missing or broken there is empty."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.arm = folder.name
        """Its name among the runs beside it: an arm of an experiment, which has a run for each seed."""
        self.label = ""
        self.planned: Planned | None = None
        self.metrics = Metrics(folder / METRICS)
        self.update()

    def update(self) -> None:
        self.metrics.read()
        files = [self.folder / name for name in (CONFIG, FACTS, RESULT, CARD)]
        self._seen = [*map(status_of, files)]
        self.is_alive = in_use(self.folder)
        self.config, self.facts, result, self.card = map(json_in, files, self._seen)
        self.result = result or None

    def check(self) -> None:
        """Raise UserError for a file without what a report reads in it."""
        for name, keys in {CONFIG: CONFIG_HAS, FACTS: FACTS_HAVE, RESULT: RESULTS_HAVE[self.task]}.items():
            if name != RESULT or (self.folder / RESULT).exists():
                read_json(self.folder / name, dict.fromkeys(keys, Any))
        self.metrics.check()

    @property
    def version(self) -> tuple[Any, ...]:
        """A value that changes whenever something else is to be shown."""
        return (self.metrics.offset, self.metrics.changed, self.arm, *self.state, *self._seen)

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
        return (finite_number(memory.get("one_layer")) if isinstance(memory, dict) else None) or 0.0

    @property
    def task(self) -> str:
        return next((task for task in RESULTS_HAVE if task in self.config), "text")

    @property
    def budget(self) -> float:
        return finite_number(self.config.get("max_tokens")) or 0.0

    @property
    def tokens(self) -> float:
        return self.budget if self.state[0] == FINISHED else min(self.last(TOKENS) or 0.0, self.budget)

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
        config = dict(flatten(self.config))
        if not self.facts:
            known = [name for name in config if config[name] is not None and name != "model.vocab_size"]
            config = {name: config[name] for name in known}
        decided, unused = self.facts.get("resolved_settings"), self.facts.get("unused")
        used = config | (decided if isinstance(decided, dict) else {})
        return {name: used[name] for name in config} | dict.fromkeys(config.keys() & (unused or ()))


class Runs:
    """All runs in ``folder``, or the run that it is, started or only planned: in the order of the plan, else
    by memory. Runs that were not planned together get the names of their models, if these differ."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.all: list[Run] = []
        self.update()

    def update(self) -> None:
        plan, known = None, {run.folder: run for run in self.all}
        self._plan = status_of(self.folder / EXPERIMENT)
        with contextlib.suppress(UserError, OSError):
            plan = read_plan(self.folder)
        planned, labels = (plan.runs, {arm.name: arm.label for arm in plan.arms}) if plan else ({}, {})
        places = {self.folder / name for name in planned}
        if any((self.folder / file).is_file() for file in (METRICS, FACTS)):
            places.add(self.folder)
        else:
            places |= {path.parent for file in (METRICS, FACTS) for path in self.folder.glob(f"*/{file}")}
        self.all = [known.get(place) or Run(place) for place in places]
        for run in self.all:
            if run.folder in known:
                run.update()
        models = [run.model for run in self.all]
        differ = len(set(models)) == len(models) and all(models) and not plan
        for run in self.all:
            run.planned = planned.get(run.folder.name)
            alone = run.model if differ else run.folder.resolve().name
            run.arm = run.planned.arm if run.planned else alone
            run.label = labels.get(run.arm, "")
        order = {name: i for i, name in enumerate(planned)}
        self.all.sort(key=lambda run: (order.get(run.folder.name, len(order)), run.memory, run.folder))

    @property
    def version(self) -> str:
        """A text that changes whenever something else is to be shown."""
        return repr((self._plan, [(run.folder.name, run.version) for run in self.all]))


def read_runs(folder: Path, task: str = "text") -> list[Run]:
    """The runs in ``folder`` that have started; UserError for what a report of this ``task`` can't read."""
    read_plan(folder)
    runs = [run for run in Runs(folder.resolve()).all if (run.folder / FACTS).exists()]
    if not runs:
        raise UserError(f"{folder} holds no run: {FACTS} is neither in it nor in a sub-folder.")
    for run in runs:
        run.check()
    if other := next((run for run in runs if run.task != task), None):
        raise UserError(
            f"{other.folder} is a part of an experiment on {other.task}, not on {task}; name the folder with "
            f"its {EXPERIMENT}, or run the program that made it again with --resume."
        )
    return runs


def find_runs(folder: Path) -> list[Path]:
    """The folders of all runs with metrics in ``folder``, a run, a comparison, or several, by their start."""
    patterns = (METRICS, f"*/{METRICS}", f"*/*/{METRICS}")
    runs = [path.parent for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not runs:
        raise UserError(f"{folder} holds no run: no {METRICS} in it or in its sub-folders.")
    return sorted(runs, key=lambda run: card.started if (card := known_card(run)) else 0.0)


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
        place = folder if (folder / FACTS).is_file() else folder / name
        if place.resolve().name != name or newest_checkpoint(place) != checkpoint:
            return None
    return probe if "costs" in (probe.get("memory_ablation") or ("costs",)) else None  # of an earlier version


def newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint; empty if there is none."""
    return next((path.name for path in numbered(folder / CHECKPOINTS)), "")


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dotted names of the settings in which runs differ; a setting that a run lacks is no difference."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    values = {name: [settings[name] for settings in runs if name in settings] for name in names}
    return [name for name in names if any(value != values[name][0] for value in values[name])]


def finite_number(value: Any) -> float | None:
    """A finite number; None for any other value, since a file may contain anything."""
    return float(value) if matches(value, float) and math.isfinite(value) else None


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
