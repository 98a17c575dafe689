"""The built-in corpus: a play made by code, for where no other text can be had.

Its characters sing refrains and swear oaths of invented words, drawn afresh each time. A refrain is sung
twice in one breath, 16, 32 or 64 characters apart; an oath is said again, word for word, up to 4,096
characters later. So a model needs a memory to predict some of its text.
"""

import heapq
import random
from collections.abc import Sequence
from typing import TypeVar

from memformers.common.errors import UserError

T = TypeVar("T")

NEAREST_OATH, FARTHEST_OATH = 64, 4096
"""Distances between the starts of an oath's two sayings, in characters."""
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


def write_play(length: int, seed: int = 0) -> str:
    """``length`` characters of the play of ``seed``.

    The same arguments give the same text on every machine and Python. Raises ValueError for a
    length below 1.
    """
    if length < 1:
        raise UserError(f"a play of {length} characters was asked for; use at least 1.")
    rng = random.Random(seed)
    parts: list[str] = []
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
                _, _, oath = heapq.heappop(due)
                say(f"{pick(rng, REMINDERS)}: {oath}.\n")
            elif kind < 0.7:
                refrain = invent_phrase(rng, pick(rng, REFRAIN_DISTANCES) - len(", "))
                say(f"Now sing: {refrain}, {refrain}!\n")
            elif kind < 0.95:
                oath = invent_phrase(rng, OATH_LENGTH)
                say(f"{pick(rng, OATHS)}: ")
                first = say(oath)
                say("!\n")
                # It waits for the end of a line and for its reminder; so it is asked for earlier.
                distance = NEAREST_OATH * (FARTHEST_OATH / NEAREST_OATH) ** rng.random()
                heapq.heappush(due, (first + round(distance) - 20, first, oath))
            else:
                statement = " ".join(pick(rng, part) for part in (SUBJECTS, VERBS, OBJECTS))
                say(f"{statement[0].upper()}{statement[1:]}.\n")
        say("\n")
    return "".join(parts)[:length]


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
