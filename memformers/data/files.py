"""What is in files, in constant memory: bytes, compressed or not, the text, or the token ids."""

import bz2
import codecs
import hashlib
import lzma
import mmap
import os
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy.typing as npt
import platformdirs
import zstandard

from memformers.common.errors import UserError
from memformers.common.files import user_path

Ids = npt.NDArray[Any]  # token ids `[n]`, of an integer type
File = Path | bytes | Ids  # a file, - for standard input, or what a file would contain: a text, or token ids
STDIN = Path("-")
# Bytes that are read at once.
BLOCK = 1 << 20
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what bytes that are not UTF-8 become in a text of bytes
NOT_CHARACTERS = re.compile("[\0\ud800-\udfff]")
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
# Bytes, more or less, of a text that are encoded at once.
PIECE = 256 << 10
# Bytes beside a piece that are encoded with it, if tokens depend on more than a word.
CONTEXT = 4 << 10
# Where a text is cut: behind a word, so that a space stays with the word that follows it.
LINE_END = re.compile(rb"(?<=[!-~])(?=\n)")
WORD_END = re.compile(rb"(?<=[!-~])(?=[ \t\r\n])")
CHARACTER_END = re.compile(rb"(?=[^\x80-\xbf])")
JSON_SUFFIXES = (".jsonl", ".jsonlines", ".ndjson", ".json")
RECORD_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv")
"""Of texts that are read record by record, which their names alone say."""
TAR = re.compile(r"\.(tar|tgz|tbz2?|txz)$", re.IGNORECASE)
DECOMPRESSORS: dict[str, Any] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


class Archive(UserError):
    where = "an archive"

    def __init__(self, file: Path):
        super().__init__(f"{file} is an archive; unpack it, and name a file in it or the folder.")


class NotText(UserError):
    def __init__(self, name: str, byte: int, offset: int):
        self.where = f"byte {byte:#04x} at offset {offset:,}"
        super().__init__(
            f"expected {name} to be text in UTF-8, got {self.where}; convert it to UTF-8, or read its bytes "
            f"with --tokenizer byte."
        )


def local(name: str) -> Path:
    """The file or folder called ``name``; one of another machine, such as s3://x/y.jsonl, is first copied."""
    if "://" not in name:
        return user_path(name)
    import fsspec  # not above: hardly any text needs it

    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    copies = str(Path(platformdirs.user_cache_dir("memformers"), "remote", key))
    options = {"cache_storage": copies, "check_files": True, "same_names": True}
    try:
        return Path(fsspec.open_local(f"filecache::{name}", filecache=options))
    except Exception as error:  # of any file system, or of one that isn't installed
        raise UserError(f"{name} can't be read: {' '.join(str(error).split())}; name another file.") from None


def blocks_of(file: Path | bytes) -> Iterator[bytes]:
    """The contents of a file, decompressed if its name ends so."""
    if isinstance(file, bytes) or file == STDIN:
        yield from [file] if isinstance(file, bytes) else read_blocks(sys.stdin.buffer)
        return
    try:
        with open(file, "rb") as raw:
            first_status = os.fstat(raw.fileno())
            yield from decompressed(raw, file)
            last_status = os.fstat(raw.fileno())
    except UserError:
        raise
    except OSError as error:
        raise_unreadable(error, file)
    except Exception as error:  # of five libraries
        raise UserError(f"{file} can't be decompressed: {error}; use a complete file.") from None
    has_changed = first_status.st_size != last_status.st_size
    has_changed = has_changed or first_status.st_mtime_ns != last_status.st_mtime_ns
    # The times of a pipe change as it is read.
    if has_changed and stat.S_ISREG(first_status.st_mode):
        raise UserError(f"{file} changed while it was read; start again when it is complete.")


def raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    problem = f"{path or error.filename} can't be read: {error.strerror or error}"
    kinds = "file" if isinstance(error, IsADirectoryError) else "text file, folder of texts or JSON lines"
    raise UserError(f"{problem}; name a {kinds}.") from None


def read_blocks(opened: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: opened.read(BLOCK), b"")


