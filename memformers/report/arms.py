"""Arms: runs that differ only in their seed, with their means, curves and paired differences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict
from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean, mean_of, mean_of_known, paired, t_quantile
from memformers.report.data import Cell, Table
from memformers.report.numbers import DASH, number
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

    def __post_init__(self) -> None:
        try:
            self.shown(1.0)
        except (ValueError, OverflowError) as error:
            raise UserError(f"no number has form={self.form!r} and scale={self.scale!r}: {error}.") from None

    def shown(self, value: Mean | float | None) -> str:
        return number(value, self.form, self.unit, scale=self.scale)

    def shown_difference(self, value: Mean | float | None, *, signed: bool = True) -> str:
        if isinstance(value, Mean) and not signed:
            value = replace(value, mean=abs(value.mean))
        return number(value, self.form, self.unit_of_differences, scale=self.scale, signed=signed)

    def cell(self, difference: Mean | None) -> str | Cell:
        """Grey on a page unless it is significant; of two seeds, both differences."""
        shown = self.shown_difference(difference)
        if difference is None or difference.n == 1 or difference.leaves_out_zero:
            return shown
        if difference.n < MIN_FOR_A_CLAIM:
            # The half width of two numbers is Student's t times half their distance.
            half_distance = difference.half_width / t_quantile(1)
            low = number(difference.mean - half_distance, self.form, scale=self.scale, signed=True)
            high = number(difference.mean + half_distance, self.form, scale=self.scale, signed=True)
            shown = f"{low} and {high}{self.unit_of_differences}"
        return Cell(shown, is_quiet=True)


BITS = Measure("bits per character", "bits_per_character")
NATS = Measure("nats per token", "loss")
MEASURES = {
    "text": BITS,
    "recall": Measure("correct answers within its reach", "within_reach", ".1f", " %", " points", 100, 1),
}
"""What the arms of each task of the package are compared by."""


def label_of(name: str, label: str = "") -> str:
    """What reports call the arm ``name``, which may have a ``label``."""
    return label or LABELS.get(name, name)


@dataclass(frozen=True)
class ArmRuns:
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[Run, ...]
    """At least one."""

    @property
    def label(self) -> str:
        return label_of(self.name, self.first.label)

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
        values = {}
        for seed, result in self.results.items():
            value = quantity(result) if callable(quantity) else result.get(quantity)
            if value is not None:
                values[seed] = value
        return values

    def mean(self, quantity: Quantity) -> Mean | None:
        return mean_of_known(self.values(quantity).values())

    def minus(self, base: "ArmRuns", quantity: Quantity) -> Mean | None:
        """The mean over seeds of the difference to ``base`` from the same seed; None without one."""
        return paired(self.values(quantity), base.values(quantity))

    def curves(self, metric: str, over: str = TOKENS) -> dict[int, Curve]:
        """The ``metric`` of each counted run that has recorded it, by seed, thinned to some [`POINTS`][]."""
        budget = max(run.budget for run in self.counted)
        curves = {}
        for run in self.counted:
            tokens, places, values = run.metrics.points(metric, over)
            if len(tokens):
                curves[run.seed] = thinned(tokens, places, values, budget)
        return curves

    def curve(
        self, metric: str, over: str = TOKENS, base: "ArmRuns | None" = None
    ) -> list[tuple[float, Mean]]:
        """At each number of tokens that the curves of all seeds have, the mean of the place, and that of the
        ``metric`` or of its difference to ``base`` from the same seed."""
        curves = self.curves(metric, over)
        if base:
            curves = differences_of(curves, base.curves(metric, over))
        if not curves:
            return []
        # The numbers of tokens that all curves have, in the order of the first
        first, *rest = curves.values()
        shared = set(first).intersection(*rest)
        points = []
        for n_tokens in first:
            if n_tokens in shared:
                x_values, values = zip(*[curve[n_tokens] for curve in curves.values()], strict=True)
                points.append((fmean(x_values), mean_of(values)))
        return points


def most_seeds(differences: Iterable[Mean | None]) -> int:
    """The most seeds that one of the ``differences`` is over."""
    return max((difference.n for difference in differences if difference), default=0)


def differences_of(curves: Mapping[int, Curve], base: Mapping[int, Curve]) -> dict[int, Curve]:
    """Of the seeds and the numbers of tokens that both have, the differences of their values."""
    differences: dict[int, Curve] = {}
    for seed, curve in curves.items():
        if seed not in base:
            continue
        differences[seed] = {}
        for n_tokens, (x, value) in curve.items():
            if n_tokens in base[seed]:
                _, base_value = base[seed][n_tokens]
                differences[seed][n_tokens] = (x, value - base_value)
    return differences


def measure_of(arms: Sequence[ArmRuns]) -> Measure:
    """What ``arms`` of one task are compared by. Bits per character are not known where only a part of a text
    was evaluated that its tokens lose."""
    run = arms[0].first
    if run.task_info.measure:
        return config_from_dict(Measure, run.task_info.measure, f"the measure of {run.task}")
    measure = MEASURES.get(run.task, BITS)
    if measure is not BITS:
        return measure
    has_results = any(arm.results for arm in arms)
    has_bits = any(arm.values(BITS.of) for arm in arms)
    return BITS if has_bits or not has_results else NATS


def thinned(tokens: Any, places: Any, values: Any, budget: float) -> Curve:
    """A curve of some [`POINTS`][], each the mean of an interval at its last point. The intervals are those
    of all runs of one ``budget``, so that seeds that record at the same tokens keep such points."""
    if len(tokens) > POINTS:
        width = max(budget, float(tokens[-1])) / POINTS
        interval = np.ceil(tokens / width)
        first = np.flatnonzero(np.diff(interval, prepend=-1.0))
        last = np.append(first[1:], len(interval)) - 1
        values = np.add.reduceat(values, first) / (last - first + 1)
        tokens = tokens[last]
        places = places[last]
    points = zip(places.tolist(), values.tolist(), strict=True)
    return dict(zip(tokens.tolist(), points, strict=True))


def arms_of(runs: Sequence[Run]) -> list[ArmRuns]:
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    return [ArmRuns(name, tuple(of_arm)) for name, of_arm in by_arm.items()]


def labels_of(arms: Sequence[ArmRuns]) -> list[str]:
    return [arm.label for arm in arms]


def base_of(arms: Sequence[ArmRuns]) -> ArmRuns:
    """The arm that the others are compared with."""
    by_name = {arm.name: arm for arm in arms}
    return by_name[baseline_of(list(by_name))]


Column = Callable[[ArmRuns], str | Cell]
"""From an arm to its cell in a column of a table."""


def arms_table(arms: Sequence[ArmRuns], columns: Mapping[str, Column]) -> Table:
    """A row for each arm: its label, and its cells in those of the ``columns`` that have any."""
    head = ["model"]
    rows: list[list[str | Cell]] = [[label] for label in labels_of(arms)]
    for name, column in columns.items():
        cells = list(map(column, arms))
        if set(cells) - {DASH}:
            head.append(name)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
    return Table(head, rows, has_numbers=True)
