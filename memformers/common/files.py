"""Files and folders that appear whole or not at all, checksums that detect changes, locks, and JSON that is
read strictly."""

import csv
import difflib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import dacite
from filelock import FileLock

from memformers.common.console import counted, printable
from memformers.common.errors import UserError
from memformers.common.fields import check_keys, describe_type

T = TypeVar("T")
MANIFEST = "manifest.json"
"""The file that lists the size and the SHA-256 of every other file in a folder."""
FORMAT = 1
"""Of a manifest."""
UNFINISHED = ".unfinished-"
"""The prefix of the name of a folder that is being written or deleted."""
REPLACED = ".replaced-"
"""The prefix of the name of a folder that another one replaces."""
BROKEN = ".broken-"
"""The prefix of the name of a damaged folder."""
IS_READ: ContextVar[bool] = ContextVar("is_read", default=False)
"""Whether a config is being made from what a file says, which must run no code of the file's choice."""


def user_path(name: str | Path) -> Path:
    """The path ``name``, in which ``~`` is a user's home."""
    return Path(os.path.expanduser(name))


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path that replaces ``path`` when the block ends well, so a crash leaves the old file or the
    new one."""
    path = path.resolve()  # a link to a file stays
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        sync(temporary)
        temporary.chmod(mode)  # safetensors sets another one
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets a manifest and the name ``folder`` when the block ends well. A folder that
    has the name is renamed first; [`remove_leftovers`][] restores it if the process stops in between."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary

        # Whole on the disk before it gets its name.
        paths = sorted(path for path in temporary.iterdir() if path.name != MANIFEST)
        write_manifest(temporary, [path.name for path in paths])
        mode = stat.S_IMODE((temporary / MANIFEST).stat().st_mode)
        for path in paths:
            path.chmod(mode)
            sync(path)
        sync(temporary)

        # A crash between these two leaves the old folder under its other name.
        if folder.exists():
            move(folder, REPLACED)
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    old = folder.with_name(f"{REPLACED}{folder.name}")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(folder)


def move(folder: Path, prefix: str) -> Path:
    """Rename ``folder`` so that its name begins with ``prefix``; a folder with the new name is deleted."""
    target = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(target, ignore_errors=True)
    return folder.rename(target)


def remove(folder: Path) -> None:
    """Delete a folder such that a crash leaves no part of it under its name."""
    shutil.rmtree(move(folder, UNFINISHED), ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Clean up in ``parent`` after processes that stopped while they wrote, replaced or deleted a folder."""
    for old in parent.glob(f"{REPLACED}*"):
        finish_replacing(parent / old.name.removeprefix(REPLACED))
    for path in parent.glob(f"{UNFINISHED}*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def has_manifest(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)


def write_manifest(folder: Path, names: Sequence[str]) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "files": {n: fingerprint(folder / n) for n in names}})


def check_manifest(folder: Path, names: Sequence[str] | None = None) -> None:
    """Raise UserError unless the files called ``names``, or all, are as the manifest of ``folder`` lists
    them. OSError if one can't be read: a file system that fails briefly must not cost a checkpoint."""
    source = folder / MANIFEST
    version = read_json(source).get("format")
    if version != FORMAT:
        raise UserError(f"{source} has format {version!r}; this version reads format {FORMAT}.")
    files = read_json(source, {"files": dict[str, dict[str, Any]]})["files"]
    for name in files if names is None else names:
        if name not in files:
            raise UserError(f"{source} lists no {name}; a complete checkpoint has one.")
        path = folder / name
        try:
            current = fingerprint(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UserError(f"expected a file {path}, but it is missing.") from None
        if current != files[name]:
            raise UserError(f"{path} has changed since it was written: its size or checksum differs.")


def fingerprint(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": checksum(path)}


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def numbered(parent: Path) -> list[Path]:
    """The folders in ``parent`` whose names are numbers, the highest first."""
    folders = [path for path in parent.glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name), reverse=True)


def newest_that_loads(folders: Sequence[Path], load: Callable[[Path], T], say: bool = True) -> tuple[Path, T]:
    """The first of ``folders`` for which ``load`` doesn't raise UserError, and what it returns; UserError if
    none can be used. With ``say``, a line says why the folders before it can't."""
    for folder in folders:
        try:
            return folder, load(folder)
        except UserError as error:
            if say:
                message = f"checkpoint {folder} is skipped: {' '.join(str(error).split())}"
                print(printable(message), file=sys.stderr)
    raise UserError(f"{folders[0].parent}: of {counted(len(folders), 'checkpoint')}, none can be used.")


def locked(path: Path, seconds: float = 0.0) -> AbstractContextManager[object]:
    """A block in which no other process has the lock at ``path``. Raises filelock's Timeout if it isn't free
    within ``seconds``; negative: wait forever. The lock of a process that died is free."""
    try:
        return FileLock(path).acquire(timeout=seconds)
    except NotImplementedError:  # how filelock says that a file system has no locks
        print(f"{path.parent} has a file system without locks; let no other process use it.", file=sys.stderr)
        return nullcontext()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically; U+FFFD replaces lone surrogates."""
    with atomic_write(path) as temporary:
        temporary.write_text(re.sub("[\ud800-\udfff]", "\ufffd", text), encoding="utf-8")


def csv_text(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as CSV; None and NaN are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow([None if cell != cell else cell for cell in row])  # NaN alone is not itself
    return text.getvalue()


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, atomically; a dataclass becomes an object of its fields,
    or what its ``to_json`` returns. Lone surrogates, as in names that are not UTF-8, are read back."""
    text = json.dumps(data, indent=2, ensure_ascii=False, default=json_value) + "\n"
    write_text(path, text.encode("utf-8", "backslashreplace").decode())  # as JSON escapes them


def json_value(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    return {field.name: getattr(value, field.name) for field in fields(value)}


def read_json(path: Path, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in ``path``; UserError if it is missing or broken, or has no values of these ``kinds``,
    as [`check_keys`][memformers.common.fields.check_keys] has them; OSError if it can't be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"expected a file {path}, but it is missing.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"expected {path} to hold a JSON object, got a {type(data).__name__}.")
    check_keys(data, kinds or {}, str(path))
    return data


def config_from_dict(config: type[T], data: Mapping[str, Any], source: str) -> T:
    """The frozen dataclass ``config`` from a dict that ``asdict`` made. Raises UserError, with the ``source``
    of ``data``, for unknown keys (with the nearest known one), wrong types, and what the config refuses."""
    token = IS_READ.set(True)  # no code is imported meanwhile
    try:
        return dacite.from_dict(config, data, dacite.Config(strict=True, cast=[tuple]))
    except dacite.UnexpectedDataError as error:
        unknown = sorted(error.keys)
        similar = difflib.get_close_matches(unknown[0], sorted(_keys(config)), 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "."
        problem = f"unknown key {', '.join(map(repr, unknown))}{hint}"
    except dacite.WrongTypeError as error:
        problem = f"expected {error.field_path} to be {describe_type(error.field_type)}, got {error.value!r}."
    except UserError:
        raise
    except (dacite.DaciteError, TypeError, ValueError) as error:  # the last two of tuples that are no lists
        problem = str(error)
    finally:
        IS_READ.reset(token)
    raise UserError(f"{source}: {problem}")


def _keys(config: Any) -> set[str]:
    inner = [_keys(field.type) for field in fields(config) if is_dataclass(field.type)]
    return {field.name for field in fields(config)}.union(*inner)
