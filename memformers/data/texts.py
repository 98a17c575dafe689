"""Texts and documents from bytes, files, folders, JSON lines, and between the separators of one text."""

import codecs
import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from memformers.common.errors import UserError
from memformers.data.files import blocks_of, plain_name
from memformers.runs.folder import CONFIG, EXPERIMENT, FACTS

JSON_LINES = ".jsonl"
NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""What bytes that are not UTF-8 become in a text."""
NAMED = 5
"""How many of the skipped files a message names."""


def text_of(raw: bytes) -> str:
    """The text of UTF-8 ``raw``, line ends as they are, without a byte order mark. Bytes that are not UTF-8
    become lone surrogates, which [`bytes_of`][] converts back; a model of bytes reads them like all
    others."""
    return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")


def bytes_of(text: str) -> bytes:
    """The bytes from which [`text_of`][] made ``text``."""
    return text.encode("utf-8", errors="surrogateescape")


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file, decompressed where its name says so, or of standard input for ``-``; UserError if
    it can't be read."""
    try:
        return sys.stdin.buffer.read() if path == "-" else b"".join(blocks_of(Path(path)))
    except OSError as error:
        refuse(error, path)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for ``-``; UserError if it can't be read."""
    return text_of(read_bytes(path))


def refuse(error: OSError, path: str | Path = "") -> NoReturn:
    """Raise UserError for a file or folder that can't be read."""
    raise UserError(
        f"{path or error.filename} can't be read: {error.strerror}; name a text file, a folder of texts or a "
        f"file of JSON lines."
    ) from None


def check_utf8(text: str, source: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, since they are not characters."""
    if found := NOT_UTF8.search(text):
        at = len(bytes_of(text[: found.start()]))
        raise UserError(
            f"{source} is not UTF-8 text: byte {ord(found[0]) - 0xDC00:#04x} at offset {at}; convert it to "
            f"UTF-8 first, or use tokenizer='byte'."
        )


@dataclass(frozen=True)
class Document:
    """An independent text: the texts before it don't help to predict it."""

    name: str
    """The name of its file, and its place there if the file has several."""
    text: str


def read_text_or_documents(path: str) -> str | list[Document]:
    """The documents in a folder, or in a file of JSON lines; else the text of the file, or of standard input
    for ``-``. Raises UserError as [`read_documents`][] and [`read_text`][]."""
    if path and path != "-" and Path(path).is_dir():
        return read_documents(Path(path))
    raw = read_bytes(path)
    if are_json_lines(path, raw):
        return with_text(list(json_lines(raw, Path(path).name)), path)
    return text_of(raw)


def read_documents(folder: Path) -> list[Document]:
    """The documents in a folder: its files and those of all its sub-folders, in the order of their paths;
    hidden ones and folders of runs are ignored. A file of JSON lines has one document per line; any other
    file is one document. Files that aren't UTF-8, folders of runs and documents without text are skipped,
    with a warning.

    Raises UserError if nothing is left, for a file or sub-folder that can't be read, and for a line of JSON
    that isn't an object with a "text".
    """
    files, runs = files_below(folder)
    found: list[Document] = []
    skipped = []
    for name, file in sorted(files.items()):
        raw = read_bytes(file)
        if are_json_lines(name, raw):
            found += json_lines(raw, name)
        elif NOT_UTF8.search(text := text_of(raw)):
            skipped.append(name)
        else:
            found.append(Document(name, text))
    for names, what in ((skipped, "not UTF-8 and"), (runs, "folders of runs are")):
        if names:
            warnings.warn(f"{folder}: {what} left out: {some_of(names)}.", stacklevel=2)
    if not found:
        raise UserError(
            f"{folder} is a folder without any file of UTF-8 text; name a text file, a folder of texts or a "
            f"file of JSON lines ({JSON_LINES})."
        )
    return with_text(found, str(folder))


def divided(read: str | Sequence[object], separator: str, source: str) -> list[Document]:
    """The documents between the ``separator`` in a text, without it; what follows the last one is a document
    if it has text. Raises UserError where the separator doesn't occur, and for what consists of documents."""
    if not isinstance(read, str):
        raise UserError(
            f"document_separator={separator!r} divides a single text, but {source} consists of documents "
            f"already; leave it out."
        )
    parts = read.split(separator)
    if len(parts) == 1:
        raise UserError(
            f"document_separator={separator!r} doesn't occur in {source}; give the text between its "
            f"documents (a line break is written as $'\\n' in a shell), or leave it out."
        )
    if not parts[-1].strip():
        parts.pop()
    return with_text([Document(f"{source}:{n}", part) for n, part in enumerate(parts, 1)], source)


def are_json_lines(name: str, raw: bytes) -> bool:
    """Whether a file has a document per line: one with this ending, or a .json file that begins so; any of
    them may be compressed."""
    name = plain_name(name)
    if name.lower().endswith(".json"):
        with contextlib.suppress(UserError):
            text_of_line(raw.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0], name)
            return True
    return name.lower().endswith(JSON_LINES)


def json_lines(raw: bytes, source: str) -> Iterator[Document]:
    """The documents in a file of JSON lines, each an object with a "text"; blank lines are skipped."""
    for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            yield Document(name := f"{source}:{number}", text_of_line(line, name))


def text_of_line(line: bytes, name: str) -> str:
    """The "text" of a line of JSON; UserError, which begins with the line's ``name``, where it has none."""
    reason = ""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        value, reason = None, f" ({str(error).partition(':')[0]})"
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        shown = line.decode("utf-8", errors="replace").strip()
        got = repr(shown if len(shown) <= 40 else f"{shown[:40]}…") + reason
        raise UserError(
            f'{name}: expected a JSON object with a string "text", got {got}; correct or remove the line.'
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(
            f"{name}: the text has half of a surrogate pair (\\ud800 to \\udfff), which is not a character; "
            f"correct or remove the line."
        )
    return text


def with_text(documents: Sequence[Document], source: str) -> list[Document]:
    """The ``documents`` that aren't blank, with a warning that names the others; UserError if all are
    blank."""
    blank = [document.name for document in documents if not document.text.strip()]
    if len(blank) == len(documents):
        raise UserError(f"{source} contains no text; name another file or folder.")
    if blank:
        warnings.warn(f"{source}: documents without text are left out: {some_of(blank)}.", stacklevel=3)
    return [document for document in documents if document.text.strip()]


def files_below(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """By their paths in ``folder``: all files there and in its sub-folders; and the sub-folders that hold a
    run or an experiment, which are not searched, since a training may write into the folder of its own texts.
    Hidden ones are left out. Raises UserError for a sub-folder that can't be read."""
    files: dict[str, Path] = {}
    runs: list[str] = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        inside = {name: Path(where, name) for name in (*folders, *names) if not name.startswith(".")}
        of_runs = [name for name in folders if name in inside and holds_run(inside[name])]
        folders[:] = [name for name in folders if name in inside and name not in of_runs]
        runs += [inside[name].relative_to(folder).as_posix() for name in of_runs]
        there = [inside[name] for name in names if name in inside and inside[name].is_file()]
        files |= {path.relative_to(folder).as_posix(): path for path in there}
    return files, sorted(runs)


def holds_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run or of an experiment."""
    return (folder / EXPERIMENT).is_file() or all((folder / name).is_file() for name in (CONFIG, FACTS))


def some_of(names: Sequence[str]) -> str:
    """The first of ``names``, and how many others there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
