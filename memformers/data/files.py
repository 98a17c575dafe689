"""Files as blocks of bytes, compressed or not, in constant memory."""

import bz2
import lzma
import mmap
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from memformers.common.errors import UserError

BLOCK = 1 << 20
"""Bytes that are read at once."""
COMPRESSED_BLOCK = 1 << 16
LONGEST_LINE = 256 << 20
"""Bytes of a line of JSON; a longer one is refused, since it must be in memory as a whole."""
ZIP = ".zip"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ZIP)
STDIN = Path("-")


class SeveralFiles(UserError):
    """An archive has not one file but several, or none."""


def blocks_of(path: Path, progress: Callable[[int], object] = lambda n: None) -> Iterator[bytes]:
    """The contents of a file, decompressed if its name ends so, or of standard input for ``-``; ``progress``
    gets the number of bytes that were read of it. Raises UserError for a file that can't be read, that
    changes meanwhile, or that is cut off or broken."""
    if path == STDIN:
        yield from _raw(sys.stdin.buffer.read, BLOCK, progress)
        return
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            if suffix == ZIP:
                yield from _unzipped(file, path, progress)
            else:
                raw = _raw(file.read, COMPRESSED_BLOCK if suffix in COMPRESSED else BLOCK, progress)
                yield from _decompressed(raw, suffix, path) if suffix in COMPRESSED else raw
            after = os.fstat(file.fileno())
    except OSError as error:
        refuse(error, path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{path} has changed while it was read; begin again when it is complete.")


def refuse(error: OSError, path: Path | None = None) -> NoReturn:
    """Raise UserError for a file or folder that can't be read."""
    raise UserError(
        f"{path or error.filename} can't be read: {error.strerror}; name a text file, a folder of texts or a "
        f"file of JSON lines."
    ) from None


def _raw(read: Callable[[int], bytes], size: int, progress: Callable[[int], object]) -> Iterator[bytes]:
    while block := read(size):
        progress(len(block))
        yield block


def _unzipped(file: BinaryIO, path: Path, progress: Callable[[int], object]) -> Iterator[bytes]:
    """The contents of the one file in a ZIP archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            inside = [each for each in archive.infolist() if not each.is_dir()]
            if len(inside) != 1:
                raise SeveralFiles(f"{path} holds {len(inside):,} files; unpack it, and name the folder.")
            with archive.open(inside[0]) as member:
                yield from _raw(member.read, BLOCK, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} can't be decompressed: {error}; give a complete file.") from None


def _decompressed(blocks: Iterable[bytes], suffix: str, path: Path) -> Iterator[bytes]:
    """What ``blocks`` are when they are decompressed; a file may have several compressed parts."""
    stream = _decompressor(suffix)
    fresh, errors = True, _errors(suffix)
    for block in blocks:
        while block:
            if stream.eof:
                if not (block := block.lstrip(b"\0")):  # zeros that fill up a block, as gzip takes them
                    break
                stream, fresh = _decompressor(suffix), True
            try:
                if found := stream.decompress(block):
                    yield found
            except errors as error:
                raise UserError(f"{path} can't be decompressed: {error}; give a complete file.") from None
            fresh, block = False, stream.unused_data if stream.eof else b""
    if not stream.eof and not fresh:
        raise UserError(f"{path} ends in the middle of its compressed data; give a complete file.")


def _decompressor(suffix: str) -> Any:
    if suffix == ".gz":
        return zlib.decompressobj(wbits=31)
    if suffix == ".bz2":
        return bz2.BZ2Decompressor()
    if suffix == ".xz":
        return lzma.LZMADecompressor()
    import zstandard  # not above: hardly any text needs it

    return zstandard.ZstdDecompressor().decompressobj()


def _errors(suffix: str) -> tuple[type[Exception], ...]:
    if suffix == ".zst":
        import zstandard

        return (zstandard.ZstdError,)
    return (zlib.error, lzma.LZMAError, OSError)


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
