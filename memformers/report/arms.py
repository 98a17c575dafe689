"""Arms: runs that differ only in their seed, with their means and paired differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from memformers.common.intervals import Mean, mean_of_known, paired
from memformers.report.markdown import number, table
from memformers.runs.finished import FinishedRun
from memformers.runs.plan import baseline_of

LABELS = {
    "transformer": "Transformer, no memory",
    "transformer-xl": "Transformer-XL",
    "compressive": "Compressive Transformer",
}
"""The labels in a report of arms that have the name of their model."""
Result = dict[str, Any]
"""A run's ``result.json``."""
Quantity = str | Callable[[Result], float | None]
"""A number in a result: its name, or how it is computed; None if there was nothing to measure."""


@dataclass(frozen=True)
class Measure:
    """A quantity by which arms are compared, and how it is shown."""

    label: str
    of: Quantity
    form: str = ".4f"
    unit: str = ""
    """Follows its values, with a space before it."""
    unit_of_differences: str = ""
    scale: float = 1.0
    """The factor by which it is multiplied when it is shown: 100 for percent."""
    better: int = -1
    """Whether more of it is better, 1, or less, −1."""

    def shown(self, value: Mean | float | None) -> str:
        """A value of it in a report."""
        return number(value, self.form, self.unit, scale=self.scale)

    def shown_difference(self, value: Mean | float | None, *, signed: bool = True) -> str:
        """A difference of two values, or its size if it is not ``signed``."""
        return number(value, self.form, self.unit_of_differences, scale=self.scale, signed=signed)


BITS = Measure("bits per character", "bits_per_character")


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[FinishedRun, ...]
    """At least one."""

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return self.first.label or LABELS.get(self.name, self.name)

    @property
    def results(self) -> dict[int, Result]:
        """The results of the runs that finished, by seed."""
        return {run.seed: run.result for run in self.runs if run.result}

    @property
    def counted(self) -> tuple[FinishedRun, ...]:
        """The runs that finished; if none did, all runs."""
        return tuple(run for run in self.runs if run.result) or self.runs

    @property
    def first(self) -> FinishedRun:
        """The run that represents the arm where only one can be shown."""
        return self.counted[0]

    def values(self, quantity: Quantity) -> dict[int, float]:
        """The ``quantity`` of each run that finished and measured it, by seed."""
        of = quantity if callable(quantity) else itemgetter(quantity)
        found = {seed: of(result) for seed, result in self.results.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, quantity: Quantity) -> Mean | None:
        """The mean of ``quantity`` over seeds; None if no run measured it."""
        return mean_of_known(self.values(quantity).values())

    def minus(self, base: "Arm", quantity: Quantity, of_base: Quantity | None = None) -> Mean | None:
        """The mean over seeds of the difference to ``base`` from the same seed, or to another quantity
        ``of_base``; None without one."""
        return paired(self.values(quantity), base.values(of_base or quantity))


def arms_of(runs: Sequence[FinishedRun]) -> list[Arm]:
    """The arms of ``runs``, in their order."""
    names = dict.fromkeys(run.arm for run in runs)
    return [Arm(name, tuple(run for run in runs if run.arm == name)) for name in names]


def base_of(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with."""
    name = baseline_of([arm.name for arm in arms])
    return next(arm for arm in arms if arm.name == name)


Column = Callable[[Arm], str]
"""A column of a table: the cell of an arm."""


def arms_table(arms: Sequence[Arm], columns: Mapping[str, Column], head: str = "arm") -> str:
    """A row for each arm: its label, and its cells in the ``columns``, by their heads."""
    return table([head, *columns], [[arm.label, *(cell(arm) for cell in columns.values())] for arm in arms])
