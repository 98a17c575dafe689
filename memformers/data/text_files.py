"""Converts bytes to text and back, in the same way for a corpus, a prompt and standard input."""

import codecs
import re
import sys
from pathlib import Path

from memformers.common.errors import UserError


def text_of(raw: bytes) -> str:
    """The text of UTF-8 ``raw``, line ends as they are, without a byte order mark. Bytes that are not UTF-8
    become lone surrogates, which [`bytes_of`][] converts back; a model of bytes reads them like all
    others."""
    return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")


def bytes_of(text: str) -> bytes:
    """The bytes from which [`text_of`][] made ``text``."""
    return text.encode("utf-8", errors="surrogateescape")


def read_text(path: str) -> str:
    """The text of a file, or of standard input for ``-``; UserError if it can't be read."""
    try:
        return text_of(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; name a text file.") from None


def check_utf8(text: str, source: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, since they are not characters."""
    if found := re.search("[\udc80-\udcff]", text):
        at = len(bytes_of(text[: found.start()]))
        raise UserError(
            f"{source} is not UTF-8 text: byte {ord(found[0]) - 0xDC00:#04x} at offset {at}; convert it to "
            f"UTF-8 first, or use tokenizer='byte'."
        )
