"""From files to one text: texts, JSON lines, tables and what is between separators, read into one file of
UTF-8, in constant memory."""

import codecs
import contextlib
import hashlib
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memformers.common.errors import UserError
from memformers.data.files import STDIN, SeveralFiles, blocks_of, lines_of, parts_of, plain_name
from memformers.data.ids import Ids, as_bytes, checked, documents_in, ids_in, meta_beside
from memformers.data.sources import CorpusSpec, Part, Sources, some_of
from memformers.data.utf8 import as_utf8, bytes_of, not_text, text_of

MARK = 4 << 20
"""Bytes between two places of a text that are known in bytes and in characters."""
MOST_NAMES = 100_000
"""Documents of which the names are kept."""
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".csv")


class Text:
    """A text in UTF-8, or token ids of four bytes, in a new file, and where its splits and documents end."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "wb")  # noqa: SIM115
        self.bytes = self.characters = 0
        self.marks: list[tuple[int, int]] = [(0, 0)]
        """Some of its places, in bytes and in characters."""
        self.ends, self.lengths = array("q"), array("q")
        """Where each document, or file, ends, in bytes, and how many characters it has."""
        self.names: list[str] = []
        """The first [`MOST_NAMES`][] of them."""
        self.are_documents = self.are_ids = False
        """Whether these are documents, not files of a plain text, and whether characters are token ids."""
        self.vocabulary: tuple[int | None, str] = (None, "")
        """How many ids there are, and which characters they are, if that is known."""
        self.splits: dict[str, int] = {}
        """Where each split ends, in bytes; one without a name is to be divided."""
        self.left_out: dict[str, list[str]] = {}
        """The names of what is not read, by the reason."""
        self.bad = ""
        """What is not UTF-8 first, and where, in words."""
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The checksum of the text and of the ends of its documents, if it has any; in hexadecimal."""
        if not self.are_documents:
            return self._hash.hexdigest()
        return hashlib.sha256(self._hash.digest() + repr(tuple(self.lengths)).encode()).hexdigest()

    def add(self, name: str, blocks: Iterable[bytes], *, is_document: bool, keep_bad: bool = True) -> None:
        """Append the text in ``blocks``, unless it is blank, or not UTF-8 where that isn't kept."""
        start, characters, marks, digest = self.bytes, self.characters, len(self.marks), self._hash.copy()
        decoder, blank, bad = codecs.getincrementaldecoder("utf-8")(), True, ""
        for block in chain(filter(None, blocks), [b""]):
            pending = decoder.getstate()[0]
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = self.bytes - start - len(pending) + error.start
                bad = f"byte {error.object[error.start]:#04x} at offset {at} of {name}"
                decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
                text = decoder.decode(pending + block, final=not block)
            blank = blank and not text.strip()
            self._write(block, len(text))
            if self.bytes - self.marks[-1][0] > MARK and not decoder.getstate()[0]:
                self.marks.append((self.bytes, self.characters))
        if blank or (bad and not keep_bad):
            self.bytes, self.characters, self._hash = start, characters, digest
            del self.marks[marks:]
            self.file.seek(start)
            self.file.truncate()
            self.leave_out(name, "documents without text are" if blank else "not UTF-8 and")
        else:
            self.bad = self.bad or bad
            self._end(name, characters, is_document)

    def add_ids(self, name: str, ids: Ids, *, is_document: bool) -> None:
        """Append token ``ids [n]``."""
        characters, self.are_ids = self.characters, True
        for block in as_bytes(ids, name):
            self._write(block, len(block) // 4)
        self._end(name, characters, is_document)

    def _write(self, block: bytes, characters: int) -> None:
        self.file.write(block)
        self._hash.update(block)
        self.bytes, self.characters = self.bytes + len(block), self.characters + characters

    def _end(self, name: str, begin: int, is_document: bool) -> None:
        self.are_documents = self.are_documents or is_document
        self.ends.append(self.bytes)
        self.lengths.append(self.characters - begin)
        if len(self.names) < MOST_NAMES:
            self.names.append(name)

    def leave_out(self, name: str, why: str) -> None:
        """Note what is not read."""
        self.left_out.setdefault(why, []).append(name)

    def add_divided(self, name: str, blocks: Iterable[bytes], separator: str) -> None:
        """Append the documents between the ``separator`` in a text, without it; what follows the last one is
        a document if it has text. Raises UserError where the separator doesn't occur."""
        parts, number = parts_of(blocks, bytes_of(separator)), 0

        def until_end(part: bytes, is_end: bool) -> Iterator[bytes]:
            yield part
            while not is_end:
                part, is_end = next(parts)
                yield part

        for number, (part, is_end) in enumerate(parts, 1):
            self.add(f"{name}:{number}", until_end(part, is_end), is_document=True)
        if number == 1:
            raise UserError(
                f"document_separator={separator!r} doesn't occur in {name}; give the text between its "
                f"documents (a line break is written as $'\\n' in a shell), or leave it out."
            )
        for names in self.left_out.values():
            if names[-1:] == [f"{name}:{number}"]:  # what follows the last separator
                names.pop()

    def place(self, character: int) -> int:
        """Where a character begins, in bytes, in the file."""
        if self.are_ids:
            return 4 * character
        at, before = max(mark for mark in self.marks if mark[1] <= character)
        with open(self.path, "rb") as file:
            file.seek(at)
            text = file.read(4 * (character - before)).decode("utf-8", errors="surrogateescape")
        return at + len(bytes_of(text[: character - before]))


def read(sources: Sources, spec: CorpusSpec, path: Path, progress: Callable[[int], object]) -> Text:
    """The text or documents of ``sources`` in a new file ``path``. A file of JSON lines or a table has one
    document per line, and any other file of a folder is one document. Documents without text and, in a
    folder, files that are no text are left out, with a warning. ``progress`` gets the number of bytes that
    were read.

    Raises UserError where nothing is left, for what can't be read, for a line without a text, and for a
    separator in a text that consists of documents."""
    text = Text(path)
    of_ids = {part.has_ids and spec.tokenizer != "byte": part.name for part in sources.parts}
    if len(of_ids) > 1:
        raise UserError(f"{of_ids[True]} holds token ids, and {of_ids[False]} a text; name one kind alone.")
    with text.file:
        for part in sources.parts:
            (read_ids if True in of_ids else read_part)(text, part, spec, progress)
            text.splits[part.split] = text.bytes
    if not text.bytes:
        raise UserError(f"{sources.source} contains no text; name another file or folder.")
    for why, names in (sources.left_out | text.left_out).items():
        if names:
            warnings.warn(f"{sources.source}: {why} left out: {some_of(names)}.", stacklevel=3)
    if text.bad and spec.tokenizer in ("character", "frequency", "word"):
        raise UserError(
            f"{sources.source} is not UTF-8 text: {text.bad}; convert it to UTF-8 first, or use "
            f"tokenizer='byte'."
        )
    return text


def read_ids(text: Text, part: Part, spec: CorpusSpec, progress: Callable[[int], object]) -> None:
    """Append the token ids of a file, or those that a program has."""
    if spec.document_separator or spec.tokenizer in ("frequency", "word"):
        raise UserError(
            f"{part.name} holds token ids, which are not divided again; leave out document_separator and "
            f"tokenizer, or name the tokenizer.json that they were made with."
        )
    if not isinstance(part.file, Path):
        text.add_ids(part.name, checked(part.file, part.name), is_document=part.is_document)
        return
    ids = ids_in(part.file)
    if None in text.vocabulary:
        text.vocabulary = meta_beside(part.file)
    documents = documents_in(ids, part.file)
    for number, document in enumerate(documents or [ids], 1):
        name = f"{part.name}:{number}" if documents else part.name
        text.add_ids(name, document, is_document=part.is_document or bool(documents))
    progress(part.file.stat().st_size)


def read_part(text: Text, part: Part, spec: CorpusSpec, progress: Callable[[int], object]) -> None:
    """Append the text of a file: as one document, as several, or as a plain text."""
    _, name, file, is_document = part
    assert not isinstance(file, np.ndarray)
    named, separator, blocks = plain_name(name).lower(), spec.document_separator, blocks_of(file, progress)
    documents = None
    if named.endswith(TABLES) and spec.tokenizer != "byte" and isinstance(file, Path):
        documents = texts_of_table(file, spec.text_field)
    else:
        try:
            head = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
        except SeveralFiles:
            if not is_document:
                raise
            return text.leave_out(f"{name} (not one file, but several)", "not text and")
        if spec.tokenizer != "byte":  # which was asked for bytes, and gets them
            head, blocks = as_utf8(head, blocks)
            if kind := not_text(head):
                if not is_document:
                    raise UserError(f"{file!s} looks like {kind}, or read its bytes with tokenizer='byte'.")
                return text.leave_out(f"{name} ({kind.partition(';')[0]})", "not text and")
        blocks = chain([head], blocks)
        if has_documents(named, head, spec.text_field):
            documents = texts_of_json(blocks, name, spec.text_field)
    if separator and (documents or is_document):
        raise UserError(
            f"document_separator={separator!r} divides a single text, but {name} consists of documents "
            f"already, or is one; leave it out."
        )
    if documents:
        for place, document in documents:
            text.add(place, [document.encode()], is_document=True)
    elif separator:
        text.add_divided(name, blocks, separator)
    else:
        text.add(name, blocks, is_document=is_document, keep_bad=not is_document)
    return None


def has_documents(name: str, begin: bytes, text_field: str) -> bool:
    """Whether a file has a document per line, or per element of one JSON array: one with such an ending, or a
    .json file that begins so."""
    if name.endswith(".json"):
        with contextlib.suppress(UserError):
            if not is_array(begin.lstrip()):
                text_in(begin.lstrip().partition(b"\n")[0], name, text_field)
            return True
    return name.endswith(JSON_LINES)


def is_array(begin: bytes) -> bool:
    """Whether JSON that begins so is an array of objects."""
    return begin.startswith(b"[") and begin[1:].lstrip().startswith(b"{")


def texts_of_json(blocks: Iterator[bytes], name: str, text_field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each document in a file of JSON lines, or of one array, which must fit into
    a line's length. Raises UserError, which names the place, for what has no text."""
    head = next(blocks, b"")
    if not is_array(head.lstrip()):
        for number, line in enumerate(lines_of(chain([head], blocks), name), 1):
            if line.strip():
                yield f"{name}:{number}", text_in(line, f"{name}:{number}", text_field)
        return
    (whole,) = lines_of((block.replace(b"\n", b" ") for block in chain([head], blocks)), name)
    try:
        elements = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected a JSON array of objects, got {error}; correct it.") from None
    for number, element in enumerate(elements, 1):
        place = f"{name}, element {number}"
        yield place, text_in(element, place, text_field)


def text_in(value: Any, name: str, text_field: str) -> str:
    """The text in the field of this name of a JSON object, or of a line that holds one; UserError, which
    begins with the ``name`` of the place, where it has none."""
    reason, shown = "", value
    if isinstance(value, bytes):
        shown = value.decode("utf-8", errors="replace").strip()
        try:
            value = json.loads(value.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            value, reason = None, f" ({str(error).partition(':')[0]})"
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        shown = shown if isinstance(shown, str) else json.dumps(shown)
        got = repr(shown if len(shown) <= 40 else f"{shown[:40]}…") + reason
        raise UserError(
            f'{name}: expected a JSON object with a string "{text_field}", got {got}; correct or remove it, '
            f"or name another field with text_field."
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(
            f"{name}: the text has half of a surrogate pair (\\ud800 to \\udfff), which is not a character; "
            f"correct or remove the line."
        )
    return text


def texts_of_table(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of a table, from the column of this name, by pyarrow. Raises
    UserError, which names the place, for what has no text."""
    try:
        from pyarrow import ArrowException, csv, parquet, string
    except ImportError:
        raise UserError(
            f"{path} is a table, which pyarrow reads: pip install 'memformers-torch[tables]'; or end its "
            f"name with .txt to read it as a text."
        ) from None
    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            batches = parquet.ParquetFile(path).iter_batches(columns=[text_field])
        else:
            convert = csv.ConvertOptions(include_columns=[text_field], column_types={text_field: string()})
            parse = csv.ParseOptions(newlines_in_values=True)
            batches = csv.open_csv(path, parse_options=parse, convert_options=convert)
        for batch in batches:
            for value in batch.column(text_field).to_pylist():
                number += 1
                if not isinstance(value, str):
                    raise UserError(
                        f"{path}, row {number}: expected a text as {text_field!r}, got {value!r}."
                    )
                yield f"{path.name}:{number}", value
    except (ArrowException, KeyError, OSError) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"{path}: the column {text_field!r} can't be read after row {number:,}: {words}; name a column "
            f"of texts with text_field."
        ) from None


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``; UserError if it can't be read."""
    blocks = blocks_of(STDIN if name == "-" else Path(name))
    head, blocks = as_utf8(next(blocks, b""), blocks)
    return text_of(b"".join(chain([head], blocks)))
