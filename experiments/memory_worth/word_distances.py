"""How far back a token's word last occurred. A token belongs to the word that has
its last character; names of programs are words too. A word is d tokens back if it last began d tokens ago."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memformers.data.tokenizer import Tokenizer

NEVER, NO_WORD = 0, -1
"""Where a word had not occurred, and the tokens outside of words."""
NAME = re.compile(r"[^\W\d]\w*")  # a word, or a name of a program


def word_distances(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """How many tokens ago the word of each of ``tokens [T]`` last began before it began here, int64
    ``[T]``."""
    newest: dict[str, int] = {}
    found = torch.full_like(tokens, NO_WORD, dtype=torch.int64)
    for word, begin, end in words_in(tokens, tokenizer):
        found[begin:end] = begin - newest.get(word, begin)
        newest[word] = begin
    return found


def words_in(tokens: Tensor, tokenizer: Tokenizer) -> Iterator[tuple[str, int, int]]:
    pieces = list(map(tokenizer.decoder(), tokens.tolist()))
    ends = list(accumulate(map(len, pieces)))
    for match in NAME.finditer("".join(pieces)):
        yield match[0], bisect_left(ends, match.start() + 1), bisect_right(ends, match.end())


def word_groups(distances: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, of any shape, as [`word_distances`][] gives them, and the groups'
    names: i from edge i to before the next, then first occurrences, and last the tokens of no word."""
    names = [*(f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)), f"{edges[-1]:,} or more"]
    group = torch.bucketize(distances, torch.tensor(edges), right=True) - 1
    group = group.where(distances != NEVER, len(edges)).where(distances != NO_WORD, len(edges) + 1)
    return group, [*names, "first", "no word"]
