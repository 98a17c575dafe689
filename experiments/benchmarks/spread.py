"""Median and quartiles of measurements, and of ratios of measurements from the same round."""

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
    """The speed of something with these ``seconds`` as a multiple of the reference's, by rounds."""
    return spread([b / a for a, b in zip(seconds, reference, strict=True)])
