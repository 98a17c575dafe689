"""Files as blocks of bytes, compressed or not, of this machine or another, in constant memory."""

import bz2
import hashlib
import lzma
import mmap
import os
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy.typing as npt
import platformdirs
import zstandard

from memformers.common.errors import UserError

File = Path | bytes | npt.NDArray[Any]
"""A file, - for standard input, or what one would hold: a text, or token ids."""
STDIN = Path("-")
BLOCK = 1 << 20
"""Bytes that are read at once."""
LONGEST = 256 << 20
"""Bytes of a line of JSON, an array, or a document between separators, which must be in memory as a whole."""
DECOMPRESSORS: dict[str, Any] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


class SeveralFiles(UserError):
    """An archive has not one file but several, or none."""


def local(name: str) -> Path:
    """The file or folder called ``name``; one of another machine's, such as s3://bucket/text.jsonl, is first
    copied into the user's cache. UserError where that fails."""
    if "://" not in name:
        return Path(name)
    import fsspec  # not above: hardly any text needs it

    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    copies = str(Path(platformdirs.user_cache_dir("memformers"), "remote", key))
    options = {"cache_storage": copies, "check_files": True, "same_names": True}
    try:
        return Path(fsspec.open_local(f"filecache::{name}", filecache=options))
    except Exception as error:  # of any file system, or of one that isn't installed
        raise UserError(f"{name} can't be read: {' '.join(str(error).split())}; name another file.") from None


def blocks_of(file: Path | bytes) -> Iterator[bytes]:
    """The contents of a file, decompressed if its name ends so. Raises UserError for one that can't be read,
    that changes meanwhile, or is broken."""
    if isinstance(file, bytes) or file == STDIN:
        yield from [file] if isinstance(file, bytes) else read_blocks(sys.stdin.buffer)
        return
    suffix = file.suffix.lower()
    try:
        with open(file, "rb") as raw:
            before = os.fstat(raw.fileno())
            if suffix == ".zip":
                archive = zipfile.ZipFile(raw)
                inside = [each for each in archive.infolist() if not each.is_dir()]
                if len(inside) != 1:
                    raise SeveralFiles(f"{file} holds {len(inside):,} files; unpack it, and name the folder.")
                yield from read_blocks(archive.open(inside[0]))
            elif suffix in DECOMPRESSORS:
                yield from decompressed(read_blocks(raw), suffix)
            else:
                yield from read_blocks(raw)
            after = os.fstat(raw.fileno())
    except UserError:
        raise
    except OSError as error:
        refuse(error, file)
    except Exception as error:  # of five libraries
        raise UserError(f"{file} can't be decompressed: {error}; give a complete file.") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{file} has changed while it was read; begin again when it is complete.")


def refuse(error: OSError, path: Path | None = None) -> NoReturn:
    """Raise UserError for a file or folder that can't be read."""
    why = f"{path or error.filename} can't be read: {error.strerror or error}"
    raise UserError(f"{why}; name a text file, a folder of texts or a file of JSON lines.") from None


def read_blocks(opened: Any) -> Iterator[bytes]:
    """What is left in an ``opened`` file."""
    return iter(lambda: opened.read(BLOCK), b"")


def decompressed(blocks: Iterable[bytes], suffix: str) -> Iterator[bytes]:
    """What ``blocks`` are when they are decompressed: parts, and zeros that fill up the last block, as gzip
    and xz take them."""
    stream = None
    for block in blocks:
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


def split_at(separator: bytes, blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """What is between the ``separator`` in ``blocks``, without it; UserError, with the ``name`` of the file,
    for more than [`LONGEST`][] bytes."""
    rest, searched, number = bytearray(), 0, 1
    for block in blocks:
        rest += block
        while 0 <= (end := rest.find(separator, searched)) <= LONGEST:
            yield bytes(rest[:end])
            del rest[: end + len(separator)]
            searched, number = 0, number + 1
        searched = max(len(rest) - len(separator) + 1, 0)
        if searched > LONGEST:
            raise UserError(
                f"{name}:{number}: expected at most {LONGEST >> 20} MiB before the next {separator!r}, got "
                f"more; make what is there a file of its own."
            )
    yield bytes(rest)


def forget(whole: mmap.mmap) -> None:
    """Give back the memory that holds what was read of a map; it can be read again."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not in Windows
        whole.madvise(mmap.MADV_DONTNEED)
