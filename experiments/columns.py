"""Tables of arms that are measured by several measures, each on a task of its own: a row for each arm, and a
column for each measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memformers.common.files import csv_text
from memformers.common.intervals import Mean
from memformers.report.arms import ArmRuns, Measure
from memformers.report.markdown import table


@dataclass(frozen=True)
class Measured:
    """A measure of the arms of one task: a column."""

    head: str
    measure: Measure
    arms: Mapping[str, ArmRuns]
    """Those that were trained on the task, by their names."""

    def mean(self, name: str) -> Mean | None:
        """The mean of the arm called ``name`` over seeds; None for an arm without results."""
        return self.arms[name].mean(self.measure.of) if name in self.arms else None

    def difference(self, name: str, base: str) -> Mean | None:
        """The difference of the arm called ``name`` to that called ``base``, paired by seed; None for the
        same arm, and without a common seed."""
        if name == base or not {name, base} <= set(self.arms):
            return None
        return self.arms[name].minus(self.arms[base], self.measure.of)


def measured(head: str, measure: Measure, arms: Sequence[ArmRuns]) -> Measured:
    """The column of ``measure`` for the ``arms`` of a task."""
    return Measured(head, measure, {arm.name: arm for arm in arms})


def labels_of(columns: Sequence[Measured]) -> dict[str, str]:
    """The label of each arm, by its name, in the order in which the columns have them."""
    return {arm.name: arm.label for column in columns for arm in column.arms.values()}


def means_table(columns: Sequence[Measured], labels: Mapping[str, str], head: str = "arm") -> str:
    """A row for each arm of ``labels``: its means."""
    rows = [[label, *(c.measure.shown(c.mean(name)) for c in columns)] for name, label in labels.items()]
    return table([head, *(column.head for column in columns)], rows, numbers=True)


def differences_table(
    columns: Sequence[Measured], labels: Mapping[str, str], base: str, head: str = "arm"
) -> str:
    """A row for each arm of ``labels`` but ``base``: its differences to that one, paired by seed."""
    rows = [
        [label, *(c.measure.cell(c.difference(name, base)) for c in columns)]
        for name, label in labels.items()
        if name != base
    ]
    return table([head, *(column.head for column in columns)], rows, numbers=True)


def seeds_csv(columns: Sequence[Measured], head: Sequence[str]) -> str:
    """A row for each column, arm and seed that has a value, below ``head``."""
    rows = [
        [column.head, name, seed, value]
        for column in columns
        for name, arm in column.arms.items()
        for seed, value in arm.values(column.measure.of).items()
    ]
    return csv_text(head, rows)
