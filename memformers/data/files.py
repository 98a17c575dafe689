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

import numpy as np
import numpy.typing as npt
import platformdirs
import zstandard

from memformers.common.errors import UserError
from memformers.common.files import user_path

Ids = npt.NDArray[Any]  # token ids `[n]`, of an integer type
File = Path | bytes | Ids  # a file, - for standard input, or what a file would contain: a text, or token ids
STDIN = Path("-")
OF_IDS = "_documents.npy"  # how the names of files end that list the documents of token ids
BLOCK = 1 << 20  # bytes that are read at once
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what bytes that are not UTF-8 become in a text of bytes
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
PIECE = 256 << 10  # bytes, more or less, of a text that are encoded at once
CONTEXT = 4 << 10  # bytes beside a piece that are encoded with it, if tokens depend on more than a word
LINE_END = re.compile(rb"(?<=[!-~])(?=\n)")
WORD_END = re.compile(rb"(?<=[!-~])(?=[ \t\r\n])")
CHARACTER_END = re.compile(rb"(?=[^\x80-\xbf])")
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
            before = os.fstat(raw.fileno())
            yield from decompressed(raw, file)
            after = os.fstat(raw.fileno())
    except UserError:
        raise
    except OSError as error:
        raise_unreadable(error, file)
    except Exception as error:  # of five libraries
        raise UserError(f"{file} can't be decompressed: {error}; use a complete file.") from None
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if changed and stat.S_ISREG(before.st_mode):  # the times of a pipe change as it is read
        raise UserError(f"{file} changed while it was read; start again when it is complete.")


def raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    why = f"{path or error.filename} can't be read: {error.strerror or error}"
    kinds = "file" if isinstance(error, IsADirectoryError) else "text file, folder of texts or JSON lines"
    raise UserError(f"{why}; name a {kinds}.") from None


def read_blocks(opened: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: opened.read(BLOCK), b"")


def decompressed(raw: IO[bytes], file: Path) -> Iterator[bytes]:
    """The one file in a zip, or all parts; zeros may fill up the last block, as for gzip and xz."""
    suffix = file.suffix.lower()
    if TAR.search(plain_name(file.name)):
        raise Archive(file)
    if suffix == ".zip":
        archive = zipfile.ZipFile(raw)
        inside = [entry for entry in archive.infolist() if not entry.is_dir()]
        if len(inside) != 1:
            raise Archive(file)
        yield from read_blocks(archive.open(inside[0]))
        return
    stream = None
    for block in read_blocks(raw):
        if suffix not in DECOMPRESSORS:
            yield block
            continue
        while stream or (block := block.lstrip(b"\0")):
            stream = stream or DECOMPRESSORS[suffix]()
            try:
                yield stream.decompress(block)
            except OSError as error:  # of bz2: the file itself was read
                raise EOFError(error) from None
            if not stream.eof:
                break
            block, stream = stream.unused_data, None
    if stream:
        raise EOFError("it ends in the middle of its compressed data")


def plain_name(name: str) -> str:
    """The name that a file has when it is decompressed."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in (*DECOMPRESSORS, ".zip") else name


def texts_in(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """The text in ``blocks``, UTF-8, or UTF-16 with a byte order mark. NotText at the first byte that is not
    text, which a NUL isn't either."""
    blocks = filter(None, blocks)
    head = next(iter(blocks), b"")
    mark = next(filter(head.startswith, MARKS), b"")
    encoding, at = MARKS.get(mark, "utf-8"), len(mark)
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in chain([head[at:]], blocks, [b""]):
        pending = decoder.getstate()[0]
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            start = at - len(pending) + error.start
            raise NotText(name, error.object[error.start], start) from None
        if "\0" in text:
            before = text[: text.index("\0")].encode(encoding)
            raise NotText(name, 0, at - len(pending) + len(before))
        yield text
        at += len(block)


