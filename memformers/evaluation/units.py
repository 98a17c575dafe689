"""Losses of tokens as bits per character and per byte, which can be compared between models with different
tokens.

The first token of a text is not predicted. A character counts if all of its bytes were predicted, with the
loss of just these bytes. So the first character doesn't count, nor does an incomplete character at the
beginning or the end of a slice of bytes. A byte that is not UTF-8 counts as a character.
"""

import codecs
import math
import re
from collections.abc import Sequence

from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.texts import bytes_of

REST_OF_ONE = "[\udc80-\udcbf]{1,3}"
"""Bytes that can only go on with a character, as [`memformers.data.texts.text_of`][] reads them where the
character's beginning is missing."""


def bits(losses: Sequence[Tensor], texts: Sequence[str]) -> tuple[float, float]:
    """Bits per character and per byte over all ``texts``; ``losses [n - 1]`` are those of each text's tokens
    after the first, in nats, each a character or a byte. NaN where nothing was predicted.

    Raises UserError for as many losses as neither a text's characters nor its bytes have.
    """
    in_characters = in_all = 0.0
    characters = n_bytes = 0
    for of_text, text in zip(losses, texts, strict=True):
        is_by_character, (first, end) = by_character(text, len(of_text) + 1), whole_characters(text)
        begin, stop = (at if is_by_character else len(bytes_of(text[:at])) for at in (first, end))
        in_characters += bits_in(of_text[begin - 1 : stop - 1])
        characters += end - first
        in_all += bits_in(of_text)
        n_bytes += len(bytes_of(text)) - (len(bytes_of(text[:1])) if is_by_character else 1)
    return (
        in_characters / characters if characters else math.nan,
        in_all / n_bytes if n_bytes else math.nan,
    )


def bits_in(losses: Tensor) -> float:
    """The sum of ``losses [n]``, in nats, in bits."""
    return losses.double().mean().item() / math.log(2) * len(losses) if len(losses) else 0.0


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
