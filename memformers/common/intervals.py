"""Means of independent numbers, with intervals by Student's t."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

K = TypeVar("K")
MIN_FOR_A_CLAIM = 3
"""The fewest numbers from which a difference may be claimed. The interval of two is 12.7 times as wide as
their deviation, which is often small by chance."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """The mean of independent numbers, with its 95 % confidence interval by Student's t."""

    mean: float
    half_width: float
    """Half the interval's width; NaN for a single number."""
    n: int
    """How many numbers there are."""

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval excludes zero; never for fewer than [`MIN_FOR_A_CLAIM`][] numbers."""
        return self.n >= MIN_FOR_A_CLAIM and abs(self.mean) > self.half_width

    def to_json(self) -> dict[str, float | int | None]:
        half_width = None if math.isnan(self.half_width) else self.half_width
        return {"mean": self.mean, "half_width": half_width, "n": self.n}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Mean":
        half_width = data["half_width"]
        return cls(data["mean"], math.nan if half_width is None else half_width, data["n"])


def mean_of(numbers: Sequence[float]) -> Mean:
    """The mean of at least one number; without an interval where one of them is infinite or NaN."""
    n = len(numbers)
    if not all(map(math.isfinite, numbers)):
        return Mean(sum(numbers) / n, math.nan, n)
    half_width = t_quantile(n - 1) * stdev(numbers) / math.sqrt(n) if n > 1 else math.nan
    return Mean(fmean(numbers), half_width, n)


def mean_of_known(numbers: Iterable[float | None]) -> Mean | None:
    """The mean of those ``numbers`` that aren't None; None if all are."""
    present = [number for number in numbers if number is not None]
    return mean_of(present) if present else None


def mean_of_groups(sums: Sequence[float], counts: Sequence[int]) -> Mean:
    """The mean of all numbers in independent groups, of which each has ``counts`` numbers that add up to
    ``sums``, with the interval of a ratio: of (sum − mean · count) / mean count, over groups with numbers."""
    groups = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    mean_count = fmean(count for _, count in groups)
    # The interval is that of the groups' deviations from the common mean.
    mean = mean_of([total for total, _ in groups]).mean / mean_count
    residuals = mean_of([(total - mean * count) / mean_count for total, count in groups])
    return Mean(mean, residuals.half_width, residuals.n)


def mean_of_moments(
    n: float, sums: float, counts: float, squared_sums: float, squared_counts: float, products: float
) -> Mean:
    """[`mean_of_groups`][] of ``n`` groups from totals over them: of the sums, of the counts, of the squares
    of both, and of their products."""
    mean = sums / counts
    # Σ (sum − mean · count)², which rounding may make negative.
    squares = max(squared_sums - 2 * mean * products + mean**2 * squared_counts, 0.0)
    deviation = math.sqrt(squares / (n - 1)) * n / counts if n > 1 else math.nan
    return Mean(mean, t_quantile(int(n) - 1) * deviation / math.sqrt(n) if n > 1 else math.nan, int(n))


def paired(ours: Mapping[K, float | None], base: Mapping[K, float | None]) -> Mean | None:
    """The mean of ``ours`` minus ``base`` over the keys for which both have a number; None without one. Arms
    of one seed share weights and segments, so their difference varies less than each of them."""
    differences = []
    for key, number in ours.items():
        base_number = base.get(key)
        if number is not None and base_number is not None:
            differences.append(number - base_number)
    return mean_of(differences) if differences else None


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; from 11 degrees of freedom on by the first terms of its expansion
    about the quantile of the normal distribution (Abramowitz and Stegun, 26.7.5), correct to three digits."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = 1.959964  # the quantile of the normal distribution
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, third
    return z + sum(term / freedom**i for i, term in enumerate(terms, 1))
