"""How far back a model remembers: accuracy on a phrase's second saying, against its distance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memformers.data.builtin import FARTHEST, NEAREST, Repeat
from memformers.evaluation.evaluate import Evaluation

BINS = tuple(NEAREST * 2**k for k in range(int(math.log2(FARTHEST / NEAREST)) + 1))
"""Edges of the distance bins, in characters: an octave each."""
FORETELLING = 4
"""Characters at a phrase's start that don't count: only they tell which phrase comes again."""


@dataclass(frozen=True)
class Recall:
    """Accuracy on repeats, by their distance."""

    nearest: tuple[int, ...]
    """Lower edge of each bin, in characters; its upper edge is twice that."""
    accuracy: tuple[float | None, ...]
    """Fraction of characters right on second sayings; None for a bin with no repeat."""
    characters: tuple[int, ...]
    """How many characters each bin's accuracy is over."""
    chance: float | None
    """The same on first sayings, which no memory can help with."""


def measure_recall(evaluation: Evaluation, repeats: Sequence[Repeat]) -> Recall:
    """Recall on ``repeats``, offsets in the evaluated text, which had a token a character.

    Repeats whose two sayings fell into different streams of the evaluation don't count.
    """
    right: dict[int, list[bool]] = {edge: [] for edge in BINS[:-1]}
    first_right: list[bool] = []
    for repeat in repeats:
        if _stream(evaluation, repeat.first) != _stream(evaluation, repeat.second + repeat.length - 1):
            continue
        edge = max(edge for edge in right if edge <= repeat.distance)
        right[edge] += _right(evaluation, repeat.second, repeat.length)
        first_right += _right(evaluation, repeat.first, repeat.length)
    return Recall(
        nearest=tuple(right),
        accuracy=tuple(_mean(hits) for hits in right.values()),
        characters=tuple(len(hits) for hits in right.values()),
        chance=_mean(first_right),
    )


def _right(evaluation: Evaluation, start: int, length: int) -> list[bool]:
    """Which of a saying's characters that count were right; ``correct[t − 1]`` is character t's."""
    return evaluation.correct[start + FORETELLING - 1 : start + length - 1].tolist()


def _stream(evaluation: Evaluation, character: int) -> int:
    return (character - 1) // evaluation.stream_length


def _mean(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
