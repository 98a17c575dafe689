"""Curves over seeds: the mean at each step, and its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from memformers.common.intervals import Mean, mean_of
from memformers.report.arms import Arm

# Okabe and Ito's palette (2008), with a line and a marker of its own for print without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "transformer": {"color": "#0072B2", "linestyle": ":", "marker": "o"},
    "transformer-xl": {"color": "#D55E00", "linestyle": "-", "marker": "s"},
    "compressive": {"color": "#009E73", "linestyle": "--", "marker": "^"},
}
OTHER_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#CC79A7", "linestyle": "-.", "marker": "D"},
    {"color": "#56B4E9", "linestyle": (0, (4, 1, 1, 1)), "marker": "v"},
    {"color": "#E69F00", "linestyle": (0, (2, 1)), "marker": "P"},
    {"color": "#000000", "linestyle": (0, (1, 1)), "marker": "X"},
)
"""The looks of arms with other names, in their order; after the last, they repeat."""


FEWEST_FOR_A_LINE = 3


@dataclass(frozen=True)
class Series:
    """A curve, and how it is drawn."""

    label: str
    points: list[tuple[float, Mean]]
    look: dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """The data of an arm for the figures."""

    label: str
    look: dict[str, Any]
    runs: Mapping[int, Sequence[Mapping[str, float]]]
    """The records of each run, by seed."""
    is_base: bool = False
    """Whether it is the baseline, with which the others are compared."""

    def series(self, x: str, y: str, label: str = "{}", *, marked: bool = False) -> Series:
        """``y`` against ``x`` over the seeds, with a mark at each point if it is ``marked``."""
        look = self.look | ({} if marked else {"marker": "", "linewidth": 1.0})
        return Series(label.format(self.label), self.over_seeds(x, y), look)

    def over_seeds(self, x: str, y: str) -> list[tuple[float, Mean]]:
        """The mean of ``x``, and that of ``y``, at each number of tokens for which all runs have both."""
        found = [points(records, y) for records in self.runs.values()]
        return [
            (fmean(run[tokens][x] for run in found), mean_of([run[tokens][y] for run in found]))
            for tokens in found[0]
            if all(tokens in run and x in run[tokens] for run in found)
        ]

    def less(self, base: "Curves", y: str) -> list[tuple[float, Mean]]:
        """The tokens at which both have ``y``, and the mean over their common seeds of the difference, this
        arm's minus that of ``base``."""
        seeds = [seed for seed in self.runs if seed in base.runs]
        found = [(points(self.runs[seed], y), points(base.runs[seed], y)) for seed in seeds]
        return [
            (tokens, mean_of([ours[tokens][y] - theirs[tokens][y] for ours, theirs in found]))
            for tokens in (found[0][0] if found else ())
            if all(tokens in run for pair in found for run in pair)
        ]


def points(records: Sequence[Mapping[str, float]], y: str) -> dict[float, Mapping[str, float]]:
    """The records that have ``y``, by their tokens."""
    return {record["tokens"]: record for record in records if y in record}


def curves_of(arms: Sequence[Arm], base: Arm) -> list[Curves]:
    """The curves of each arm, over its runs that finished; if none did, over all."""
    looks = looks_of([arm.name for arm in arms])
    return [
        Curves(arm.label, looks[arm.name], {run.seed: run.metrics for run in arm.counted}, arm is base)
        for arm in arms
    ]


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour, a line and a marker for each arm."""
    others = [name for name in names if name not in LOOKS]
    return LOOKS | {name: OTHER_LOOKS[i % len(OTHER_LOOKS)] for i, name in enumerate(others)}


def draw(axes: Axes, series: Series) -> None:
    """A line of means, with a band if there are intervals. Fewer than three points are drawn as marks with
    bars, since a line would suggest values between them."""
    x = [at for at, _ in series.points]
    mean, half = (np.array([getattr(y, part) for _, y in series.points]) for part in ("mean", "half_width"))
    label, look = drawn(series.label), {"markersize": 4.0, "linewidth": 1.3, **series.look}
    if len(x) < FEWEST_FOR_A_LINE:
        marks = look | {"linestyle": "none", "marker": look["marker"] or "."}
        axes.errorbar(x, mean, None if np.isnan(half).all() else half, label=label, capsize=2.5, **marks)
        return
    axes.plot(x, mean, label=label, **look)
    if not np.isnan(half).all():
        low, color = mean - half, look["color"]
        if axes.get_yscale() == "log":  # which can't show zero and negative values
            low = np.maximum(low, mean.min() / 10)
        axes.fill_between(x, low, mean + half, color=color, alpha=0.18, linewidth=0)


def drawn(label: str) -> str:
    """A label that matplotlib shows unchanged: $ would begin a formula, and a leading _ would hide it."""
    return label.replace("$", r"\$").lstrip("_") or "run"
