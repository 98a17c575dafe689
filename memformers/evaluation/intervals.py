"""Confidence intervals of means."""

import math

from torch import Tensor


def half_width(observations: Tensor) -> float:
    """Half the width of the 95 % confidence interval of the mean of independent ``observations [n]``, by
    Student's t; NaN for fewer than two."""
    n = len(observations)
    return t_quantile(n - 1) * observations.std().item() / math.sqrt(n) if n > 1 else math.nan


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; from 11 degrees of freedom on by the first terms of its expansion
    about the normal distribution's (Abramowitz and Stegun, 26.7.5), right to three digits."""
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
