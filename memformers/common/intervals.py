"""Means of a few independent numbers, with intervals by Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


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
        """Whether the interval excludes zero; never for a single number."""
        return abs(self.mean) > self.half_width


def mean_of(numbers: Sequence[float]) -> Mean:
    """The mean of at least one number."""
    n = len(numbers)
    half_width = t_quantile(n - 1) * stdev(numbers) / math.sqrt(n) if n > 1 else math.nan
    return Mean(fmean(numbers), half_width, n)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; from 11 degrees of freedom on by the first terms of its expansion
    about the quantile of the normal distribution (Abramowitz and Stegun, 26.7.5), correct to three digits."""
    few = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    z = 1.959964
    if freedom <= len(few):
        return few[freedom - 1]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**i for i, term in enumerate(terms, 1))
