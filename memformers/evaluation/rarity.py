"""How rare the words of a text are, by how often they occur in the text that a model was trained on.

A character says little by how rare it is itself. Its word tells the names and rare words, which a text often
says again, from the common words that every model knows.
"""

import re
from collections import Counter
from itertools import pairwise

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.text_files import bytes_of

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""Letters, with apostrophes between them."""
NO_WORD = -1
"""The number of occurrences where there is no word: white space, punctuation, digits."""
EDGES = (0, 1, 10, 100, 1000)
"""Of groups of words, by their occurrences: group i is from edge i to before edge i + 1."""


def word_occurrences(text: str, trained_on: str, n_tokens: int) -> Tensor:
    """For each of the ``n_tokens`` tokens of ``text``, each a character or a byte: how often its word occurs
    in ``trained_on``, upper and lower case alike, int64 ``[n]``; [`NO_WORD`][] outside of words.

    Raises UserError for as many tokens as the text has neither characters nor bytes.
    """
    counts = Counter(match[0].lower() for match in WORD.finditer(trained_on))
    found = torch.full((len(text),), NO_WORD)
    for match in WORD.finditer(text):
        found[match.start() : match.end()] = counts[match[0].lower()]
    if n_tokens == len(text):
        return found
    if n_tokens != len(bytes_of(text)):
        raise UserError(
            f"{n_tokens} tokens came for a text of {len(text)} characters and {len(bytes_of(text))} bytes; "
            f"give the text whose characters or bytes are these tokens."
        )
    return found.repeat_interleave(torch.tensor([len(bytes_of(character)) for character in text]))


def groups(occurrences: Tensor) -> Tensor:
    """The group of each of ``occurrences``, of any shape: 0 for a word that was never met in training, then
    by [`EDGES`][], and last the characters of no word."""
    group = torch.bucketize(occurrences, torch.tensor(EDGES), right=True) - 1
    return group.where(occurrences != NO_WORD, len(EDGES))


def group_names() -> list[str]:
    """What the groups of [`groups`][] are called, in its order."""
    between = [f"{low:,} – {above - 1:,}" for low, above in pairwise(EDGES[1:])]
    return ["never", *between, f"{EDGES[-1]:,} or more", "no word"]
