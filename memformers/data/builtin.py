"""The built-in corpus: a play made by code, in which what a memory reaches can be measured.

Its characters sing refrains and swear oaths of invented words, drawn afresh each time. A refrain is
sung twice in one breath, 16, 32 or 64 characters apart; an oath is said again, word for word, 64 to
4,096 characters later. Nothing but the first saying foretells the second, so the accuracy on second
sayings, against their distance, shows how far a model remembers; the accuracy on first sayings is
what chance gives.

The refrains are there so that a small model learns to copy at all within a few minutes: at a fixed
distance it soon finds where to look. With distances all drawn at random, models of two and four
layers were still at chance after two million characters.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from memformers.common.errors import UserError

T = TypeVar("T")

NEAREST, FARTHEST = 16, 4096
"""Distances between the starts of two sayings, in characters."""
REFRAIN_DISTANCES = (16, 16, 32, 32, 64)
OATH_LENGTH = 30
"""Characters of an oath."""

SPEAKERS = ("ROSALIND", "ORSINO", "PORTIA", "BANQUO", "HERMIA", "LEONTES", "IMOGEN", "DUNCAN")
SUBJECTS = ("the king", "my brother", "an honest man", "the moon", "this island", "the old queen")
VERBS = ("forgets", "remembers", "forgives", "will not see", "has lost", "must answer for")
OBJECTS = ("the winter", "his own name", "a broken crown", "the sea", "the quarrel", "her promise")
OATHS = ("I swear", "I vow", "Hear me")
REMINDERS = ("Again", "Once more", "You said", "I still hear")
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiouy"


@dataclass(frozen=True)
class Repeat:
    """A phrase said at ``first`` and, word for word, again at ``second``: offsets in characters."""

    first: int
    second: int
    length: int

    @property
    def distance(self) -> int:
        """From the start of one saying to the start of the other, in characters."""
        return self.second - self.first


def write_play(length: int, seed: int = 0) -> tuple[str, tuple[Repeat, ...]]:
    """``length`` characters of the play of ``seed``, and its repeats in order of their second saying.

    The same arguments give the same text on every machine and Python. Raises ValueError for a
    length below 1.
    """
    if length < 1:
        raise UserError(f"a play of {length} characters was asked for; use at least 1.")
    rng = random.Random(seed)
    parts: list[str] = []
    repeats: list[Repeat] = []
    due: list[tuple[int, int, str]] = []  # when to say again, where it was first said, the oath
    end = 0

    def say(text: str) -> int:
        """Append ``text``; returns where it starts."""
        nonlocal end
        parts.append(text)
        end += len(text)
        return end - len(text)

    while end < length:
        say(f"{pick(rng, SPEAKERS)}:\n")
        for _ in range(1 + int(rng.random() * 3)):
            kind = rng.random()
            if due and due[0][0] <= end:
                _, first, oath = heapq.heappop(due)
                say(f"{pick(rng, REMINDERS)}: ")
                repeats.append(Repeat(first, say(oath), len(oath)))
                say(".\n")
            elif kind < 0.7:
                refrain = invent_phrase(rng, pick(rng, REFRAIN_DISTANCES) - len(", "))
                say("Now sing: ")
                first = say(refrain)
                say(", ")
                repeats.append(Repeat(first, say(refrain), len(refrain)))
                say("!\n")
            elif kind < 0.95:
                oath = invent_phrase(rng, OATH_LENGTH)
                say(f"{pick(rng, OATHS)}: ")
                first = say(oath)
                say("!\n")
                # It waits for the end of a line and for its reminder; so it is asked for earlier.
                distance = 64 * (FARTHEST / 64) ** rng.random()
                heapq.heappush(due, (first + round(distance) - 20, first, oath))
            else:
                statement = " ".join(pick(rng, part) for part in (SUBJECTS, VERBS, OBJECTS))
                say(f"{statement[0].upper()}{statement[1:]}.\n")
        say("\n")
    # The few that waited until they were too far, or past the end, don't count.
    counted = (r for r in repeats if r.distance <= FARTHEST and r.second + r.length <= length)
    return "".join(parts)[:length], tuple(counted)


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One of ``items``; by ``random()`` alone, which every Python draws alike."""
    return items[int(rng.random() * len(items))]


def invent_phrase(rng: random.Random, length: int) -> str:
    """Pronounceable words that hardly anyone has said before, ``length`` characters in all."""
    words = []
    while length > 7:
        # So that at least two letters are left for the last word.
        letters = min(4 + int(rng.random() * 4), length - 3)
        words.append(invent_word(rng, letters))
        length -= letters + 1
    words.append(invent_word(rng, length))
    return " ".join(words)


def invent_word(rng: random.Random, letters: int) -> str:
    """Consonants and vowels in turn."""
    start = int(rng.random() * 2)
    return "".join(pick(rng, (CONSONANTS, VOWELS)[(start + i) % 2]) for i in range(letters))
