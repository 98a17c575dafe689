"""Bytes and text: UTF-8, what else says what it is, and what is no text and must not be learned as one."""

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from memformers.common.errors import UserError

NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""What bytes that are not UTF-8 become in a text."""
WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The encodings that a byte order mark says."""
MAGIC = {
    b"\x1f\x8b": "gzip; end its name with .gz",
    b"BZh91AY&SY": "bzip2; end its name with .bz2",
    b"\xfd7zXZ\0": "xz; end its name with .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard; end its name with .zst",
    b"PK\x03\x04": "a ZIP archive; end its name with .zip, or unpack it",
    b"\x93NUMPY": "a NumPy array; end its name with .npy if it holds token ids",
    b"PAR1": "Parquet; end its name with .parquet",
    b"%PDF-": "PDF; extract its text",
    b"{\\rtf": "RTF; save it as plain text",
    b"\xd0\xcf\x11\xe0": "an Office document; save it as plain text",
    b"\x89PNG": "a PNG image; name a text",
    b"SQLite format 3\0": "an SQLite database; export its texts",
    **{bytes((0x80, protocol)): "a pickle; write what is in it as text" for protocol in (2, 3, 4, 5)},
}
"""How files begin that are no text: what they are, and what to do."""
MOST = 0.01
"""The largest share of a text's bytes that may be NUL, or no UTF-8."""


def text_of(raw: bytes) -> str:
    """The text of UTF-8 ``raw``, line ends as they are, without a byte order mark. Bytes that are not UTF-8
    become lone surrogates, which [`bytes_of`][] converts back; a model of bytes reads them like all
    others."""
    return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")


def bytes_of(text: str) -> bytes:
    """The bytes from which [`text_of`][] made ``text``."""
    return text.encode("utf-8", errors="surrogateescape")


def check_utf8(text: str, source: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, since they are not characters."""
    if found := NOT_UTF8.search(text):
        at = len(bytes_of(text[: found.start()]))
        raise UserError(
            f"{source} is not UTF-8 text: byte {ord(found[0]) - 0xDC00:#04x} at offset {at}; convert it to "
            f"UTF-8 first, or use tokenizer='byte'."
        )


def as_utf8(head: bytes, rest: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first block of a text and the ``rest`` in UTF-8, without a byte order mark: UTF-16 and UTF-32 that
    have one are decoded, where half of a surrogate pair becomes U+FFFD; all else stays as it is."""
    encoding = next((name for mark, name in WIDE.items() if head.startswith(mark)), None)
    if encoding is None:
        return head.removeprefix(codecs.BOM_UTF8), iter(rest)
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    texts = (decoder.decode(block, final=not block) for block in chain([head], rest, [b""]))
    blocks = (text.encode() for text in texts)
    return next(blocks), blocks


def not_text(head: bytes) -> str:
    """What a file that begins with the block ``head`` looks like if it can't be a text in UTF-8, and what to
    do with it, in words; empty for a text."""
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    even, odd = head[::2].count(0), head[1::2].count(0)
    readable = len(head.decode("utf-8", errors="ignore").encode())
    what_to_do = "convert it to UTF-8 text, or end its name with .bin if it holds token ids"
    if even + odd > MOST * len(head):
        is_wide = max(even, odd) > 0.3 * len(head) and min(even, odd) < 0.1 * len(head)
        what = "UTF-16 without a byte order mark, or 16-bit token ids" if is_wide else "binary data"
        return f"{what}; {what_to_do}"
    if len(head) - readable > MOST * len(head) + 3:  # where the block ends, a character may be cut
        return f"text in another encoding than UTF-8, or binary data; {what_to_do}"
    return ""
