"""Losses by how many tokens ago the word of a token last began. A word may be a name of a program."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memformers.data.tokenizer import Tokenizer
from memformers.report.arms import ArmRuns

EDGES = (1, 64, 128, 256, 512, 1024, 2048)
"""Tokens at which groups of distances begin."""
NEVER = 0
"""The distance of a word that had not occurred."""
NO_WORD = -1
"""The distance of a token that is outside of words."""
NAME = re.compile(r"[^\W\d]\w*")


def losses_by_distance(losses: Mapping[str, Tensor], distances: Tensor) -> dict[str, dict[str, float]]:
    """The mean of each of ``losses [n]`` by group of ``distances [n]``, of the groups that occur."""
    groups, names = group_distances(distances, EDGES)
    means = {}
    for number, name in enumerate(names):
        members = groups == number
        if members.any():
            means[name] = mean_losses({reading: loss[members] for reading, loss in losses.items()})
    return means


def mean_losses(losses: Mapping[str, Tensor]) -> dict[str, float]:
    """The number of tokens, and the mean of each of ``losses [n]``."""
    means: dict[str, float] = {}
    for name, loss in losses.items():
        means["tokens"] = len(loss)
        means[name] = loss.mean().item()
    return means


def list_groups(arms: Sequence[ArmRuns], name: str) -> list[str]:
    """The groups that the results of any of ``arms`` have under ``name``."""
    groups: dict[str, None] = {}  # in order
    for arm in arms:
        for result in arm.results.values():
            groups |= dict.fromkeys(result.get(name, ()))
    return [*groups]


def word_distances(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """How many tokens ago the word of each of ``tokens [T]`` last began before it began here, ``[T]``."""
    newest: dict[str, int] = {}
    distances = torch.full_like(tokens, NO_WORD, dtype=torch.int64)
    for word, begin, end in find_words(tokens, tokenizer):
        distances[begin:end] = begin - newest.get(word, begin)  # NEVER at first
        newest[word] = begin
    return distances


def find_words(tokens: Tensor, tokenizer: Tokenizer) -> Iterator[tuple[str, int, int]]:
    """Each word of ``tokens [T]``, its first token, and the one after its last. A token belongs to the word
    of its last character."""
    pieces = list(map(tokenizer.decoder(), tokens.tolist()))
    # The number of characters up to the end of each token.
    ends = list(accumulate(map(len, pieces)))
    for match in NAME.finditer("".join(pieces)):
        first = bisect_left(ends, match.start() + 1)
        after_last = bisect_right(ends, match.end())
        yield match[0], first, after_last


def group_distances(distances: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, and the names of groups: between edges, first occurrences, and
    tokens of no word."""
    names = [f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)]
    names += [f"{edges[-1]:,} or more", "first", "no word"]
    groups = torch.bucketize(distances, torch.tensor(edges), right=True) - 1
    groups = groups.where(distances != NEVER, names.index("first"))
    groups = groups.where(distances != NO_WORD, names.index("no word"))
    return groups, names