def bytes_as_text(blocks: Iterable[bytes]) -> Iterator[str]:
    """Any bytes as text, without a byte order mark; [`bytes_of`][] converts them back."""
    blocks = filter(None, blocks)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    head = next(iter(blocks), b"").removeprefix(codecs.BOM_UTF8)
    for block in chain([head], blocks, [b""]):
        yield decoder.decode(block, final=not block)


def bytes_of(text: str) -> bytes:
    """The bytes from which [`bytes_as_text`][] made ``text``."""
    return text.encode("utf-8", errors="surrogateescape")


def check_utf8(text: str, source: str) -> None:
    if wrong := NOT_UTF8.search(text):
        raise NotText(source, ord(wrong[0]) - 0xDC00, len(bytes_of(text[: wrong.start()])))


def pieces(text: Any, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where UTF-8 ``text`` is cut from ``begin`` to ``end``: before the first line break, else the first
    white space, else the first character, after ``PIECE`` bytes."""
    while end - begin > PIECE:
        at, limit = begin + PIECE, min(begin + 2 * PIECE, end)
        cut = LINE_END.search(text, at, limit) or WORD_END.search(text, at, limit)
        if not cut and limit == end:
            break
        cut = cut or CHARACTER_END.search(text, at, limit)
        stop = cut.start() if cut else limit
        yield begin, stop
        begin = stop
    yield begin, end


def drop_resident_pages(whole: mmap.mmap) -> None:
    """Give back the memory that holds what was read of a map; it can be read again."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not in Windows
        whole.madvise(mmap.MADV_DONTNEED)


def documents_beside(path: Path) -> Path:
    """The file that lists the documents of the token ids at ``path``, if there is one."""
    return path.with_name(f"{path.stem}{OF_IDS}")


def ids_in(file: Path | Ids, name: str, vocab_size: int | None = None) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The ids of a .npy or .bin file, or of a program, and the lengths of their documents, whose starts, and
    end, NAME_documents.npy beside the file lists."""
    ids: Ids = mapped(file, vocab_size) if isinstance(file, Path) else np.asanyarray(file)
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or not len(ids):
        got = f"{list(ids.shape)} of {ids.dtype}"
        raise UserError(f"expected {name} to be token ids [n] of an integer type, got {got}; convert them.")
    if not isinstance(file, Path):
        return ids, np.zeros(0, np.int64)
    starts_file = documents_beside(file)
    if not starts_file.exists():
        return ids, np.zeros(0, np.int64)
    places = ids_in(starts_file, str(starts_file))[0].astype(np.int64)
    lengths = np.diff(places)
    if places[0] != 0 or places[-1] != len(ids) or (lengths < 1).any():
        raise UserError(
            f"expected {starts_file} to rise from 0 to {len(ids):,}, the number of tokens, got "
            f"{places[0]:,} to {places[-1]:,}, with {(lengths < 1).sum():,} steps that don't rise; write it "
            f"again."
        )
    return ids, lengths


def mapped(path: Path, vocab_size: int | None = None) -> Ids:
    """The ids in a .npy file, or in a .bin file: of the type in its name, as in x.uint32.bin, or of two
    bytes, or four where there are so many. Every second half that is 0 shows ids of four bytes."""
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        named = next((kind for kind in (16, 32, 64) if path.stem.lower().endswith(f".uint{kind}")), 0)
        width = named // 8 or (4 if (vocab_size or 0) > 1 << 16 else 2)
        if (size := path.stat().st_size) % width or not size:
            raise ValueError(f"expected ids of {width} bytes, got {size:,} bytes")
        ids: Ids = np.memmap(path, f"<u{width}", "r")
        if not named and width == 2 and len(ids) > 2 and ids[0::2].any() and not ids[1::2].any():
            raise ValueError(f"every second id is 0, so they have four bytes; call it {path.stem}.uint32.bin")
        return ids
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read as token ids: {error}; write it again.") from None
