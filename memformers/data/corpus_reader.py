"""From files to one text: texts, JSON lines, tables and what is between separators, read into one file of
UTF-8, in constant memory; or from token ids to one file of these."""

import codecs
import csv
import hashlib
import json
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memformers.common.files import user_path
from memformers.common.text import UserError
from memformers.data.files import (
    MAX_RECORD,
    STDIN,
    Ids,
    NotText,
    SeveralFiles,
    as_bytes,
    blocks_of,
    bytes_as_text,
    bytes_of,
    ids_in,
    plain_name,
    split_at,
    texts_in,
)
from memformers.data.sources import CorpusSpec, Part, Sources, some_of

MAX_NAMES = 100_000
"""Documents of which the names are kept."""
NOT_CHARACTERS = re.compile("[\0\ud800-\udfff]")
DELIMITERS = ",;\t"
"""Between the columns of a table."""
JSON = (".jsonl", ".ndjson", ".json")


class Text:
    """A text in UTF-8, or token ids of four bytes, in a new file, and where its splits and documents end."""

    def __init__(self, path: Path, progress: Callable[[int], object]):
        self.path, self._progress = path, progress
        self.file = open(path, "wb")  # noqa: SIM115
        self.bytes = self.characters = 0
        self.ends, self.lengths = array("q"), array("q")
        """Where each document, or file, ends, in bytes, and how many characters it has."""
        self.names: list[str] = []
        """The first [`MAX_NAMES`][] of them."""
        self.are_documents = self.are_ids = False
        """Whether these are documents, not files of a plain text, and whether characters are token ids."""
        self.splits: dict[str, int] = {}
        """Where each split ends, in bytes; one without a name is to be divided."""
        self.left_out: dict[str, list[str]] = {}
        """The names of what is not read, by the reason."""
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The checksum of the text and of the ends of its documents, if it has any; in hexadecimal."""
        if not self.are_documents:
            return self._hash.hexdigest()
        return hashlib.sha256(self._hash.digest() + repr(tuple(self.lengths)).encode()).hexdigest()

    def add(self, name: str, texts: Iterable[str], *, is_document: bool) -> None:
        """Append the text in ``texts``, unless it is blank; nothing of it if that fails."""
        start, before, digest, blank = self.bytes, self.characters, self._hash.copy(), True
        try:
            for text in texts:
                blank = blank and not text.strip()
                self._write(bytes_of(text), len(text))
        except NotText:
            self._forget(start, before, digest)
            raise
        if not blank:
            return self._end(name, before, is_document)
        self._forget(start, before, digest)
        return self.leave_out(name, "documents without text are")

    def _forget(self, start: int, characters: int, digest: Any) -> None:
        self.bytes, self.characters, self._hash = start, characters, digest
        self.file.seek(start)
        self.file.truncate()

    def add_ids(self, name: str, ids: Ids, *, is_document: bool) -> None:
        before, self.are_ids = self.characters, True
        for block in as_bytes(ids, name):
            self._write(block, len(block) // 4)
        self._end(name, before, is_document)

    def _write(self, block: bytes, characters: int) -> None:
        self.file.write(block)
        self._hash.update(block)
        self._progress(len(block))
        self.bytes, self.characters = self.bytes + len(block), self.characters + characters

    def _end(self, name: str, before: int, is_document: bool) -> None:
        self.are_documents = self.are_documents or is_document
        self.ends.append(self.bytes)
        self.lengths.append(self.characters - before)
        if len(self.names) < MAX_NAMES:
            self.names.append(name)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.setdefault(why, []).append(name)

    def place(self, character: int) -> int:
        """Where a character begins, in bytes, in the file."""
        if self.are_ids:
            return 4 * character
        decoder, at = codecs.getincrementaldecoder("utf-8")("surrogateescape"), 0
        for block in blocks_of(self.path):
            text = decoder.decode(block)
            if len(text) > character:
                return at + len(bytes_of(text[:character]))
            at, character = at + len(bytes_of(text)), character - len(text)
        return self.bytes


def read(sources: Sources, spec: CorpusSpec, path: Path, progress: Callable[[int], object]) -> Text:
    """The text or documents of ``sources`` in a new file ``path``. A file of JSON lines or a table has one
    document per line, and any other file of a folder is one document. Documents without text and, in a
    folder, files that are no text are left out, with a warning. ``progress`` gets the number of bytes that
    were read.

    Raises UserError where nothing is left, for what can't be read, for a line without a text, and for a
    separator in a text that consists of documents."""
    text = Text(path, progress)
    of_ids = {part.has_ids and spec.tokenizer != "byte": part.name for part in sources.parts}
    if len(of_ids) > 1:
        raise UserError(f"{of_ids[True]} holds token ids, and {of_ids[False]} a text; name one kind alone.")
    with text.file:
        for part in sources.parts:
            (read_ids if True in of_ids else read_part)(text, part, spec)
            text.splits[part.split] = text.bytes
    if not text.bytes:
        raise UserError(f"{sources.source} contains no text; name another file or folder.")
    for why, names in (sources.left_out | text.left_out).items():
        if names:
            warnings.warn(f"{sources.source}: {why} left out: {some_of(names)}.", stacklevel=3)
    return text


def read_ids(text: Text, part: Part, spec: CorpusSpec) -> None:
    if spec.document_separator or spec.tokenizer in ("frequency", "word"):
        raise UserError(
            f"{part.name} holds token ids, which are not divided again; leave out document_separator and "
            f"tokenizer, or name the tokenizer.json that they were made with."
        )
    assert not isinstance(part.file, bytes)
    ids, documents = ids_in(part.file, part.name, spec.vocab_size)
    for number, document in enumerate(documents or [ids], 1):
        name = f"{part.name}:{number}" if documents else part.name
        text.add_ids(name, document, is_document=part.is_document or bool(documents))


def read_part(text: Text, part: Part, spec: CorpusSpec) -> None:
    """Append the text of a file: as one document, as several, or as a plain text."""
    _, name, file, is_document = part
    assert not isinstance(file, np.ndarray)
    separator, of_bytes, named = spec.document_separator, spec.tokenizer == "byte", plain_name(name).lower()
    documents: Iterable[tuple[str, str]] | None = None
    label = name if isinstance(file, bytes) else str(file)
    texts = bytes_as_text(blocks_of(file)) if of_bytes else texts_in(blocks_of(file), label)
    try:
        if named.endswith(".parquet") and isinstance(file, Path):
            documents = texts_of_parquet(file, spec.text_field)
        elif named.endswith(".csv"):
            documents = texts_of_csv(texts, label, spec.text_field)
        elif named.endswith(JSON):
            head = next(texts)
            documents = texts_of_json(head, texts := chain([head], texts), name, spec.text_field)
        if separator and (documents or is_document):
            raise UserError(
                f"document_separator={separator!r} divides a single text, but {name} consists of documents "
                f"already, or is one; leave it out."
            )
        if separator:
            documents = texts_between(separator, texts, name)
        elif not documents:
            return text.add(name, texts, is_document=is_document)
    except (NotText, SeveralFiles) as error:
        if not is_document:
            raise
        return text.leave_out(f"{name} ({error.where})", "not text and")
    for place, document in documents:
        text.add(place, [document], is_document=True)
    return None


def parts_between(separator: bytes, texts: Iterable[str], name: str) -> Iterator[str]:
    """What is between the ``separator`` in ``texts``, as by [`split_at`][]."""
    parts = split_at(separator, map(bytes_of, texts), name)
    return (part.decode("utf-8", "surrogateescape") for part in parts)


def texts_between(separator: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each document between the ``separator``; what follows the last one is a
    document if it has text. Raises UserError where the separator doesn't occur."""
    number, last = 0, ""
    for number, document in enumerate(parts_between(bytes_of(separator), texts, name), 1):
        if number > 1:
            yield f"{name}:{number - 1}", last
        last = document
    if number == 1:
        raise UserError(
            f"document_separator={separator!r} doesn't occur in {name}; give the text between its documents "
            f"(a line break is written as $'\\n' in a shell), or leave it out."
        )
    if last.strip():
        yield f"{name}:{number}", last


