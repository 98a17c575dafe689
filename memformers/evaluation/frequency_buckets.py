"""Groups of a text's tokens: by how rare their word is in the training text, and by how far back they repeat.

A character says little by how rare it is itself. Its word tells the names and rare words, which a text often
says again, from the common words that every model knows.

A token *repeats from distance d* where it and the n − 1 tokens before it, its n-gram, last occurred d tokens
ago. So a model that remembers what was d tokens ago can copy the token from there.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from memformers.data.files import bytes_of

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""Letters, with apostrophes between them."""
NO_WORD = -1
"""The number of occurrences where there is no word: white space, punctuation, digits."""
EDGES = (0, 1, 10, 100, 1000)
"""Of groups of words, by their occurrences: group i is from edge i to before edge i + 1."""
NEVER = 0
"""The distance of a token that repeats nothing."""


def word_counts(text: str) -> Counter[str]:
    """How often each word occurs in ``text``, in lower case."""
    return Counter(match[0].lower() for match in WORD.finditer(text))


def word_occurrences(text: str, counts: Counter[str], *, of_bytes: bool) -> Tensor:
    """For each character of ``text``, or each byte: how often its word was counted in the training text,
    int64 ``[n]``; [`NO_WORD`][] outside of words."""
    found = torch.full((len(text),), NO_WORD)
    for match in WORD.finditer(text):
        found[match.start() : match.end()] = counts[match[0].lower()]
    if not of_bytes:
        return found
    return found.repeat_interleave(torch.tensor([len(bytes_of(character)) for character in text]))


def groups_between(numbers: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``numbers``, of any shape, and the groups' names: i from edge i to before the
    next."""
    between = [f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)]
    group = torch.bucketize(numbers, torch.tensor(edges), right=True) - 1
    return group, [*between, f"{edges[-1]:,} or more"]


def rarity_groups(occurrences: Tensor) -> tuple[Tensor, list[str]]:
    """The group of each of ``occurrences``, of any shape, and the groups' names: first words that never occur
    in training, then by [`EDGES`][], and last the characters of no word."""
    group, names = groups_between(occurrences, EDGES)
    return group.where(occurrences != NO_WORD, len(EDGES)), ["never", *names[1:], "no word"]


def repeat_distances(tokens: Tensor, n: int) -> Tensor:
    """How many tokens ago the n-gram that ends with each of ``tokens [T]`` last occurred among them, int64
    ``[T]``; [`NEVER`][] where it did not, and for the first ``n`` − 1 tokens."""
    found, text = [NEVER] * len(tokens), tokens.tolist()
    newest: dict[tuple[int, ...], int] = {}
    for end in range(n, len(text) + 1):
        n_gram = tuple(text[end - n : end])
        found[end - 1] = end - newest.get(n_gram, end)
        newest[n_gram] = end
    return torch.tensor(found)


def repeat_groups(distances: Tensor, segment_len: int, reach: int) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, of any shape, and the groups' names. Groups begin at 1 and at the
    powers of two from the largest within a segment to the first that is at least twice the ``reach`` of the
    memory, or twice the segment if that is longer; the last one has what is beyond, and [`NEVER`][]."""
    edges = [1, max(1 << (segment_len.bit_length() - 1), 2)]
    while edges[-1] < 2 * max(reach, segment_len):
        edges.append(2 * edges[-1])
    group, names = groups_between(distances, edges)
    return group.where(distances != NEVER, len(edges) - 1), [*names[:-1], f"{names[-1]}, or never"]
