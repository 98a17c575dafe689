"""Groups of a text's tokens: by how rare their word is in the training text, and by how far back they repeat.

A character says little by how rare it is itself. Its word tells the names and rare words, which a text often
says again, from the common words that every model knows.

Where tokens are subwords, a token belongs to the word that has its last character; a word that occurs again
is d tokens back if it last began d tokens ago. Names of programs count as words.

A token *repeats from distance d* where it and the n − 1 tokens before it, its n-gram, last occurred d tokens
ago. So a model that remembers what was d tokens ago can copy the token from there.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memformers.data.tokenizer import Tokenizer
from memformers.data.utf8 import bytes_of

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""Letters, with apostrophes between them."""
NAME = re.compile(r"[^\W\d]\w*")
"""A word, or a name of a program, which may have digits and underscores."""
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


def rarity_groups(occurrences: Tensor) -> tuple[Tensor, list[str]]:
    """The group of each of ``occurrences``, of any shape, and the groups' names: first words that never occur
    in training, then by [`EDGES`][], and last the characters of no word."""
    group, names = groups_between(occurrences, EDGES)
    return group.where(occurrences != NO_WORD, len(EDGES)), ["never", *names[1:], "no word"]


def groups_between(numbers: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``numbers``, of any shape, and the groups' names: i from edge i to before the
    next."""
    between = [f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)]
    group = torch.bucketize(numbers, torch.tensor(edges), right=True) - 1
    return group, [*between, f"{edges[-1]:,} or more"]


def repeat_distances(tokens: Tensor, n: int) -> Tensor:
    """How many tokens ago the n-gram that ends with each of ``tokens [T]`` last occurred among them, int64
    ``[T]``; [`NEVER`][] where it did not, and for the first ``n`` − 1 tokens."""
    found, text = torch.full_like(tokens, NEVER, dtype=torch.int64), tokens.tolist()
    newest: dict[tuple[int, ...], int] = {}
    for end in range(n, len(text) + 1):
        n_gram = tuple(text[end - n : end])
        if n_gram in newest:
            found[end - 1] = end - newest[n_gram]
        newest[n_gram] = end
    return found


def word_distances(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """How many tokens ago the word of each of ``tokens [T]`` last began before it began here, int64 ``[T]``;
    [`NEVER`][] where it had not occurred, and [`NO_WORD`][] outside of words."""
    newest: dict[str, int] = {}
    found = torch.full_like(tokens, NO_WORD, dtype=torch.int64)
    for word, begin, end in words_in(tokens, tokenizer):
        found[begin:end] = begin - newest.get(word, begin)
        newest[word] = begin
    return found


def word_lengths(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """How many tokens the word of each of ``tokens [T]`` has, int64 ``[T]``; 0 outside of words."""
    found = torch.zeros_like(tokens, dtype=torch.int64)
    for _, begin, end in words_in(tokens, tokenizer):
        found[begin:end] = end - begin
    return found


def words_in(tokens: Tensor, tokenizer: Tokenizer) -> Iterator[tuple[str, int, int]]:
    """The words of ``tokens [T]``, each with its first token and the one after its last."""
    pieces = list(map(tokenizer.decoder(), tokens.tolist()))
    ends = list(accumulate(map(len, pieces)))
    for match in NAME.finditer("".join(pieces)):
        yield match[0], bisect_left(ends, match.start() + 1), bisect_right(ends, match.end())


def word_groups(distances: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, of any shape, as [`word_distances`][] gives them, and the groups'
    names: i from edge i to before the next, then first occurrences, and last the tokens of no word."""
    group, names = groups_between(distances, edges)
    group = group.where(distances != NEVER, len(edges)).where(distances != NO_WORD, len(edges) + 1)
    return group, [*names, "first", "no word"]


def repeat_groups(distances: Tensor, edges: list[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, of any shape, and the groups' names: i for those from edge i to
    before edge i + 1, and last those beyond the last edge and [`NEVER`][]."""
    group, names = groups_between(distances, edges)
    return group.where(distances != NEVER, len(edges) - 1), [*names[:-1], f"{names[-1]}, or never"]


def repeat_edges(segment_len: int, reach: int) -> list[int]:
    """Edges of groups of distances, in tokens: 1, then powers of two from the largest within a segment up to
    the first that is at least twice the ``reach`` of the memory, or twice the segment if that is longer."""
    edges = [1, max(1 << (segment_len.bit_length() - 1), 2)]
    while edges[-1] < 2 * max(reach, segment_len):
        edges.append(2 * edges[-1])
    return edges
