"""Curves for a chart: of one run, and the mean over an arm's seeds with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memformers.common.intervals import t_quantile
from memformers.dashboard.following import Numbers

POINTS = 500
"""About the number of points that a chart can show."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of their tokens."""

    tokens: Numbers
    x: Numbers
    """The horizontal axis: the tokens, or the seconds."""
    y: Numbers


@dataclass(frozen=True)
class MeanCurve:
    """The mean over seeds, and the ends of its 95 % interval by Student's t; NaN for a single seed."""

    x: Numbers
    y: Numbers
    low: Numbers
    high: Numbers


def thinned(curve: Curve, budget: float) -> Curve:
    """At most about [`POINTS`][memformers.dashboard.curves.POINTS] points: each is the mean of the points in
    an interval of the training, drawn at the last of them.

    The intervals have the same length for all runs with the same number of tokens, the ``budget``, so that
    seeds which record at the same tokens keep points at the same tokens.
    """
    if len(curve.y) <= POINTS:
        return curve
    width = max(budget, float(curve.tokens[-1])) / POINTS
    stretch = np.ceil(curve.tokens / width)
    first = np.flatnonzero(np.diff(stretch, prepend=-1.0))
    last = np.append(first[1:], len(stretch)) - 1
    y = np.add.reduceat(curve.y, first) / (last - first + 1)
    return Curve(curve.tokens[last], curve.x[last], y)


def over_seeds(curves: Sequence[Curve]) -> MeanCurve:
    """The mean of ``x`` and of ``y`` at each number of tokens for which all ``curves``, at least one, have
    both."""
    shared = curves[0].tokens
    for curve in curves[1:]:
        shared = np.intersect1d(shared, curve.tokens)
    at = [np.searchsorted(curve.tokens, shared) for curve in curves]
    x = np.mean([curve.x[i] for curve, i in zip(curves, at, strict=True)], axis=0)
    ys = np.array([curve.y[i] for curve, i in zip(curves, at, strict=True)])
    y = ys.mean(axis=0)
    n = len(curves)
    half = t_quantile(n - 1) * ys.std(axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.full_like(y, math.nan)
    return MeanCurve(x, y, y - half, y + half)
