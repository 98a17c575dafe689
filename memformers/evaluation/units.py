"""Losses in units in which models with different tokens can be compared: bits per character or byte, and
perplexity per word."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memformers.data.dataset import Counts
from memformers.data.streams import Tokens, read_tokens
from memformers.data.tokenizer import Tokenizer

DECODED_TOKENS = 1 << 16
"""Tokens that are decoded at once."""
MIN_WORDS = 0.75
"""The share of words that must consist of letters for a perplexity per word: it is 0.99 in Shakespeare, and
0.68 in Python's standard library."""
NO_PUNCTUATION = str.maketrans("", "", ".,;:!?\"'`()-–—*_‘’“”«»…")
LOSES_TEXT = (
    "the tokenizer loses a part of the text, such as unknown words, white space or the case of letters. Bits "
    "per byte and per character are of the bytes and characters of the text itself"
)
"""What is said of a tokenizer whose tokens don't stand for the text."""


@dataclass(frozen=True)
class Units:
    """What the predicted tokens are: all of a text, or of each document, but the first."""

    tokens: int
    bytes: int
    """In UTF-8, of the text itself; 0 for ids that stand for none, and where this is not known."""
    characters: int
    """Each counts where its first byte is predicted; of ids, each token."""
    words: int
    """Separated by white space; each counts where it begins. 0 for a text that is not mostly words, such as
    source code."""


def predicted_units(
    tokenizer: Tokenizer, tokens: Tokens, documents: Sequence[int] = (), split: Counts | None = None
) -> Units:
    """What is predicted of ``tokens [n]``, in ``documents`` of these lengths: all or the first tokens of a
    ``split``. If they lose a part of its text, the whole text counts, and nothing is known of a part of it;
    otherwise, or if no split is given, it is the text for which the tokens stand."""
    decoded = decoded_units(tokenizer, tokens, documents)
    if split is None or not split.is_lossy:
        return decoded
    if split.tokens != len(tokens):
        return Units(decoded.tokens, 0, 0, 0)
    return Units(
        decoded.tokens,
        bytes=split.bytes - split.first_bytes,
        characters=split.characters - split.first_characters,
        words=split.words - split.first_words if decoded.words else 0,
    )


def decoded_units(
    tokenizer: Tokenizer, tokens: Tokens, documents: Sequence[int], piece_len: int = DECODED_TOKENS
) -> Units:
    """[`predicted_units`][] of the text for which the tokens stand; ``piece_len`` are decoded at a time."""
    lengths = documents or (len(tokens),)
    predicted = sum(max(length - 1, 0) for length in lengths)
    if tokenizer.name == "ids":
        return Units(predicted, 0, predicted, 0)
    counts = np.zeros(4, dtype=np.int64)
    begin = 0
    for length in lengths:
        end = begin + length
        for first in range(begin + 1, end, piece_len):
            # The token before shows where a word continues, and whether a space follows it.
            read = read_tokens(tokens, torch.arange(first - 1, min(first + piece_len, end)))
            counts += count_units(tokenizer.bytes_of(read))
            counts[:3] -= count_units(tokenizer.bytes_of(read[:1]))[:3]
        begin = end
    n_bytes, characters, words, of_letters = counts.tolist()
    return Units(predicted, n_bytes, characters, words if of_letters >= MIN_WORDS * words else 0)


def count_units(raw: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The bytes, characters and words in a slice of a text, and its words of letters, int64 ``[4]``."""
    continues = np.frombuffer(raw, np.uint8) & 0xC0 == 0x80
    words = raw.decode("utf-8", errors="surrogateescape").split()
    of_letters = sum(word.translate(NO_PUNCTUATION).isalpha() for word in words)
    return np.array([len(raw), len(raw) - continues.sum(), len(words), of_letters])


def losses_by_unit(nats: float, predicted: Units, tokenizer: Tokenizer) -> dict[str, float]:
    """The loss of all predicted tokens together, in bits per character and per byte; where tokens are words,
    also as ``perplexity`` over all of them, ends of lines included (Dai et al. 2019, section 4.1); where they
    are subwords, as ``word_perplexity`` of the text's words (Rae et al. 2020, section 4.1). NaN for what
    doesn't apply or is not known."""
    bits = nats / math.log(2)
    are_words = tokenizer.name in ("word", "wordlevel")
    are_subwords = not are_words and tokenizer.name not in ("character", "byte", "ids")
    return {
        "bits_per_character": bits / predicted.characters if predicted.characters else math.nan,
        "bits_per_byte": bits / predicted.bytes if predicted.bytes else math.nan,
        "perplexity": perplexity(nats, predicted.tokens) if are_words else math.nan,
        "word_perplexity": perplexity(nats, predicted.words) if are_subwords else math.nan,
    }


def perplexity(nats: float, n: int) -> float:
    """Of ``n`` predictions with this loss in all; NaN of none, and infinite where it is too large."""
    if not n:
        return math.nan
    return math.exp(nats / n) if nats / n < 700 else math.inf
