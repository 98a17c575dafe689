"""Median and quartiles of what was measured, and of ratios of what was measured in the same round."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple


class Spread(NamedTuple):
    """The middle of some numbers, and the quartiles below and above."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} – {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one number."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(median(values), low, high)


def times_as_fast(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """How many times as fast something with these ``seconds`` is as the reference, by rounds."""
    return spread([b / a for a, b in zip(seconds, reference, strict=True)])
