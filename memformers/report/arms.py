"""Arms: runs that differ only in their seed, with their means and paired differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memformers.common.intervals import Mean, mean_of
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

    def mean(self, quantity: str) -> Mean | None:
        """The mean of the results' ``quantity`` over seeds; None if it wasn't measured."""
        values = [result.get(quantity) for result in self.results.values()]
        known = [float(value) for value in values if value is not None]
        return mean_of(known) if known else None


def arms_of(runs: Sequence[FinishedRun]) -> list[Arm]:
    """The arms of ``runs``, in their order."""
    names = dict.fromkeys(run.arm for run in runs)
    return [Arm(name, tuple(run for run in runs if run.arm == name)) for name in names]


def base_of(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with."""
    name = baseline_of([arm.name for arm in arms])
    return next(arm for arm in arms if arm.name == name)


def seeds_in_common(arm: Arm, base: Arm) -> list[int]:
    """The seeds from which both arms have finished runs."""
    return [seed for seed in arm.results if seed in base.results]


def paired(arm: Arm, base: Arm, of: Callable[[Result, Result], float]) -> Mean | None:
    """The mean over seeds of ``of``, a function of both arms' results; None without a seed in common.

    From the same seed, arms begin with the same weights in all modules that they share, and read the same
    segments in the same order. So a difference of two such runs varies less than each of them.
    """
    values = [of(arm.results[seed], base.results[seed]) for seed in seeds_in_common(arm, base)]
    return mean_of(values) if values else None
