"""Folders that are written atomically, with checksums that detect changes.

``manifest.json`` has the size and SHA-256 of every other file. The folder is written under another name,
flushed to the disk, and renamed, so that what is left when the machine stops has another kind of name.
"""

import hashlib
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, sync, write_json
from memformers.common.text_format import counted

T = TypeVar("T")
MANIFEST, FORMAT = "manifest.json", 1
LEFTOVER, REPLACED, BROKEN = ".unfinished-", ".replaced-", ".broken-"
"""Prefixes of the names of folders that are being written or deleted, whose name another one takes, and that
were found broken."""


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: its size in bytes, and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """That of the file at ``path``, as it is now."""
        return cls(path.stat().st_size, checksum(path))


@contextmanager
def atomic_dir(folder: Path, of_others: Mapping[str, FileEntry] = MappingProxyType({})) -> Iterator[Path]:
    """A temporary folder beside ``folder``, given its name and a manifest when the block ends well.

    Another folder of this name is replaced. It is renamed first; if the process stops between the two
    renames, [`remove_leftovers`][] restores it. ``of_others`` are the files that other processes have written
    into it and put on the disk when the block ends. Raises OSError if it can't be written, or lacks one of
    these; then nothing of it is left, and no other folder has changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{LEFTOVER}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        paths = sorted(path for path in temporary.iterdir() if path.name != MANIFEST)
        if absent := sorted(of_others.keys() - {path.name for path in paths}):
            raise OSError(f"{absent[0]} of another process isn't there; name a folder that all of them share")
        files = {path.name: of_others.get(path.name) or FileEntry.of(path) for path in paths}
        write_json(temporary / MANIFEST, {"format": FORMAT, "files": files})
        mode = stat.S_IMODE((temporary / MANIFEST).stat().st_mode)
        for path in paths:
            path.chmod(mode)  # safetensors gives its files another than the umask says
            sync(path)
        sync(temporary)
        if folder.exists():
            moved(folder, REPLACED)
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        end_replacing(folder)


def write_manifest(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of the files called ``names`` in ``folder``."""
    files = {name: FileEntry.of(folder / name) for name in names}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def end_replacing(folder: Path) -> None:
    """Delete what ``folder`` has taken the place of, or give this its name back if ``folder`` isn't there."""
    old = folder.with_name(f"{REPLACED}{folder.name}")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(folder)


def moved(folder: Path, prefix: str) -> Path:
    """``folder`` under another name, which begins with ``prefix``; what had that name is deleted."""
    other = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(other, ignore_errors=True)
    return folder.rename(other)


def check_manifest(folder: Path, names: Sequence[str] | None = None) -> None:
    """Raise UserError unless the files called ``names``, or all, are as the manifest in ``folder`` says, and
    OSError if one can't be read: a file system that fails for a moment must not cost a checkpoint."""
    source = folder / MANIFEST
    if (version := read_json(source).get("format")) != FORMAT:
        raise UserError(f"{source} has format {version!r}; this version reads format {FORMAT}.")
    files = read_json(source, {"files": dict[str, dict[str, Any]]})["files"]
    for name in files if names is None else names:
        if name not in files:
            raise UserError(f"{source} lists no {name}; a complete checkpoint has one.")
        path, written = folder / name, config_from_dict(FileEntry, files[name], str(source))
        try:
            now = FileEntry.of(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UserError(f"expected a file {path}, but it is missing.") from None
        if now != written:
            sizes = f"{written.size:,} bytes then, {now.size:,} now"
            raise UserError(f"{path} has changed since it was written: {sizes}, and another checksum.")


def numbered(parent: Path) -> list[Path]:
    """The folders in ``parent`` whose names are numbers, the highest first."""
    folders = [path for path in parent.glob("[0-9]*") if path.name.isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name), reverse=True)


def newest_that_loads(folders: Sequence[Path], load: Callable[[Path], T], say: bool = True) -> tuple[Path, T]:
    """The first of ``folders`` for which ``load`` doesn't raise UserError, and the result of ``load``; with
    ``say``, a line names each folder before it, and why it can't be used. Raises ValueError if none can."""
    for folder in folders:
        try:
            return folder, load(folder)
        except UserError as error:
            if say:
                why = " ".join(str(error).split())
                print(f"checkpoint {folder} is passed over: {why}", file=sys.stderr)
    parent = folders[0].parent
    raise UserError(f"{parent} has {counted(len(folders), 'checkpoint')}, of which none can be used.")


def remove(folder: Path) -> None:
    """Delete a folder in such a way that a crash leaves no part of it under its name."""
    shutil.rmtree(moved(folder, LEFTOVER), ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Delete what is left in ``parent`` of processes that stopped while they wrote or deleted a folder or
    made a link; a folder whose replacement was not finished gets its name back."""
    for old in parent.glob(f"{REPLACED}*"):
        end_replacing(parent / old.name.removeprefix(REPLACED))
    for path in parent.glob(f"{LEFTOVER}*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def has_manifest(folder: Path) -> bool:
    """Whether ``folder`` has a manifest."""
    return os.path.lexists(folder / MANIFEST)
