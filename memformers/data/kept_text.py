"""How large a text is, and whether its tokens stand for it byte for byte. Some tokenizers lose a part of it:
unknown words, white space, or the case of letters."""

from collections.abc import Sequence

import numpy as np

from memformers.data.dataset import Counts
from memformers.data.files import Ids, bytes_of
from memformers.data.tokenizer import Tokenizer

DECODED_BEFORE = 8
"""Tokens before a piece that are decoded with it; up to three more where these begin within a character."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
"""What a decoder writes for bytes that are no character: for all of a run of byte tokens, if it begins within
one."""


class TextCounter:
    """Counts a text of documents in ``counts``, piece by piece, and whether its tokens lose a part of it."""

    def __init__(self, tokenizer: Tokenizer, counts: Counts):
        self.tokenizer = tokenizer
        self.counts = counts
        self._newest: Ids = np.zeros(0, np.int64)
        """The newest tokens of the document; none at its start."""

    def add(self, text: str, tokens: Ids, *, is_end: bool) -> None:
        """Count a piece of a document, its last one if ``is_end``, with its ``tokens [n]``."""
        self.counts.bytes += len(bytes_of(text))
        self.counts.characters += len(text)
        self.counts.words += len(text.split())

        # Only a tokenizer that may lose a part of the text has its tokens decoded.
        if self.tokenizer.is_lossless:
            return
        first = ""
        if not len(self._newest):
            first = self.tokenizer.first_text(text) if len(tokens) else text
            self.counts.first_bytes += len(bytes_of(first))
            self.counts.first_characters += len(first)
            self.counts.first_words += len(first.split())
        if not self.counts.is_lossy:
            ended = self.tokenizer.terminate(text) if is_end else text
            self.counts.is_lossy = not self._is_kept(ended, first, tokens)
        self._newest = tokens[:0] if is_end else self._last_tokens(tokens)

    def _last_tokens(self, tokens: Ids) -> Ids:
        """The newest tokens of the document after ``tokens [n]``, from the start of a character on."""
        tokens = np.concatenate((self._newest, tokens))
        for n in range(DECODED_BEFORE, DECODED_BEFORE + 4):  # a character has at most 4 bytes
            if REPLACEMENT not in self.tokenizer.bytes_of(tokens[-n:]):
                return tokens[-n:]
        return tokens[-DECODED_BEFORE:]  # the character is in the text

    def _is_kept(self, text: str, first: str, tokens: Ids) -> bool:
        decoded_before = self.tokenizer.bytes_of(self._newest)
        decoded = self.tokenizer.bytes_of(np.concatenate((self._newest, tokens)))
        if decoded == decoded_before + bytes_of(text):
            return True
        # The first token of a document is not predicted. Many tokenizers put a space before it.
        decoded_first = self.tokenizer.bytes_of(tokens[:1])
        return bool(first) and decoded == decoded_first + bytes_of(text[len(first) :])


def count_texts(tokenizer: Tokenizer, texts: Sequence[str], tokens: Sequence[Ids]) -> Counts:
    """The size of documents with these ``tokens``, ``[n]`` each."""
    counts = Counts(tokens=sum(map(len, tokens)))
    counter = TextCounter(tokenizer, counts)
    for text, text_tokens in zip(texts, tokens, strict=True):
        counter.add(text, text_tokens, is_end=True)
    return counts
