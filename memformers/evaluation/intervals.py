"""Confidence intervals of means of measurements in tensors."""

import math

from torch import Tensor

from memformers.common.intervals import Mean, t_quantile


def half_width(observations: Tensor) -> float:
    """Half the width of the 95 % confidence interval of the mean of independent ``observations [n]``, by
    Student's t; NaN for fewer than two."""
    n = len(observations)
    return t_quantile(n - 1) * observations.std().item() / math.sqrt(n) if n > 1 else math.nan


def mean_over_streams(sums: Tensor, counts: Tensor) -> Mean:
    """The mean of all numbers in some independent streams, each of which has ``counts [B]`` numbers that add
    up to ``sums [B]``, with its 95 % confidence interval by Student's t over the streams that have any; at
    least one has.

    The interval is that of a ratio: of (sums − mean · counts) / mean count. For equal counts that is the
    interval of the streams' means.
    """
    sums, counts = sums[counts > 0], counts[counts > 0].double()
    mean = sums.sum() / counts.sum()
    return Mean(mean.item(), half_width((sums - mean * counts) / counts.mean()), len(counts))
