"""The data of the comparison page, read only from the runs' folders, without labml's server and records."""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.intervals import mean_of
from memformers.dashboard.curves import Curve, over_seeds
from memformers.dashboard.following import FollowedJson, Numbers
from memformers.dashboard.live_run import FINISHED, RUNNING, LiveRun
from memformers.runs.folder import COMPARISON, METRICS, flatten, short_names
from memformers.runs.plan import Plan, read_plan
from memformers.tracking.comparisons import noted_comparisons

Knows = Callable[[str], bool]
"""Whether labml's pages have a run, by its id."""
FIRST_METRICS = ("loss.valid", "loss.train")
"""The metric that is drawn if the user has chosen none: the first of these that exists."""


class LiveComparison:
    """The runs in ``folder``, which may be planned, running, killed or deleted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.plan_file = FollowedJson(folder / COMPARISON)
        self.runs: dict[str, LiveRun] = {}

    def update(self) -> None:
        """Read the new contents of the runs' files."""
        plan = self._plan()
        places = self._places(plan)
        planned = plan.runs if plan else {}
        settings = settings_of(plan) if plan else {}
        self.runs = {name: self.runs.get(name) or LiveRun(place, name) for name, place in places.items()}
        for name, run in self.runs.items():
            run.update(planned.get(name), settings.get(name, {}))

    def _plan(self) -> Plan | None:
        try:
            return read_plan(self.folder) if self.plan_file.read() else None
        except (UserError, OSError):
            return None

    def _places(self, plan: Plan | None) -> dict[str, Path]:
        """The folders of the runs, the planned ones first, by their names in the comparison."""
        places = {name: self.folder / name for name in (plan.runs if plan else {})}
        for pattern in (METRICS, f"*/{METRICS}", f"*/*/{METRICS}"):
            for place in sorted(path.parent for path in self.folder.glob(pattern)):
                inside = place.relative_to(self.folder).as_posix()
                places.setdefault(place.name if inside == "." else inside, place)
        return places

    def summary(self) -> dict[str, Any]:
        """The comparison's row in the list of comparisons."""
        states = [run.state for run in self.runs.values()]
        return {
            "name": self.folder.name,
            "runs": len(states),
            "finished": states.count(FINISHED),
            "running": states.count(RUNNING),
            "arms": list(dict.fromkeys(run.arm for run in self.runs.values())),
            "changed": max((run.changed for run in self.runs.values()), default=0.0),
        }

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
            "metrics": metrics,
            "metric": metric,
            "over": over,
            "settings": differing,
            "arms": [
                arm | {"mean": self._mean_curve(arm["counted"], curves)} for arm in self._arms(differing)
            ],
            "runs": [
                run.row(differing)
                | {
                    "page": run.identity if run.identity and knows(run.identity) else "",
                    "curve": {"x": plain(curves[name].x), "y": plain(curves[name].y)},
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
            settings = [{name: run.settings.get(name) for name in differing} for run in runs]
            yield {
                "name": arm,
                "seeds": len(runs),
                "counted": [run.name for run in counted],
                "states": [run.state for run in runs],
                "values": values,
                "settings": {
                    name: settings[0][name]
                    if all(one[name] == settings[0][name] for one in settings)
                    else "…"
                    for name in differing
                },
            }

    def _mean_curve(self, names: list[str], curves: Mapping[str, Curve]) -> dict[str, Any]:
        """The mean of the curves that have begun, with its interval if there are several."""
        begun = [curves[name] for name in names if len(curves[name].y)]
        if not begun:
            return {"x": [], "y": [], "low": [], "high": [], "seeds": 0}
        mean = over_seeds(begun)
        ends = {"x": mean.x, "y": mean.y, "low": mean.low, "high": mean.high}
        return {name: plain(numbers) for name, numbers in ends.items()} | {"seeds": len(begun)}


class LiveComparisons:
    """All comparisons of this machine that a dashboard knows; several threads may call it."""

    def __init__(self, knows: Knows):
        self.knows = knows
        self.open: dict[str, LiveComparison] = {}
        self.lock = threading.Lock()

    def _get(self, identity: str) -> LiveComparison | None:
        folder = noted_comparisons().get(identity)
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

    def list(self) -> list[dict[str, Any]]:
        """A summary of each, the newest first."""
        with self.lock:
            found = [(identity, self._get(identity)) for identity in noted_comparisons()]
            return [{"id": identity, **one.summary()} for identity, one in found if one]

    def describe(self, identity: str, metric: str, over: str, seen: str) -> dict[str, Any] | None:
        """The data of the page of a comparison, or only its version if that is the one ``seen``; None if
        there is no such comparison."""
        with self.lock:
            comparison = self._get(identity)
            if comparison is None:
                return None
            asked = f"{comparison.version} {metric} {over}"
            version = {"version": hashlib.sha256(asked.encode()).hexdigest()[:16]}
            return (
                version
                if version["version"] == seen
                else version | comparison.describe(metric, over, self.knows)
            )

    def of_run(self, run: str) -> str:
        """The id of the comparison that has the run with this id; empty if there is none."""
        with self.lock:
            for identity in noted_comparisons():
                comparison = self._get(identity)
                if comparison and any(one.identity == run for one in comparison.runs.values()):
                    return identity
        return ""


def settings_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """The settings that each planned run will have."""
    arms = {arm.name: dict(flatten(plan.train)) | arm.settings for arm in plan.arms}
    return {name: arms.get(run.arm, {}) for name, run in plan.runs.items()}


def differing_settings(runs: list[Mapping[str, Any]]) -> dict[str, str]:
    """The settings in which runs differ, by their dotted names, with the names that a reader sees."""
    begun = [settings for settings in runs if settings]
    names = dict.fromkeys(name for settings in begun for name in settings)
    missing = object()
    differing = [n for n in names if any(s.get(n, missing) != begun[0].get(n, missing) for s in begun)]
    return short_names([name for name in differing if name != "seed"])


def plain(numbers: Numbers) -> list[float | None]:
    """Numbers for JSON, which has no NaN."""
    return [finite(number) for number in numbers.tolist()]


def finite(number: float) -> float | None:
    """The number with seven digits, more than a chart shows; None for one that is not finite."""
    return float(f"{number:.7g}") if math.isfinite(number) else None
