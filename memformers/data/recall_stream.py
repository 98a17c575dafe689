"""Streams of symbols that set values and ask for them, to measure how far back a memory recalls.

A token either sets a key to a value, or asks for a key; after a question, the model must predict the value
that was last set for that key. Keys are set again all the time, so weights can't learn the answers, and the
key of a question doesn't show how long ago it was set. This distance is known for each question.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED, Segment

NEAREST_BAND = 64
"""Questions are drawn by bands of distances: the first is below this number, and each octave from it on is
one."""
NOTHING = -1
"""The distance of positions without a question."""


@dataclass(frozen=True)
class RecallStream:
    """The symbols, and how often values are set.

    Token ids: first the values, which are only targets and never inputs; then, for each pair of a key and a
    value, the token that sets it, all values of a key together; then, for each key, the token that asks for
    it.
    """

    keys: int = 16
    """The number of keys."""
    values: int = 4
    """The number of values; a guess is right with probability 1 / ``values``."""
    set_probability: float = 1 / 8
    """The fraction of tokens that set a key; a key's value is, on average, ``keys / set_probability``
    positions old when it is set again."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        if self.keys < 1 or self.values < 2:
            raise UserError(
                f"keys={self.keys} and values={self.values} leave nothing to recall; use at least 1 key "
                f"and 2 values."
            )
        if not 0.0 < self.set_probability < 1.0:
            raise UserError(f"set_probability={self.set_probability} must be between 0 and 1.")

    @property
    def vocab_size(self) -> int:
        """The number of different tokens: values, pairs of a key and a value, and keys."""
        return self.values + self.keys * self.values + self.keys

    @property
    def chance(self) -> float:
        """The fraction of answers that are right without memory."""
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
    many positions ago the value of a question was set, or NOTHING where a token sets a key.

    With probability ``stream.set_probability`` a token sets a key to a value, both drawn uniformly; otherwise
    it asks. A question draws a band of distances uniformly among those with at least one key (below
    [`NEAREST_BAND`][], and each octave from there on), and then one of its keys uniformly. ``longest``
    returns the longest distance of a question in a segment that begins at the given position; if no key was
    set so recently, a token sets one.
    """
    rng = np.random.default_rng(seed)
    last_set = np.full((batch_size, stream.keys), NEVER)
    value_of = np.zeros((batch_size, stream.keys), dtype=np.int64)
    start = 0
    while True:
        limit = longest(start) if longest else FOREVER
        if limit < 1:
            raise UserError(f"longest={limit} is too small; use at least 1.")
        position = np.arange(start, start + segment_len)
        sets = drawn_sets(rng, stream, last_set.max(axis=1), position, limit)  # [S, B]
        key, value = (rng.integers(n, size=sets.shape) for n in (stream.keys, stream.values))  # [S, B]

        is_new = sets[..., None] & (key[..., None] == np.arange(stream.keys))  # [S, B, keys]
        known = carried(last_set, np.where(is_new, position[:, None, None], NEVER))  # [S + 1, B, keys]
        asked = drawn_asks(rng, position[:, None, None] - known[:-1], limit)  # [S, B]
        set_at = np.take_along_axis(known[:-1], asked[..., None], axis=2)[..., 0]  # [S, B]
        values = values_at(known, value_of, value, start)  # [S + 1, B, keys]
        answer = np.take_along_axis(values[:-1], asked[..., None], axis=2)[..., 0]  # [S, B]

        set_token = stream.values + key * stream.values + value
        ask_token = stream.values + stream.keys * stream.values + asked
        inputs = np.where(sets, set_token, ask_token)
        targets = np.where(sets, IGNORED, answer)
        distances = np.where(sets, NOTHING, position[:, None] - set_at)
        segment = Segment(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            starts_over=start == 0,
            end=start + segment_len,
            epoch=0,
        )
        yield segment, torch.from_numpy(distances)
        last_set, value_of, start = known[-1], values[-1], start + segment_len


NEVER = -(2**62)
"""The time at which a key was set that was never set."""
FOREVER = 2**61
"""A limit above all distances, and below the distance of a key that was never set."""


def drawn_sets(
    rng: np.random.Generator, stream: RecallStream, newest: np.ndarray, position: np.ndarray, limit: int
) -> np.ndarray:
    """Which tokens at ``position [S]`` set a key, boolean ``[S, B]``; ``newest [B]`` is when each stream last
    set one. If that is more than ``limit`` positions ago, no question is possible."""
    sets = rng.random((len(position), len(newest))) < stream.set_probability
    newest = newest.copy()
    for row, now in zip(sets, position, strict=True):
        row |= now - newest > limit
        newest[row] = now
    return sets


def carried(first: np.ndarray, events: np.ndarray) -> np.ndarray:
    """The maximum of ``first [B, keys]`` and of all ``events [S, B, keys]`` before each position, and after
    the last, ``[S + 1, B, keys]``."""
    return np.maximum.accumulate(np.concatenate([first[None], events]), axis=0)


def values_at(known: np.ndarray, value_of: np.ndarray, value: np.ndarray, start: int) -> np.ndarray:
    """Each key's value before each position, and after the last, ``[S + 1, B, keys]``. ``known`` says when it
    was set, in the same shape; ``value_of [B, keys]`` are the values before the segment, which begins at
    ``start``; ``value [S, B]`` are the values that the segment sets."""
    row = np.clip(known - start, 0, None)  # of the segment
    stream = np.arange(value.shape[1])[:, None]
    return np.where(known >= start, value[row, stream], value_of)


def drawn_asks(rng: np.random.Generator, ages: np.ndarray, limit: int) -> np.ndarray:
    """A key for each position, ``[S, B]``, by the ``ages [S, B, keys]`` of the keys' values: first a band
    uniformly among those with a key that is not older than ``limit``, then one of its keys uniformly."""
    # A number's exponent is its octave: 0 for [½, 1), 1 for [1, 2), …
    bands = np.where(ages <= limit, np.frexp(ages / NEAREST_BAND)[1].clip(0), NOTHING)  # [S, B, keys]
    weights = np.zeros(ages.shape)
    for band in range(bands.max() + 1):
        inside = bands == band
        weights += inside / np.maximum(inside.sum(axis=2, keepdims=True), 1)
    total = weights.cumsum(axis=2)  # up to the number of bands with a key
    drawn = rng.random(ages.shape[:2]) * total[..., -1]
    return (total > drawn[..., None]).argmax(axis=2)
