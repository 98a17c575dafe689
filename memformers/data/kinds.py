"""What a file looks like: its kind is looked at and not assumed, so that nothing else is learned as text."""

import codecs
from collections.abc import Iterable, Iterator
from itertools import chain

WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The encodings that a byte order mark says."""
MAGIC = {
    b"\x1f\x8b": "gzip; end its name with .gz",
    b"\xfd7zXZ\0": "xz; end its name with .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard; end its name with .zst",
    b"PK\x03\x04": "a ZIP archive; end its name with .zip, or unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"\x93NUMPY": "a NumPy array; decode its token ids to text",
    b"PAR1": "Parquet; write its texts as JSON lines",
    b"%PDF-": "PDF; extract its text",
    b"\xd0\xcf\x11\xe0": "an Office document; save it as plain text",
    b"{\\rtf": "RTF; save it as plain text",
    b"\x89PNG": "a PNG image; name a text",
    b"\xff\xd8\xff": "a JPEG image; name a text",
    b"SQLite format 3\0": "an SQLite database; export its texts",
    b"\x89HDF": "HDF5; export its texts",
    **{b"BZh%d1AY&SY" % level: "bzip2; end its name with .bz2" for level in range(1, 10)},
    **{bytes((0x80, protocol)): "a pickle; write what is in it as text" for protocol in (2, 3, 4, 5)},
}
"""How files begin that are no text: what they are, and what to do."""
MOST = 0.01
"""The largest share of a text's bytes that may be NUL, or no UTF-8."""


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
    if even + odd > MOST * len(head):
        if max(even, odd) > 0.3 * len(head) and min(even, odd) < 0.1 * len(head):
            return "UTF-16 without a byte order mark, or 16-bit token ids; convert it to UTF-8 text"
        return "binary data, such as token ids; convert it to UTF-8 text"
    readable = len(head.decode("utf-8", errors="ignore").encode())
    if len(head) - readable > MOST * len(head) + 3:  # where the block ends, a character may be cut
        return "text in another encoding than UTF-8, or binary data; convert it to UTF-8 text"
    return ""
