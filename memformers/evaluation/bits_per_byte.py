"""Losses in units that can be compared between models with different tokens: bits per byte and per character,
and perplexity as papers report it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memformers.data.streams import Tokens, read_tokens
from memformers.data.tokenizer import Tokenizer

BLOCK = 1 << 16
"""Tokens that are decoded at once."""
WORDS = ("word", "wordlevel")
"""The names of tokenizers whose tokens are words."""


@dataclass(frozen=True)
class Units:
    """What the predicted tokens are: all of a text, or of each document, but the first."""

    tokens: int
    bytes: int
    """In UTF-8, of the text that the tokens stand for; 0 for ids that stand for none."""
    characters: int
    """Each counts where its first byte is predicted; of ids, each token."""
    words: int
    """Separated by white space; each counts where it begins."""


def units(tokenizer: Tokenizer, tokens: Tokens, documents: Sequence[int] = ()) -> Units:
    """What is predicted of ``tokens [n]``, or of ``documents``, given by their numbers of tokens."""
    lengths = documents or (len(tokens),)
    predicted = sum(max(length - 1, 0) for length in lengths)
    if tokenizer.name == "ids":
        return Units(predicted, 0, predicted, 0)
    counts, end = np.zeros(3, dtype=np.int64), 0
    for length in lengths:
        begin, end = end, end + length
        for at in range(begin + 1, end, BLOCK):
            # The token before tells where a word goes on, and whether a space follows it.
            read = read_tokens(tokens, torch.arange(at - 1, min(at + BLOCK, end)))
            counts += counted_in(tokenizer.bytes_of(read)) - counted_in(tokenizer.bytes_of(read[:1]))
    return Units(predicted, *counts.tolist())


def counted_in(raw: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The bytes, characters and words in a slice of a text, int64 ``[3]``."""
    continues = np.frombuffer(raw, np.uint8) & 0xC0 == 0x80
    words = len(raw.decode("utf-8", errors="surrogateescape").split())
    return np.array([len(raw), len(raw) - continues.sum(), words])


def comparable(nats: float, of: Units, tokenizer: Tokenizer) -> dict[str, float]:
    """The loss of all predicted tokens together, in bits per character and per byte; where tokens are words,
    also as ``perplexity`` over all of them, ends of lines included (Dai et al. 2019, section 4.1); where they
    are subwords, as ``word_perplexity`` of the text's words (Rae et al. 2020, section 4.1). NaN for what
    doesn't apply."""
    bits, are_words = nats / math.log(2), tokenizer.name in WORDS
    are_subwords = not are_words and tokenizer.name not in ("character", "byte", "ids")
    return {
        "bits_per_character": bits / of.characters if of.characters else math.nan,
        "bits_per_byte": bits / of.bytes if of.bytes else math.nan,
        "perplexity": perplexity(nats, of.tokens * are_words),
        "word_perplexity": perplexity(nats, of.words * are_subwords),
    }


def perplexity(nats: float, n: int) -> float:
    """Of ``n`` predictions with this loss in all; NaN of none, and infinite where it is too large."""
    if not n:
        return math.nan
    return math.exp(nats / n) if nats / n < 700 else math.inf
