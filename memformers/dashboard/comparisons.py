"""The data of the comparison page, read only from the runs' folders, without labml's server and records."""

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from memformers.common.errors import UserError
from memformers.common.intervals import mean_of
from memformers.dashboard.guard import Knows
from memformers.dashboard.live_run import (
    FINISHED,
    RUNNING,
    SECONDS,
    TOKENS,
    Curve,
    FollowedJson,
    LiveRun,
    number,
)
from memformers.runs.folder import EXPERIMENT, PAGE, run_folders, short_names
from memformers.runs.plan import read_plan
from memformers.tracking.discovery import noted_comparisons

FIRST_METRICS = ("bits_per_character.valid", "loss.valid", "loss.train", "success.train")
"""The metric that is drawn if the user has chosen none: the first of these that exists."""


class LiveComparison:
    """The runs in ``folder``, which may be planned, running, killed or deleted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.plan_file = FollowedJson(folder / EXPERIMENT)
        self.runs: dict[str, LiveRun] = {}

    def update(self) -> None:
        """Read the new contents of the runs' files."""
        plan = None
        with contextlib.suppress(UserError, OSError):
            plan = read_plan(self.folder) if self.plan_file.read() else None
        planned = plan.runs if plan else {}
        places = {name: self.folder / name for name in planned}
        for place in run_folders(self.folder):
            inside = place.relative_to(self.folder).as_posix()
            places.setdefault(place.name if inside == "." else inside, place)
        self.runs = {name: self.runs.get(name) or LiveRun(place, name) for name, place in places.items()}
        for name, run in self.runs.items():
            run.update(planned.get(name))

    def summary(self) -> dict[str, Any]:
        """The comparison's row in the list of comparisons."""
        states = [run.state for run in self.runs.values()]
        return {
            "name": self.folder.name,
            "runs": len(states),
            "finished": states.count(FINISHED),
            "running": states.count(RUNNING),
            "arms": list(dict.fromkeys(run.arm for run in self.runs.values())),
            **self._progress(),
            "changed": max((run.changed for run in self.runs.values()), default=0.0),
        }

    def _progress(self) -> dict[str, float | None]:
        """How much of all training is done, and about how many seconds of training are left while some run is
        trained, at the mean speed so far; None where it isn't known."""
        budgets = [number(run.settings.get(TOKENS)) or 0.0 for run in self.runs.values()]
        done = [
            budget if run.state == FINISHED else min(run.values.get(TOKENS, 0.0), budget)
            for run, budget in zip(self.runs.values(), budgets, strict=True)
        ]
        tokens, whole = math.fsum(done), math.fsum(budgets)
        spent = math.fsum(run.values.get(SECONDS, 0.0) for run in self.runs.values())
        running = [run.state for run in self.runs.values()].count(RUNNING)
        left = spent / tokens * (whole - tokens) / running if running and tokens else None
        return {"progress": tokens / whole if whole else None, "left": left}

    def describe(self, metric: str, over: str, knows: Knows) -> dict[str, Any]:
        """All data of the page, with the curves of ``metric`` drawn ``over`` "tokens" or "seconds"; an
        unknown metric is replaced by the first one that exists."""
        metrics = sorted({name for run in self.runs.values() for name in run.metrics.names})
        if metric not in metrics:
            metric = next((name for name in (*FIRST_METRICS, *metrics) if name in metrics), "")
        differing = differing_settings([run.settings for run in self.runs.values()])
        curves = {name: run.curve(metric, over) for name, run in self.runs.items()}
        return {
            **self.summary(),
            "report": (self.folder / PAGE).is_file(),
            "metrics": metrics,
            "metric": metric,
            "over": over,
            "settings": differing,
            "arms": [
                arm | {"mean": mean_curve([curves[name] for name in arm["counted"]])}
                for arm in self._arms(differing)
            ],
            "runs": [
                {
                    **run.row(differing),
                    "page": run.identity if run.identity and knows(run.identity) else "",
                    "curve": {axis: [*map(finite, getattr(curves[name], axis).tolist())] for axis in "xy"},
                }
                for name, run in self.runs.items()
            ],
        }

    @property
    def version(self) -> str:
        """A text that changes whenever anything that is shown changes."""
        return repr((self.plan_file.seen, [(name, run.version) for name, run in self.runs.items()]))

    def _arms(self, differing: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """A row for each arm: means over its finished runs; if there are none, over all."""
        for arm in dict.fromkeys(run.arm for run in self.runs.values()):
            runs = [run for run in self.runs.values() if run.arm == arm]
            counted = [run for run in runs if run.state == FINISHED] or runs
            values: dict[str, Any] = {}
            for name in dict.fromkeys(name for run in counted for name in run.values):
                known = [run.values[name] for run in counted if name in run.values]
                if len(known) == len(counted):
                    mean = mean_of(known)
                    values[name] = [mean.mean, finite(mean.half_width)]
            settings = {
                name: [run.settings[name] for run in runs if name in run.settings] or [None]
                for name in differing
            }
            yield {
                "name": arm,
                "seeds": len(runs),
                "counted": [run.name for run in counted],
                "states": [run.state for run in runs],
                "values": values,
                "settings": {
                    name: found[0] if found.count(found[0]) == len(found) else "…"
                    for name, found in settings.items()
                },
            }


class LiveComparisons:
    """All comparisons of this machine that a dashboard knows; several threads may call it."""

    def __init__(self, knows: Knows):
        self.knows = knows
        self.open: dict[str, LiveComparison] = {}
        self.lock = threading.Lock()

    def _in(self, folder: Path | None, identity: str) -> LiveComparison | None:
        if folder is None or not folder.is_dir():
            self.open.pop(identity, None)
            return None
        comparison = self.open.setdefault(identity, LiveComparison(folder))
        comparison.update()
        return comparison

    def known(self, identity: str) -> bool:
        """Whether there is such a comparison."""
        folder = noted_comparisons().get(identity)
        return folder is not None and folder.is_dir()

    def report(self, identity: str) -> Path | None:
        """The page of the comparison's report; None if there is none."""
        folder = noted_comparisons().get(identity)
        return folder / PAGE if folder and (folder / PAGE).is_file() else None

    def list(self) -> list[dict[str, Any]]:
        """A summary of each, the newest first."""
        with self.lock:
            found = [
                (identity, self._in(folder, identity)) for identity, folder in noted_comparisons().items()
            ]
            return [{"id": identity, **one.summary()} for identity, one in found if one]

    def describe(self, identity: str, metric: str, over: str, seen: str) -> dict[str, Any] | None:
        """A comparison's page as data, or its version alone if that was ``seen``; None if there is none."""
        with self.lock:
            comparison = self._in(noted_comparisons().get(identity), identity)
            if comparison is None:
                return None
            asked = f"{comparison.version} {metric} {over}"
            version = hashlib.sha256(asked.encode()).hexdigest()[:16]
            new = {} if version == seen else comparison.describe(metric, over, self.knows)
            return {"version": version, **new}

    def of_run(self, run: str) -> str:
        """The id of the comparison that has the run with this id; empty if there is none."""
        with self.lock:
            for identity, folder in noted_comparisons().items():
                comparison = self._in(folder, identity)
                if comparison and any(one.identity == run for one in comparison.runs.values()):
                    return identity
        return ""


def differing_settings(runs: list[Mapping[str, Any]]) -> dict[str, str]:
    """The settings in which runs differ, by their dotted names, with the names that a reader sees."""
    begun = [settings for settings in runs if settings]
    names = dict.fromkeys(name for settings in begun for name in settings)
    found = {name: [settings[name] for settings in begun if name in settings] for name in names}
    differing = [name for name, values in found.items() if any(value != values[0] for value in values)]
    return short_names([name for name in differing if name != "seed"])


def mean_curve(curves: Sequence[Curve]) -> dict[str, Any]:
    """The mean of ``x``, and that of ``y`` with the ends of its interval, at each number of tokens at which
    all ``curves`` that have begun have a point."""
    points = [zip(*(axis.tolist() for axis in (c.tokens, c.x, c.y)), strict=True) for c in curves if len(c.y)]
    begun = [{tokens: (x, y) for tokens, x, y in of_curve} for of_curve in points]
    shared = sorted(set.intersection(*map(set, begun))) if begun else []
    xs = [fmean(curve[tokens][0] for curve in begun) for tokens in shared]
    ys = [mean_of([curve[tokens][1] for curve in begun]) for tokens in shared]
    return {
        "x": [finite(x) for x in xs],
        "y": [finite(y.mean) for y in ys],
        "low": [finite(y.mean - y.half_width) for y in ys],
        "high": [finite(y.mean + y.half_width) for y in ys],
        "seeds": len(begun),
    }


def finite(value: float) -> float | None:
    """The number with seven digits, more than a chart shows; None for one that is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