def texts_of_json(head: str, texts: Iterable[str], name: str, field: str) -> Iterator[tuple[str, str]] | None:
    """The place and the text of each document in ``texts``, which start with ``head``: of a file of JSON
    lines, or of one array; None for a .json file of another form, unless ``field`` asks for documents.
    UserError, which names the place, for what has no text."""
    start = head.lstrip()
    if start.startswith("[") and start[1:].lstrip().startswith("{"):
        return ((place, text_in(value, place, field)) for place, value in elements_of(texts, name))
    if plain_name(name).lower().endswith(".json"):
        try:
            is_object = isinstance(json.loads(start.partition("\n")[0]), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object and field == CorpusSpec().text_field:
            return None
    lines = enumerate(parts_between(b"\n", texts, name), 1)
    return ((f"{name}:{n}", text_in(line, f"{name}:{n}", field)) for n, line in lines if line.strip())


def elements_of(texts: Iterable[str], name: str) -> Iterator[tuple[str, Any]]:
    """The place and the value of each element of a JSON array, which must fit into memory."""
    whole = bytearray()
    for text in texts:
        whole += bytes_of(text)
        if len(whole) > MAX_RECORD:
            raise UserError(f"{name}: expected an array of at most {MAX_RECORD >> 20} MiB; write JSON lines.")
    try:
        elements = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected a JSON array of objects, got {error}; correct it.") from None
    yield from ((f"{name}, element {number}", element) for number, element in enumerate(elements, 1))


def text_in(value: Any, place: str, field: str) -> str:
    """The text in the ``field`` of a JSON object, or of a line that contains one; UserError, which starts
    with the ``place``, where it has none."""
    reason, shown = "", value
    if isinstance(value, str):
        shown = value.strip()
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            value, reason = None, f" ({str(error).partition(':')[0]})"
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        shown = shown if isinstance(shown, str) else json.dumps(shown)
        got = repr(shown if len(shown) <= 40 else f"{shown[:40]}…") + reason
        raise UserError(
            f'{place}: expected a JSON object with a string "{field}", got {got}; correct or remove it, or '
            f"name another field with text_field."
        )
    return checked(text, place)


def checked(text: str, place: str) -> str:
    """The text of a document; UserError, which starts with the ``place``, for what is not a character."""
    if wrong := NOT_CHARACTERS.search(text):
        raise UserError(
            f"{place}: expected text, got U+{ord(wrong[0]):04X}, which is no character; remove it."
        )
    return text


def lines_of(texts: Iterable[str], name: str) -> Iterator[str]:
    """The lines of ``texts``, each with its end; UserError for one that is longer than [`MAX_RECORD`][]."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
        if len(rest) > MAX_RECORD:
            raise UserError(f"{name}: expected lines of at most {MAX_RECORD >> 20} MiB, got more; divide it.")
    yield rest


def texts_of_csv(texts: Iterable[str], name: str, field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of a table, whose first row names its columns, between commas,
    semicolons or tabs, from the column ``field``. UserError, which names the place, for what has no text."""
    csv.field_size_limit(MAX_RECORD)
    lines, number = lines_of(texts, name), 0
    first = next(lines)
    heads = {mark: next(csv.reader([first], delimiter=mark), []) for mark in DELIMITERS}
    mark = next((mark for mark, columns in heads.items() if field in columns), "")
    if not mark:
        raise UserError(
            f"{name}: expected the first row to name a column {field!r}, got {first.strip()[:99]!r}; name a "
            f"column of texts with text_field."
        )
    try:
        for number, row in enumerate(csv.reader(lines, delimiter=mark, strict=True), 1):
            if row and len(row) != len(heads[mark]):
                raise csv.Error(f"expected {len(heads[mark])} columns, got {len(row)}")
            if row:  # else a line that is blank
                text = row[heads[mark].index(field)]
                yield f"{Path(name).name}:{number}", checked(text, f"{name}, row {number}")
    except csv.Error as error:
        raise UserError(
            f"{name}: the row after row {number - 1:,} can't be read: {error}; correct it."
        ) from None


def texts_of_parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of a table, from the column ``field``, by pyarrow. Raises UserError,
    which names the place, for what has no text."""
    if path.suffix.lower() != ".parquet":
        raise UserError(f"{path} is a compressed table, which can't be read in part; decompress it.")
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path} is a table that pyarrow reads: pip install pyarrow.") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(columns=[field]):
            for value in batch.column(field).to_pylist():
                number += 1
                if not isinstance(value, str):
                    raise UserError(f"{path}, row {number}: expected a text as {field!r}, got {value!r}.")
                yield f"{path.name}:{number}", checked(value, f"{path}, row {number}")
    except (ArrowException, KeyError, OSError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{path}: the column {field!r} can't be read after row {number:,}: {why}; name a column of texts "
            f"with text_field."
        ) from None


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``, or its bytes as text if it is none; UserError if it
    can't be read."""
    blocks = list(blocks_of(STDIN if name == "-" else user_path(name)))
    try:
        return "".join(texts_in(blocks, name))
    except NotText:
        return "".join(bytes_as_text(blocks))
