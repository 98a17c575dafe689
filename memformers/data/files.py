"""Files as blocks of bytes, compressed or not, of this machine or another, in constant memory."""

import bz2
import hashlib
import lzma
import mmap
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy.typing as npt
import platformdirs

from memformers.common.errors import UserError

File = Path | bytes | npt.NDArray[Any]
"""A file, - for standard input, or what one would hold: a text, or token ids."""
BLOCK, COMPRESSED_BLOCK = 1 << 20, 1 << 16
"""Bytes that are read at once."""
LONGEST_LINE = 256 << 20
"""Bytes of a line of JSON; a longer one is refused, since it must be in memory as a whole."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
STDIN = Path("-")
BROKEN = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError)
"""What the libraries raise for compressed data that they can't read."""


class SeveralFiles(UserError):
    """An archive has not one file but several, or none."""


def local(name: str) -> Path:
    """The file or folder called ``name``; one of another machine's, such as s3://bucket/text.jsonl, is first
    copied into the user's cache, by fsspec. UserError where that fails."""
    if "://" not in name:
        return Path(name)
    import fsspec  # not above: hardly any text needs it

    copies = Path(
        platformdirs.user_cache_dir("memformers"), "remote", hashlib.sha256(name.encode()).hexdigest()[:16]
    )
    options = {"cache_storage": str(copies), "check_files": True, "same_names": True}
    try:
        return Path(fsspec.open_local(f"filecache::{name}", filecache=options))
    except Exception as error:  # of any file system, or of one that isn't installed
        raise UserError(f"{name} can't be read: {' '.join(str(error).split())}; name another file.") from None


def blocks_of(file: Path | bytes, progress: Callable[[int], object] = lambda n: None) -> Iterator[bytes]:
    """The contents of a file, decompressed if its name ends so; ``progress`` gets the number of bytes that
    were read of it. Raises UserError for one that can't be read, that changes meanwhile, or is broken."""
    if isinstance(file, bytes):
        yield file
        return
    if file == STDIN:
        yield from _read(sys.stdin.buffer.read, BLOCK, progress)
        return
    suffix = file.suffix.lower()
    try:
        with open(file, "rb") as opened:
            before = os.fstat(opened.fileno())
            if suffix == ".zip":
                with zipfile.ZipFile(opened) as archive:
                    inside = [each for each in archive.infolist() if not each.is_dir()]
                    if len(inside) != 1:
                        raise SeveralFiles(
                            f"{file} holds {len(inside):,} files; unpack it, and name the folder."
                        )
                    yield from _read(archive.open(inside[0]).read, BLOCK, progress)
            elif suffix in COMPRESSED:
                yield from _decompressed(_read(opened.read, COMPRESSED_BLOCK, progress), suffix)
            else:
                yield from _read(opened.read, BLOCK, progress)
            after = os.fstat(opened.fileno())
    except BROKEN as error:
        raise UserError(f"{file} can't be decompressed: {error}; give a complete file.") from None
    except OSError as error:
        refuse(error, file)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{file} has changed while it was read; begin again when it is complete.")


def refuse(error: OSError, path: Path | None = None) -> NoReturn:
    """Raise UserError for a file or folder that can't be read."""
    raise UserError(
        f"{path or error.filename} can't be read: {error.strerror}; name a text file, a folder of texts or a "
        f"file of JSON lines."
    ) from None


def _read(read: Callable[[int], bytes], size: int, progress: Callable[[int], object]) -> Iterator[bytes]:
    while block := read(size):
        progress(len(block))
        yield block


def _decompressed(blocks: Iterable[bytes], suffix: str) -> Iterator[bytes]:
    """What ``blocks`` are when they are decompressed: parts, and zeros that fill up the last block."""
    stream = None
    for block in blocks:
        while stream or (block := block.lstrip(b"\0")):
            stream = stream or DECOMPRESSORS[suffix]()
            try:
                found = stream.decompress(block)
            except Exception as error:  # of four libraries
                raise EOFError(error) from None
            yield found
            if not stream.eof:
                break
            block, stream = stream.unused_data, None
    if stream:
        raise EOFError("it ends in the middle of its compressed data")


def _zstandard() -> Any:
    import zstandard  # not above: hardly any text needs it

    return zstandard.ZstdDecompressor().decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _zstandard,
}


def forget(whole: mmap.mmap) -> None:
    """Give back the memory that holds what was read of a map; it can be read again."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not in Windows
        whole.madvise(mmap.MADV_DONTNEED)


def plain_name(name: str) -> str:
    """The name that a file has when it is decompressed."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in COMPRESSED else name


def parts_of(blocks: Iterable[bytes], separator: bytes) -> Iterator[tuple[bytes, bool]]:
    """What is between ``separator``, in blocks, each with whether its part ends with it."""
    rest, kept = b"", len(separator) - 1
    for block in blocks:
        *whole, rest = (rest + block).split(separator)
        yield from ((part, True) for part in whole)
        if len(rest) > kept:
            yield rest[: len(rest) - kept], False
            rest = rest[len(rest) - kept :]
    yield rest, True


def lines_of(blocks: Iterable[bytes], source: str) -> Iterator[bytes]:
    """The lines in ``blocks``, without their ends; UserError for one longer than [`LONGEST_LINE`][]."""
    parts: list[bytes] = []
    number, length = 1, 0
    for part, ends in parts_of(blocks, b"\n"):
        parts.append(part)
        length += len(part)
        if length > LONGEST_LINE:
            raise UserError(
                f"{source}:{number}: expected a line of at most {LONGEST_LINE >> 20} MiB, got a longer one; "
                f"make its text a file of its own."
            )
        if ends:
            yield b"".join(parts)
            parts, number, length = [], number + 1, 0
