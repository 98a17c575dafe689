"""Streams of symbols that set values and ask for them, to measure how far back a memory recalls.

A token sets a key to a value, or asks for a key, after which the model must predict the value last set for
it. Keys are set again all the time, so weights can't learn the answers, and questions don't show distances.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Range
from memformers.data.streams import IGNORED, Segment

NEAREST_BAND = 64  # questions are drawn by bands of distances: the first is below it, then each octave is one
NO_QUESTION = -1  # the distance of positions without a question
NEVER = -(2**62)  # the time at which a key was set that was never set
FOREVER = 2**61  # a limit above all distances, and below the distance of a key that was never set


@dataclass(frozen=True)
class RecallStream(Checked):
    """The symbols, and how often values are set.

    Token ids: the values, which are only targets; then the token that sets each pair, all values of a key
    together; then the token that asks for each key.
    """

    keys: Count = 16
    values: Annotated[int, Range(2)] = 4
    set_probability: Annotated[float, Range(above=0, below=1)] = 1 / 8
    """A key's value is, on average, ``keys / set_probability`` positions old when it is set again."""

    @property
    def vocab_size(self) -> int:
        return self.values + self.keys * self.values + self.keys

    @property
    def chance(self) -> float:
        """The fraction of answers that a guess has right."""
        return 1 / self.values


def recall_segments(
    stream: RecallStream,
    batch_size: int,
    segment_len: int,
    seed: int,
    *,
    longest: Callable[[int], int] | None = None,
) -> Iterator[tuple[Segment, Tensor]]:
    """An endless sequence of segments of ``batch_size`` such streams, each with its distances ``[S, B]``: how
    many tokens ago the value of a question was set, or ``NO_QUESTION`` where a token sets a key.

    With probability ``stream.set_probability`` a token sets a key to a value, both drawn uniformly; otherwise
    it asks: it draws a band of distances (``NEAREST_BAND``) among those with a key, and one of its keys.
    ``longest`` returns the longest distance of a question in a segment that begins at the given position; if
    no key was set so recently, a token sets one.
    """
    rng = np.random.default_rng(seed)
    last_set = np.full((batch_size, stream.keys), NEVER)
    value_of = np.zeros((batch_size, stream.keys), dtype=np.int64)
    start = 0
    while True:
        limit = longest(start) if longest else FOREVER
        if limit < 1:
            raise UserError(f"expected longest to be at least 1, got {limit} at position {start:,}.")
        position = np.arange(start, start + segment_len)
        sets = draw_sets(rng, stream, last_set.max(axis=1), position, limit)  # [S, B]
        key, value = (rng.integers(n, size=sets.shape) for n in (stream.keys, stream.values))  # [S, B]

        is_new = sets[..., None] & (key[..., None] == np.arange(stream.keys))  # [S, B, keys]
        set_now = np.where(is_new, position[:, None, None], NEVER)  # [S, B, keys]
        known = np.maximum.accumulate(np.concatenate([last_set[None], set_now]))  # [S + 1, B, keys]
        queries = draw_queries(rng, position[:, None, None] - known[:-1], limit)  # [S, B]
        set_at = np.take_along_axis(known[:-1], queries[..., None], axis=2)[..., 0]  # [S, B]
        set_in_segment = value[np.clip(known - start, 0, None), np.arange(batch_size)[:, None]]
        values = np.where(known >= start, set_in_segment, value_of)  # [S + 1, B, keys]
        answer = np.take_along_axis(values[:-1], queries[..., None], axis=2)[..., 0]  # [S, B]

        set_token = stream.values + key * stream.values + value
        ask_token = stream.values + stream.keys * stream.values + queries
        inputs = torch.from_numpy(np.where(sets, set_token, ask_token))
        targets = torch.from_numpy(np.where(sets, IGNORED, answer))
        distances = torch.from_numpy(np.where(sets, NO_QUESTION, position[:, None] - set_at))
        end = start + segment_len
        yield Segment(inputs, targets, starts_over=start == 0, end=end), distances
        last_set = known[-1]
        value_of = values[-1]
        start = end


def draw_sets(
    rng: np.random.Generator, stream: RecallStream, newest: np.ndarray, position: np.ndarray, limit: int
) -> np.ndarray:
    """Which tokens at ``position [S]`` set a key, boolean ``[S, B]``; ``newest [B]`` is when each stream last
    set one. If that is more than ``limit`` tokens ago, no question is possible."""
    sets = rng.random((len(position), len(newest))) < stream.set_probability
    newest = newest.copy()
    for row, now in zip(sets, position, strict=True):
        row |= now - newest > limit
        newest[row] = now
    return sets


def draw_queries(rng: np.random.Generator, ages: np.ndarray, limit: int) -> np.ndarray:
    """A key for each question, ``[S, B]``, by the ``ages [S, B, keys]`` of the keys' values: first a band
    uniformly among those with a key that is not older than ``limit``, then one of its keys uniformly."""
    # A number's exponent is its octave: 0 for [½, 1), 1 for [1, 2), …
    octaves = np.frexp(ages / NEAREST_BAND)[1].clip(0)  # [S, B, keys]
    bands = np.where(ages <= limit, octaves, NO_QUESTION)
    weights = np.zeros(ages.shape)
    for band in range(bands.max() + 1):
        inside = bands == band
        weights += inside / np.maximum(inside.sum(axis=2, keepdims=True), 1)
    total = weights.cumsum(axis=2)  # up to the number of bands with a key
    drawn = rng.random(ages.shape[:2]) * total[..., -1]
    return (total > drawn[..., None]).argmax(axis=2)
