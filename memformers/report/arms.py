"""Arms: runs that differ only in their seed, with their means, curves and paired differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean, mean_of, mean_of_known, paired, t_quantile
from memformers.report.markdown import DASH, Markup, Table, number, table
from memformers.runs.metrics import TOKENS
from memformers.runs.plan import baseline_of
from memformers.runs.reader import Run

LABELS = {
    "transformer": "No memory",
    "transformer-xl": "Transformer-XL",
    "compressive": "Compressive Transformer",
    "selective": "Selective memory",
}
"""In reports, of arms that have the name of their model."""
POINTS = 500
"""About the number of points of a curve that a figure can show."""
Result = dict[str, Any]
"""A run's ``result.json``."""
Quantity = str | Callable[[Result], float | None]
"""A number in a result: its name, or how it is computed; None if there was nothing to measure."""
Curve = dict[float, tuple[float, float]]
"""The places and values of a curve, by the number of tokens."""


@dataclass(frozen=True)
class Measure:
    """A quantity by which arms are compared, and how it is shown."""

    label: str
    of: Quantity
    form: str = ".3f"
    unit: str = ""
    """Follows its values, with a space before it."""
    unit_of_differences: str = ""
    scale: float = 1.0
    """The factor by which it is multiplied when it is shown: 100 for percent."""
    better: int = -1
    """Whether more of it is better, 1, or less, −1."""

    def shown(self, value: Mean | float | None) -> str:
        return number(value, self.form, self.unit, scale=self.scale)

    def shown_difference(self, value: Mean | float | None, *, signed: bool = True) -> str:
        if isinstance(value, Mean) and not signed:
            value = replace(value, mean=abs(value.mean))
        return number(value, self.form, self.unit_of_differences, scale=self.scale, signed=signed)

    def cell(self, difference: Mean | None) -> str:
        """Emphasized, and so grey on a page, unless it is significant; of two seeds, both differences."""
        shown = self.shown_difference(difference)
        if difference is None or difference.n == 1 or difference.leaves_out_zero:
            return shown
        if difference.n < MIN_FOR_A_CLAIM:
            apart = difference.half_width / t_quantile(1)
            ends = (difference.mean - apart, difference.mean + apart)
            both = (number(end, self.form, scale=self.scale, signed=True) for end in ends)
            shown = f"{' and '.join(both)}{self.unit_of_differences}"
        return Markup(f"*{shown}*")


BITS = Measure("bits per character", "bits_per_character")
NATS = Measure("nats per token", "loss")
MEASURES = {
    "text": BITS,
    "recall": Measure("correct answers within its reach", "within_reach", ".1f", " %", " points", 100, 1),
    "agent": Measure("episodes that succeed", "success", ".1f", " %", " points", 100, 1),
}
"""What the arms of each task are compared by."""


@dataclass(frozen=True)
class ArmRuns:
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[Run, ...]
    """At least one."""

    @property
    def label(self) -> str:
        return self.first.label or LABELS.get(self.name, self.name)

    @property
    def results(self) -> dict[int, Result]:
        """The results of the runs that finished, by seed."""
        return {run.seed: run.result for run in self.runs if run.result}

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that finished; if none did, all runs."""
        return tuple(run for run in self.runs if run.result) or self.runs

    @property
    def first(self) -> Run:
        """The run that represents the arm where only one can be shown."""
        return self.counted[0]

    def values(self, quantity: Quantity) -> dict[int, float]:
        """By seed, of the runs that finished and measured it."""
        of = quantity if callable(quantity) else (lambda result: result.get(quantity))
        values = {seed: of(result) for seed, result in self.results.items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def mean(self, quantity: Quantity) -> Mean | None:
        return mean_of_known(self.values(quantity).values())

    def minus(self, base: "ArmRuns", quantity: Quantity) -> Mean | None:
        """The mean over seeds of the difference to ``base`` from the same seed; None without one."""
        return paired(self.values(quantity), base.values(quantity))

    def curves(self, metric: str, over: str = TOKENS) -> dict[int, Curve]:
        """The ``metric`` of each counted run that has recorded it, by seed, thinned to some [`POINTS`][]."""
        points = {run.seed: run.metrics.points(metric, over) for run in self.counted}
        budget = max(run.budget for run in self.counted)
        return {seed: thinned(*of_seed, budget) for seed, of_seed in points.items() if len(of_seed[0])}

    def curve(
        self, metric: str, over: str = TOKENS, base: "ArmRuns | None" = None
    ) -> list[tuple[float, Mean]]:
        """At each number of tokens that the curves of all seeds have, the mean of the place, and that of the
        ``metric`` or of its difference to ``base`` from the same seed."""
        curves = self.curves(metric, over)
        if base:
            theirs = base.curves(metric, over)
            curves = {
                seed: {at: (x, y - theirs[seed][at][1]) for at, (x, y) in curve.items() if at in theirs[seed]}
                for seed, curve in curves.items()
                if seed in theirs
            }
        every = list(curves.values())
        shared = [at for at in (every[0] if every else ()) if all(at in curve for curve in every)]
        return [
            (fmean(curve[at][0] for curve in every), mean_of([curve[at][1] for curve in every]))
            for at in shared
        ]


def measure_of(arms: Sequence[ArmRuns]) -> Measure:
    """What ``arms`` of one task are compared by. Bits per character are not known where only a part of a text
    was evaluated that its tokens lose."""
    measure = MEASURES[arms[0].first.task]
    results = [result for arm in arms for result in arm.results.values()]
    has_bits = not results or any(result.get("bits_per_character") is not None for result in results)
    return NATS if measure is BITS and not has_bits else measure


def thinned(tokens: Any, places: Any, values: Any, budget: float) -> Curve:
    """A curve of some [`POINTS`][], each the mean of an interval at its last point. The intervals are those
    of all runs of one ``budget``, so that seeds that record at the same tokens keep such points."""
    if len(tokens) > POINTS:
        stretch = np.ceil(tokens / (max(budget, float(tokens[-1])) / POINTS))
        first = np.flatnonzero(np.diff(stretch, prepend=-1.0))
        last = np.append(first[1:], len(stretch)) - 1
        values = np.add.reduceat(values, first) / (last - first + 1)
        tokens, places = tokens[last], places[last]
    every = zip(tokens.tolist(), places.tolist(), values.tolist(), strict=True)
    return {at: (place, value) for at, place, value in every}


def arms_of(runs: Sequence[Run]) -> list[ArmRuns]:
    names = dict.fromkeys(run.arm for run in runs)
    return [ArmRuns(name, tuple(run for run in runs if run.arm == name)) for name in names]


def base_of(arms: Sequence[ArmRuns]) -> ArmRuns:
    """The arm that the others are compared with."""
    name = baseline_of([arm.name for arm in arms])
    return next(arm for arm in arms if arm.name == name)


Column = Callable[[ArmRuns], str]
"""From an arm to its cell in a column of a table."""


def arms_table(arms: Sequence[ArmRuns], columns: Mapping[str, Column]) -> Table:
    """A row for each arm: its label, and its cells in those of the ``columns`` that have any."""
    cells = {head: [cell(arm) for arm in arms] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if set(column) - {DASH}}
    rows = [[arm.label, *row] for arm, row in zip(arms, zip(*cells.values(), strict=True), strict=True)]
    return table(["model", *cells], rows, numbers=True)
