"""Files that are written atomically, locks, and JSON that is read strictly."""

import csv
import difflib
import io
import json
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import dacite
from filelock import FileLock

from memformers.common.errors import UserError
from memformers.common.fields import check_keys, described

T = TypeVar("T")
IS_READ: ContextVar[bool] = ContextVar("is_read", default=False)
"""Whether a config is being made from what a file says, which must run no code of the file's choice."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    The contents reach the disk before the file gets its name, so a crash leaves the old file or the new one.
    A link is followed. An existing file keeps its mode; a new one gets the mode of the umask.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch(exist_ok=False)
        mode = (path if path.exists() else temporary).stat().st_mode
        yield temporary
        sync(temporary)
        temporary.chmod(stat.S_IMODE(mode))  # whatever wrote it, as safetensors does, may have set another
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def locked(path: Path, seconds: float = 0.0) -> AbstractContextManager[object]:
    """A block in which no other process has the lock at ``path``, which was waited for as many ``seconds``,
    or if negative forever; else filelock's Timeout, at once. The lock of a process that died is free."""
    try:
        return FileLock(path).acquire(timeout=seconds)
    except NotImplementedError:  # how filelock says that a file system has no locks
        said = f"{path.parent} lies where files can't be locked; let no other process use it."
        print(said, file=sys.stderr)
        return nullcontext()


def check_utf8_name(path: Path) -> None:
    """Raise UserError for a name that is not UTF-8: safetensors could write such a file but not read it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name {str(path)!r} is not UTF-8; choose another name.") from None


def sync(path: Path) -> None:
    """Return when the contents of a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path`` atomically; U+FFFD takes the place of bytes that were not UTF-8, which
    are lone surrogates in a text."""
    with replacing(path) as temporary:
        temporary.write_text(re.sub("[\ud800-\udfff]", "\ufffd", text), encoding="utf-8")


def csv_text(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as CSV; None and NaN are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([None if cell != cell else cell for cell in row] for row in rows)
    return text.getvalue()


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, atomically; a dataclass becomes an object of its
    fields, or what its ``to_json`` returns. Lone surrogates, as in the name of a file that is not UTF-8, are
    read back as they were."""

    text = json.dumps(data, indent=2, ensure_ascii=False, default=_plain) + "\n"
    write_text(path, text.encode("utf-8", "backslashreplace").decode())  # as JSON escapes them


def write_rows(path: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as [`write_json`][] does, with a line for each element of a list in it, and for each
    other value."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=_plain)

    values = {
        k: "[\n" + ",\n".join(map(line, v)) + "\n]" if isinstance(v, list) else line(v)
        for k, v in data.items()
    }
    write_text(path, "{\n" + ",\n".join(f"{line(key)}: {value}" for key, value in values.items()) + "\n}\n")


def _plain(value: Any) -> Any:
    """What JSON has of an object: its fields, or what its ``to_json`` returns."""
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
    before = IS_READ.set(True)
    try:
        return dacite.from_dict(config, data, dacite.Config(strict=True, cast=[tuple]))
    except dacite.UnexpectedDataError as error:
        known, unknown = sorted(_keys(config)), sorted(error.keys)
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {shorten(', '.join(known), 300)}."
        said = f"unknown key {', '.join(map(repr, unknown))}; {hint}"
    except dacite.WrongTypeError as error:
        said = f"expected {error.field_path} to be {described(error.field_type)}, got {error.value!r}."
    except (dacite.DaciteError, TypeError) as error:  # a tuple of no list is a TypeError
        said = str(error)
    finally:
        IS_READ.reset(before)
    raise UserError(f"{source}: {said}")


def _keys(config: Any) -> set[str]:
    """The names of a dataclass's fields and of those of the dataclasses in it."""
    inner = [_keys(field.type) for field in fields(config) if is_dataclass(field.type)]
    return {field.name for field in fields(config)}.union(*inner)
