"""Text from bytes and from lines of JSON, and the files of a folder that hold texts."""

import codecs
import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.data.files import blocks_of, lines_of, plain_name, refuse
from memformers.data.kinds import as_utf8
from memformers.runs.folder import CONFIG, EXPERIMENT, FACTS

STORE = ("card.json", "tokenizer.json")
"""Files that every folder of tokens has."""
JSON_LINES = (".jsonl", ".ndjson")
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


def read_text(path: str) -> str:
    """The text of a file, or of standard input for ``-``; UserError if it can't be read."""
    blocks = blocks_of(Path(path))
    head, blocks = as_utf8(next(blocks, b""), blocks)
    return text_of(b"".join(chain([head], blocks)))


def check_utf8(text: str, source: str) -> None:
    """Raise UserError for a text with bytes that are not UTF-8, since they are not characters."""
    if found := NOT_UTF8.search(text):
        at = len(bytes_of(text[: found.start()]))
        raise UserError(
            f"{source} is not UTF-8 text: byte {ord(found[0]) - 0xDC00:#04x} at offset {at}; convert it to "
            f"UTF-8 first, or use tokenizer='byte'."
        )


def are_json_lines(name: str, raw: bytes) -> bool:
    """Whether a file has a document per line, or per element of one JSON array: one with such an ending, or a
    .json file that begins so; any of them may be compressed."""
    name, begin = plain_name(name), raw.lstrip()
    if name.lower().endswith(".json"):
        with contextlib.suppress(UserError):
            if not is_array(begin):
                text_of_line(begin.partition(b"\n")[0], name)
            return True
    return name.lower().endswith(JSON_LINES)


def is_array(begin: bytes) -> bool:
    """Whether JSON that begins so is an array of objects."""
    return begin.startswith(b"[") and begin[1:].lstrip().startswith(b"{")


def texts_of_json(blocks: Iterator[bytes], name: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each document in a file of JSON lines, or of one array, which must fit into
    a line's length. Raises UserError, which names the place, for what has no text."""
    head = next(blocks, b"")
    if not is_array(head.lstrip()):
        for number, line in enumerate(lines_of(chain([head], blocks), name), 1):
            if line.strip():
                yield f"{name}:{number}", text_of_line(line, f"{name}:{number}")
        return
    (whole,) = lines_of((block.replace(b"\n", b" ") for block in chain([head], blocks)), name)
    try:
        elements = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected a JSON array of objects, got {error}; correct it.") from None
    for number, element in enumerate(elements, 1):
        place = f"{name}, element {number}"
        yield place, text_of_value(element, place, json.dumps(element))


def text_of_line(line: bytes, name: str) -> str:
    """The "text" of a line of JSON; UserError, which begins with the line's ``name``, where it has none."""
    reason = ""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        value, reason = None, f" ({str(error).partition(':')[0]})"
    return text_of_value(value, name, line.decode("utf-8", errors="replace").strip(), reason)


def text_of_value(value: Any, name: str, shown: str, reason: str = "") -> str:
    """The "text" of a ``value`` that JSON ``shown`` stands for; UserError where it has none."""
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
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


def files_below(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """By their paths in ``folder``: all files there and in its sub-folders; and the sub-folders that hold a
    run, an experiment or tokens, which are not searched: a command may write into the folder of its texts.
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
    """Whether ``folder`` is that of a run, of an experiment or of tokens."""
    return any(all((folder / name).is_file() for name in n) for n in ((EXPERIMENT,), (CONFIG, FACTS), STORE))


def some_of(names: Sequence[str]) -> str:
    """The first of ``names``, and how many others there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