def decompressed(raw: IO[bytes], file: Path) -> Iterator[bytes]:
    """The one file in a zip, or all parts; zeros may fill up the last block, as for gzip and xz."""
    suffix = file.suffix.lower()
    if TAR.search(plain_name(file.name)):
        raise Archive(file)
    if suffix == ".zip":
        archive = zipfile.ZipFile(raw)
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        if len(entries) != 1:
            raise Archive(file)
        check_entry(entries[0].filename, file)
        yield from read_blocks(archive.open(entries[0]))
        return
    if suffix not in DECOMPRESSORS:
        yield from read_blocks(raw)
        return

    # A file may consist of several streams: each part of it was compressed alone.
    stream = None
    for block in read_blocks(raw):
        rest = block
        while True:
            if stream is None:
                rest = rest.lstrip(b"\0")
                if not rest:
                    break
                stream = DECOMPRESSORS[suffix]()
            try:
                yield stream.decompress(rest)
            except OSError as error:  # of bz2: the file itself was read
                raise EOFError(error) from None
            if not stream.eof:
                break
            rest = stream.unused_data
            stream = None
    if stream:
        raise EOFError("it ends in the middle of its compressed data")


def check_entry(name: str, file: Path) -> None:
    """UserError if ``name``, in a .zip, has records, and the name of this ``file`` doesn't say so."""
    suffix = Path(name).suffix.lower()
    stem = plain_name(file.name)
    if suffix in RECORD_SUFFIXES and not stem.lower().endswith(RECORD_SUFFIXES):
        raise UserError(f"{file} contains {name}; call it {stem}{suffix}.zip, so that it is read as such.")


def plain_name(name: str) -> str:
    """The name that a file has when it is decompressed."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in (*DECOMPRESSORS, ".zip") else name


def texts_in(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """The text in ``blocks``, UTF-8, or UTF-16 with a byte order mark. NotText at the first byte that is not
    text, which a NUL isn't either."""
    blocks = iter(blocks)
    head = head_of(blocks)
    mark = next(filter(head.startswith, MARKS), b"")
    encoding = MARKS.get(mark, "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = len(mark)  # of the block in the file
    for block in chain([head[offset:]], filter(None, blocks), [b""]):
        # The first bytes of a character that the block before ended within.
        pending = decoder.getstate()[0]
        start = offset - len(pending)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise NotText(name, error.object[error.start], start + error.start) from None
        if "\0" in text:
            encoded = text[: text.index("\0")].encode(encoding)
            raise NotText(name, 0, start + len(encoded))
        yield text
        offset += len(block)


def head_of(blocks: Iterator[bytes]) -> bytes:
    """The first of ``blocks``, joined until a byte order mark fits into them: what is decompressed may begin
    with a block of one byte."""
    head = b""
    for block in blocks:
        head += block
        if len(head) >= len(codecs.BOM_UTF8):
            break
    return head


def bytes_as_text(blocks: Iterable[bytes]) -> Iterator[str]:
    """Any bytes as text, without a byte order mark; [`bytes_of`][] converts them back."""
    blocks = iter(blocks)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    head = head_of(blocks).removeprefix(codecs.BOM_UTF8)
    for block in chain([head], filter(None, blocks), [b""]):
        yield decoder.decode(block, final=not block)


def bytes_of(text: str) -> bytes:
    """The bytes from which [`bytes_as_text`][] made ``text``."""
    return text.encode("utf-8", errors="surrogateescape")


def check_utf8(text: str, source: str) -> None:
    if wrong := NOT_UTF8.search(text):
        raise NotText(source, ord(wrong[0]) - 0xDC00, len(bytes_of(text[: wrong.start()])))


def check_characters(text: str, label: str) -> str:
    """``text``, which errors call ``label``; UserError for characters that UTF-8 or a text doesn't have."""
    if wrong := NOT_CHARACTERS.search(text):
        raise UserError(f"{label}: U+{ord(wrong[0]):04X} is not a character of a text; remove it.")
    return text


def pieces(text: Any, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where UTF-8 ``text`` is cut from ``begin`` to ``end``: before the first line break, else the first
    white space, else the first character, after ``PIECE`` bytes."""
    while end - begin > PIECE:
        least = begin + PIECE
        limit = min(begin + 2 * PIECE, end)
        cut = LINE_END.search(text, least, limit) or WORD_END.search(text, least, limit)
        if not cut and limit == end:
            break
        cut = cut or CHARACTER_END.search(text, least, limit)
        stop = cut.start() if cut else limit
        yield begin, stop
        begin = stop
    yield begin, end


def drop_resident_pages(mapped: mmap.mmap) -> None:
    """Give back the memory that holds what was read of a map; it can be read again."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not in Windows
        mapped.madvise(mmap.MADV_DONTNEED)
