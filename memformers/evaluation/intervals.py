"""Confidence intervals of means of measurements in tensors."""

import math

from torch import Tensor

from memformers.common.intervals import t_quantile


def half_width(observations: Tensor) -> float:
    """Half the width of the 95 % confidence interval of the mean of independent ``observations [n]``, by
    Student's t; NaN for fewer than two."""
    n = len(observations)
    return t_quantile(n - 1) * observations.std().item() / math.sqrt(n) if n > 1 else math.nan
