"""Losses of tokens in what can be compared between models with different tokens: bits per character and per
byte, and perplexity per word.

The first token of a text is not predicted. Of bytes, a character counts if all of its bytes were predicted,
with the loss of just these. So the first character doesn't count, nor does an incomplete character at the
beginning or the end of a slice of bytes. A byte that is not UTF-8 counts as a character. Of words and
subwords, all characters but those of the first token count.
"""

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memformers.common.errors import UserError
from memformers.data.dataset import Counts, Split
from memformers.data.streams import taken
from memformers.data.tokenizer import Tokenizer
from memformers.data.utf8 import bytes_of

REST_OF_ONE = "[\udc80-\udcbf]{1,3}"
"""Bytes that can only go on with a character, as [`memformers.data.utf8.text_of`][] reads them where the
character's beginning is missing."""


@dataclass(frozen=True)
class Units:
    """What the predicted tokens of a text, or of documents, are."""

    characters: int
    """Those that are predicted whole."""
    bytes: int
    words: int
    """Of the whole text, since papers divide by all of them."""
    edges: tuple[tuple[int, int], ...]
    """Of each text: how many predicted tokens at its beginning and at its end are of characters that aren't
    predicted whole."""


def units(tokenizer: Tokenizer, split: Split) -> Units:
    """What is predicted of a text, or of documents. Only the tokens at the edges are read."""
    tokens, counts = split.tokens, split.counts
    characters, n_bytes, begin, edges = 0, 0, 0, []
    for length in split.documents.tolist() or [len(tokens)]:
        end, known = begin + length, min(length, 4)  # the longest character has four bytes
        if tokenizer.name == "byte":
            text = slice_of(tokenizer.bytes_of(taken(tokens, torch.arange(begin, begin + known))))
            tail = slice_of(tokenizer.bytes_of(taken(tokens, torch.arange(end - known, end))))
            start, left = whole_characters(text)[0], len(tail) - whole_characters(tail)[1]
            edges.append((len(bytes_of(text[:start])) - 1, left))
            characters, n_bytes = characters + start + left, n_bytes + 1
        else:
            given = tokenizer.bytes_of(taken(tokens, torch.arange(begin, min(begin + 1, end))))
            edges.append((0, 0))
            characters += 1 if tokenizer.name == "ids" else len(slice_of(given))
            n_bytes += len(given)
        begin = end
    return Units(counts.characters - characters, counts.bytes - n_bytes, counts.words, tuple(edges))


def encoded(tokenizer: Tokenizer, texts: Sequence[str], *, are_documents: bool = True) -> Split:
    """The tokens of ``texts``, one behind the other."""
    parts = [tokenizer.numbers(tokenizer.ended(text)) for text in texts]
    tokens, lengths = np.concatenate(parts), np.array(list(map(len, parts)))
    n_bytes, words = sum(len(bytes_of(text)) for text in texts), sum(len(text.split()) for text in texts)
    characters = len(tokens) if tokenizer.name == "ids" else sum(map(len, texts))
    counts = Counts(n_bytes, characters, words, len(tokens), len(texts) * are_documents)
    return Split(tokens, counts, lengths if are_documents else lengths[:0])


def word_perplexity(nats: float, words: int) -> float:
    """The perplexity per word of a text that has this loss in all; infinite where it is too large."""
    return math.exp(nats / max(words, 1)) if nats / max(words, 1) < 700 else math.inf


def slice_of(raw: bytes) -> str:
    """A slice of a text, in which bytes that are not UTF-8 become lone surrogates."""
    return raw.decode("utf-8", errors="surrogateescape")


def whole_characters(text: str) -> tuple[int, int]:
    """The first character of ``text`` that can be predicted whole, and the one after the last."""
    rest = re.match(REST_OF_ONE, text)
    start = rest.end() if rest else 1
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    decoder.decode(bytes_of(text[-4:]))  # the longest character has four bytes
    unfinished, _ = decoder.getstate()  # bytes, each of which is a character in text
    return start, max(len(text) - len(unfinished), start)


def by_character(text: str, n_tokens: int) -> bool:
    """Whether the ``n_tokens`` tokens of ``text`` are its characters and not its bytes; UserError for as many
    as it has of neither."""
    n_bytes = len(bytes_of(text))
    if n_tokens not in (len(text), n_bytes):
        raise UserError(
            f"a text of {len(text)} characters and {n_bytes} bytes can't have {n_tokens} tokens; give the "
            f"text whose characters or bytes they are."
        )
    return n_tokens == len(text)
