"""From files to one, of UTF-8 or token ids, in constant memory: texts, JSON, tables, divided texts."""

import codecs
import csv
import hashlib
import json
import re
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from memformers.common.errors import UserError
from memformers.common.files import user_path
from memformers.data.files import (
    BLOCK,
    STDIN,
    Archive,
    Ids,
    NotText,
    blocks_of,
    bytes_as_text,
    bytes_of,
    ids_in,
    plain_name,
    texts_in,
)
from memformers.data.sources import CorpusSpec, Part, Sources, some_of

MAX_RECORD = 256_000_000
"""Characters of a line of JSON, an array, or a document between separators, which must fit into memory."""
MAX_IDS = 1 << 32
MAX_NAMES = 100_000  # documents of which the names are kept
NOT_CHARACTERS = re.compile("[\0\ud800-\udfff]")
DELIMITERS = ",;\t"  # between the columns of a table
JSON = (".jsonl", ".ndjson", ".json")


class Text:
    """A text in UTF-8, or token ids of four bytes, in a new file, and where its splits and documents end."""

    def __init__(self, path: Path, progress: Callable[[int], object]):
        self.path, self._progress = path, progress
        self.file = open(path, "wb")  # noqa: SIM115
        self.bytes = self.characters = 0
        # Where each document, or file, ends, in bytes; how many characters it has; the first MAX_NAMES names.
        self.ends, self.lengths, self.names = array("q"), array("q"), list[str]()
        self.are_documents = self.are_ids = False
        self.splits: dict[str, int] = {}  # where each ends, in bytes; one without a name is to be divided
        self.left_out: dict[str, list[str]] = defaultdict(list)  # names of what is not read, by the reason
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        if not self.are_documents:
            return self._hash.hexdigest()
        return hashlib.sha256(self._hash.digest() + repr(tuple(self.lengths)).encode()).hexdigest()

    def add(self, name: str, texts: Iterable[str], *, is_document: bool) -> None:
        """Append the text in ``texts``, unless it is blank; nothing of it if that fails."""
        before, is_blank = (self.bytes, self.characters, self._hash.copy()), True
        try:
            for text in texts:
                is_blank = is_blank and not text.strip()
                self._write(bytes_of(text), len(text))
            if is_blank:
                self.left_out["documents without text are"].append(name)
            else:
                self._end(name, before[1], is_document)
        except NotText:
            is_blank = True
            raise
        finally:
            if is_blank:
                self.bytes, self.characters, self._hash = before
                self.file.seek(self.bytes)
                self.file.truncate()

    def add_ids(self, name: str, ids: Ids, *, is_document: bool) -> None:
        before, self.are_ids = self.characters, True
        for start in range(0, len(ids), BLOCK // 4):
            block = ids[start : start + BLOCK // 4]
            if wrong := [i for i in (block.min(), block.max()) if not 0 <= i < MAX_IDS]:
                raise UserError(f"{name}: expected token ids from 0 to {MAX_IDS - 1:,}, got {wrong[0]:,}.")
            self._write(block.astype("<u4").tobytes(), len(block))
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

    def place_of(self, character: int) -> int:
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
    """``sources`` in a new file ``path``. Documents without text and, in a folder, files that are no text are
    left out, with a warning. ``progress`` gets numbers of bytes."""
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
        raise UserError(f"{part.name} holds token ids already; omit tokenizer and document_separator.")
    assert not isinstance(part.file, bytes)
    ids, lengths = ids_in(part.file, part.name, spec.vocab_size)
    if not len(lengths):
        text.add_ids(part.name, ids, is_document=part.is_document)
    for number, (end, n) in enumerate(zip(lengths.cumsum(), lengths, strict=True), 1):
        text.add_ids(f"{part.name}:{number}", ids[end - n : end], is_document=True)


def read_part(text: Text, part: Part, spec: CorpusSpec) -> None:
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
            why = f"document_separator={separator!r} divides one text"
            raise UserError(f"{why}, and {name} consists of documents.")
        if separator:
            documents = texts_between(separator, texts, name)
        if not documents:
            text.add(name, texts, is_document=is_document)
    except (NotText, Archive) as error:
        if not is_document:
            raise
        text.left_out["not text and"].append(f"{name} ({error.where})")
    for place, document in documents or ():
        text.add(place, [document], is_document=True)


def parts_between(separator: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, bool]]:
    """What is between the ``separator`` in ``texts``, and whether it is the rest after the last one."""
    rest, searched, number = "", 0, 1
    for text in texts:
        rest += text
        if rest.find(separator, searched) >= 0:
            *whole, rest = rest.split(separator)
            yield from ((part, False) for part in whole)
            number += len(whole)
        searched = max(len(rest) - len(separator) + 1, 0)
        if searched > MAX_RECORD:
            most = f"at most {MAX_RECORD:,} characters before the next {separator!r}"
            raise UserError(f"{name}:{number}: expected {most}, got more; make a file of what is there.")
    yield rest, True


def texts_between(separator: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each document; what follows the last separator is one if it has text."""
    for number, (document, is_rest) in enumerate(parts_between(separator, texts, name), 1):
        if is_rest and number == 1:
            raise UserError(
                f"document_separator={separator!r} doesn't occur in {name}; give the text between its "
                f"documents (a line break is written as $'\\n' in a shell), or leave it out."
            )
        if not is_rest or document.strip():
            yield f"{name}:{number}", document


def texts_of_json(head: str, texts: Iterable[str], name: str, field: str) -> Iterator[tuple[str, str]] | None:
    """The place and the text of each document in ``texts``, which start with ``head``: JSON lines, or one
    array; None for a .json file of another form, unless ``field`` asks for documents."""
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
    lines = enumerate(parts_between("\n", texts, name), 1)
    return ((f"{name}:{n}", text_in(line, f"{name}:{n}", field)) for n, (line, _) in lines if line.strip())


def elements_of(texts: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """The place and the JSON of each element of an array, which must fit into memory."""
    whole = ""
    for text in texts:
        whole += text
        if len(whole) > MAX_RECORD:
            most = f"an array of at most {MAX_RECORD:,} characters"
            raise UserError(f"{name}: expected {most}, got more; write JSON lines.")
    try:
        elements = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected a JSON array of objects, got {error}; correct it.") from None
    yield from ((f"{name}, element {number}", json.dumps(e)) for number, e in enumerate(elements, 1))


def text_in(line: str, place: str, field: str) -> str:
    """The text in the ``field`` of the JSON object in a line."""
    value, reason = None, ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f" ({str(error).partition(':')[0]})"
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        line = line.strip()
        got = repr(line if len(line) <= 40 else f"{line[:40]}…") + reason
        what_to_do = "correct or remove it, or name another field with text_field"
        raise UserError(f'{place}: expected a JSON object with a string "{field}", got {got}; {what_to_do}.')
    return checked(text, place)


def checked(text: str, place: str) -> str:
    if wrong := NOT_CHARACTERS.search(text):
        raise UserError(f"{place}: U+{ord(wrong[0]):04X} is not a character of a text; remove it.")
    return text


def texts_of_csv(texts: Iterable[str], name: str, field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of a table, whose first row names its columns."""
    csv.field_size_limit(MAX_RECORD)
    lines, number = (f"{line}\n" for line, _ in parts_between("\n", texts, name)), 0
    first = next(lines)
    try:
        heads = {mark: next(csv.reader([first], delimiter=mark), []) for mark in DELIMITERS}
        mark = next((mark for mark, columns in heads.items() if field in columns), "")
        if not mark:
            names = repr(first.strip()[:99])
            raise UserError(
                f"{name}: no column {field!r} in the first row, {names}; name one with text_field."
            )
        for row in csv.reader(lines, delimiter=mark, strict=True):
            if row and len(row) != len(heads[mark]):
                raise csv.Error(f"expected {len(heads[mark])} columns, got {len(row)}")
            number += 1
            if row:  # else a line that is blank
                text = row[heads[mark].index(field)]
                yield f"{Path(name).name}:{number}", checked(text, f"{name}, row {number}")
    except csv.Error as error:
        raise UserError(f"{name} can't be read after row {number:,}: {error}; correct it.") from None


def texts_of_parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
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
        why = f"can't be read after row {number:,}: {' '.join(str(error).split())}"
        raise UserError(f"{path}: {field!r} {why}; name a column of texts with text_field.") from None


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``, or its bytes as text if it is none."""
    blocks = list(blocks_of(STDIN if name == "-" else user_path(name)))
    try:
        return "".join(texts_in(blocks, name))
    except NotText:
        return "".join(bytes_as_text(blocks))
