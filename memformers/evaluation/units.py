"""Losses of tokens as bits per character and per byte, which can be compared between models with different
tokens.

The first token of a text is not predicted. A character counts if all of its bytes were predicted, with the
loss of just these bytes. So the first character doesn't count, nor does an incomplete character at the
beginning or the end of a slice of bytes.
"""

import codecs
import math
import re

from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.text_files import bytes_of

REST_OF_ONE = "[\udc80-\udcbf]{1,3}"
"""Bytes that can only go on with a character, as [`memformers.data.text_files.text_of`][] reads them where
the character's beginning is missing."""


def bits_per_character(losses: Tensor, text: str) -> float:
    """From the ``losses [n - 1]`` in nats of the tokens of ``text`` after the first, each a character or a
    byte; NaN where no character was predicted. A byte that is not UTF-8 counts as a character.

    Raises UserError for as many losses as neither its characters nor its bytes have.
    """
    start, stop = whole_characters(text)
    counted = losses[tokens(losses, text, start) - 1 : tokens(losses, text, stop) - 1]
    return bits(counted, stop - start)


def bits_per_byte(losses: Tensor, text: str) -> float:
    """As [`bits_per_character`][], of the same ``losses [n - 1]``, for the bytes after the first token's, of
    which each counts."""
    is_by_character = tokens(losses, text, len(text)) == len(text)
    given = len(bytes_of(text[:1])) if is_by_character else 1
    return bits(losses, len(bytes_of(text)) - given)


def whole_characters(text: str) -> tuple[int, int]:
    """The first character of ``text`` that can be predicted whole, and the one after the last."""
    rest = re.match(REST_OF_ONE, text)
    start = rest.end() if rest else 1
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    decoder.decode(bytes_of(text[-4:]))  # the longest character has four bytes
    unfinished, _ = decoder.getstate()  # bytes, each of which is a character in text
    return start, max(len(text) - len(unfinished), start)


def tokens(losses: Tensor, text: str, end: int) -> int:
    """How many tokens the first ``end`` characters of ``text`` are, which has these ``losses [n - 1]``."""
    n_tokens, raw = len(losses) + 1, bytes_of(text)
    if n_tokens == len(text):
        return end
    if n_tokens != len(raw):
        raise UserError(
            f"losses of {len(losses)} tokens came for a text of {len(text)} characters and {len(raw)} bytes; "
            f"give the text that was evaluated, whose characters or bytes are the tokens."
        )
    return len(bytes_of(text[:end]))


def bits(losses: Tensor, units: int) -> float:
    """The sum of ``losses [n]``, in nats, as bits per unit."""
    return losses.double().mean().item() / math.log(2) * len(losses) / units if units else math.nan
