"""Streams of symbols in which values are set and asked for, so that what a memory reaches can be measured.

A token either sets a key to a value, or asks for a key; after an ask, the value that was last set for that
key is to be predicted. Keys are set again all the time, so weights can't learn the answers, and which key is
asked for says nothing about how long ago it was set. That distance is known for each ask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED, Segment

NEAREST_BAND = 64
"""Asks are drawn by bands of distances: below this, and then each octave from it on."""
NOTHING = -1
"""The distance where nothing is asked for."""


@dataclass(frozen=True)
class RecallStream:
    """What symbols there are, and how often values are set.

    Token ids: the values, which are targets only and never inputs; then a token that sets a key to a value,
    for each pair of them, all values of a key together; then a token that asks for a key, for each key.
    """

    keys: int = 16
    """How many keys there are."""
    values: int = 4
    """How many values; a guess is right with probability 1 / ``values``."""
    set_probability: float = 1 / 8
    """The share of tokens that set; a key's value is, on average, ``keys / set_probability`` positions old
    when it is set again."""

    def __post_init__(self) -> None:
        """Raise UserError, saying what doesn't fit."""
        if self.keys < 1 or self.values < 2:
            raise UserError(
                f"keys={self.keys} and values={self.values} leave nothing to recall; use at least 1 key "
                f"and 2 values."
            )
        if not 0.0 < self.set_probability < 1.0:
            raise UserError(f"set_probability={self.set_probability} must be between 0 and 1.")

    @property
    def vocab_size(self) -> int:
        """How many tokens there are: values, pairs of a key and a value, and keys."""
        return self.values + self.keys * self.values + self.keys

    @property
    def chance(self) -> float:
        """The share of answers that are right without memory."""
        return 1 / self.values


def recall_segments(
    stream: RecallStream,
    batch_size: int,
    segment_len: int,
    seed: int,
    *,
    longest: Callable[[int], int] | None = None,
) -> Iterator[tuple[Segment, Tensor]]:
    """Segments of ``batch_size`` such streams without end, each with its distances ``[S, B]``: how many
    positions ago the value that is asked for was set, or NOTHING where a token sets.

    A token sets with ``stream.set_probability``, a key and a value drawn uniformly, and asks otherwise. An
    ask draws a band of distances uniformly among those that hold at least one key (below
    [`NEAREST_BAND`][], and each octave from there on), and then one of its keys uniformly. ``longest`` gives,
    for the position at which a segment begins, the greatest distance that is asked for in it; where no key
    was set so recently, a token sets.
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
"""When a key was set that never was."""
FOREVER = 2**61
"""Farther than any distance, and nearer than that of a key that never was set."""


def drawn_sets(
    rng: np.random.Generator, stream: RecallStream, newest: np.ndarray, position: np.ndarray, limit: int
) -> np.ndarray:
    """Which tokens at ``position [S]`` set, boolean ``[S, B]``; ``newest [B]`` is when each stream last set
    anything. Where that is more than ``limit`` positions ago, nothing can be asked for."""
    sets = rng.random((len(position), len(newest))) < stream.set_probability
    newest = newest.copy()
    for row, now in zip(sets, position, strict=True):
        row |= now - newest > limit
        newest[row] = now
    return sets


def carried(first: np.ndarray, events: np.ndarray) -> np.ndarray:
    """The highest of ``first [B, keys]`` and of all ``events [S, B, keys]`` before each position, and after
    the last, ``[S + 1, B, keys]``."""
    return np.maximum.accumulate(np.concatenate([first[None], events]), axis=0)


def values_at(known: np.ndarray, value_of: np.ndarray, value: np.ndarray, start: int) -> np.ndarray:
    """Each key's value before each position, and after the last, ``[S + 1, B, keys]``; of ``known``, when it
    was set, likewise, ``value_of [B, keys]``, what it was before the segment that begins at ``start``, and
    ``value [S, B]``, what is set in it."""
    row = np.clip(known - start, 0, None)  # of the segment
    stream = np.arange(value.shape[1])[:, None]
    return np.where(known >= start, value[row, stream], value_of)


def drawn_asks(rng: np.random.Generator, ages: np.ndarray, limit: int) -> np.ndarray:
    """A key for each position, ``[S, B]``, by the ``ages [S, B, keys]`` of the keys' values: first a band
    uniformly among those that hold a key no older than ``limit``, then one of its keys uniformly."""
    # A number's exponent is its octave: 0 for [½, 1), 1 for [1, 2), …
    bands = np.where(ages <= limit, np.frexp(ages / NEAREST_BAND)[1].clip(0), NOTHING)  # [S, B, keys]
    weights = np.zeros(ages.shape)
    for band in range(bands.max() + 1):
        inside = bands == band
        weights += inside / np.maximum(inside.sum(axis=2, keepdims=True), 1)
    total = weights.cumsum(axis=2)  # up to the number of bands that hold a key
    drawn = rng.random(ages.shape[:2]) * total[..., -1]
    return (total > drawn[..., None]).argmax(axis=2)
