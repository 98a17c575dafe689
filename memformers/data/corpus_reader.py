"""From files to one, of UTF-8 or token ids, in constant memory: texts, JSON, tables, divided texts."""

import codecs
import hashlib
import json
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from memformers.common.errors import UserError
from memformers.data.files import (
    BLOCK,
    JSON_SUFFIXES,
    STDIN,
    Archive,
    Ids,
    NotText,
    blocks_of,
    bytes_as_text,
    bytes_of,
    check_characters,
    local,
    plain_name,
    texts_in,
)
from memformers.data.folders import LeftOut
from memformers.data.ids import documents_ended_by, drop_ids, ids_in
from memformers.data.sources import CorpusSpec, IdDocuments, Part, Sources, some_of
from memformers.data.tables import (
    TEXT_FIELD,
    HubTable,
    documents_in_table,
    documents_on_hub,
    table_kind,
)
from memformers.data.tokenizer import Tokenizer

MAX_RECORD = 256_000_000
"""Characters of a line of JSON, an array, or a document between separators, which must fit into memory."""
# Ids are kept in four bytes.
MAX_IDS = 1 << 32
# Documents of which the names are kept.
MAX_NAMES = 100_000


class Text:
    """A text in UTF-8, or token ids of four bytes, in a new file, and where its splits and documents end."""

    def __init__(self, path: Path, progress: Callable[[int], object]):
        self.path = path
        self._progress = progress
        self.file = open(path, "wb")  # noqa: SIM115
        self.bytes = 0
        self.characters = 0
        # Where each document, or file, ends, in bytes.
        self.ends = array("q")
        # How many characters it has.
        self.lengths = array("q")
        # Those of the first MAX_NAMES documents.
        self.names: list[str] = []
        self.are_documents = False
        self.are_ids = False
        # Where each split ends, in bytes; one without a name is to be divided.
        self.splits: dict[str, int] = {}
        # Names of what is not read, by the reason.
        self.left_out: LeftOut = defaultdict(list)
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        if not self.are_documents:
            return self._hash.hexdigest()
        return hashlib.sha256(self._hash.digest() + repr(tuple(self.lengths)).encode()).hexdigest()

    def add(self, name: str, texts: Iterable[str], *, is_document: bool) -> None:
        """Append the text in ``texts``, unless it is blank; nothing of it if that fails."""
        start = (self.bytes, self.characters, self._hash.copy())
        is_blank = True
        try:
            for text in texts:
                is_blank = is_blank and not text.strip()
                self._write(bytes_of(text), len(text))
            if is_blank:
                self.left_out["documents without text are"].append(name)
            else:
                self._end(name, start[1], is_document)
        except NotText:
            is_blank = True
            raise
        finally:
            if is_blank:
                self.bytes, self.characters, self._hash = start
                self.file.seek(self.bytes)
                self.file.truncate()

    def add_ids(self, name: str, ids: Ids, *, is_document: bool) -> None:
        self.are_ids = True
        n_before = self.characters
        for start in range(0, len(ids), BLOCK // 4):
            block = ids[start : start + BLOCK // 4]
            for extreme in (block.min(), block.max()):
                if not 0 <= extreme < MAX_IDS:
                    got = f"got {extreme:,}"
                    raise UserError(f"{name}: expected token ids from 0 to {MAX_IDS - 1:,}, {got}.")
            self._write(block.astype("<u4").tobytes(), len(block))
            if len(block) == BLOCK // 4:
                drop_ids(ids)
        self._end(name, n_before, is_document)

    def _write(self, block: bytes, characters: int) -> None:
        self.file.write(block)
        self._hash.update(block)
        self._progress(len(block))
        self.bytes += len(block)
        self.characters += characters

    def _end(self, name: str, n_before: int, is_document: bool) -> None:
        """The end of what began after ``n_before`` characters."""
        self.are_documents = self.are_documents or is_document
        self.ends.append(self.bytes)
        self.lengths.append(self.characters - n_before)
        if len(self.names) < MAX_NAMES:
            self.names.append(name)

    def offset_of(self, character: int) -> int:
        """Where a ``character`` begins, or a token id, in bytes."""
        if self.are_ids:
            return 4 * character
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        offset = 0
        n_left = character
        for block in blocks_of(self.path):
            text = decoder.decode(block)
            if len(text) > n_left:
                return offset + len(bytes_of(text[:n_left]))
            offset += len(bytes_of(text))
            n_left -= len(text)
        return self.bytes


def read(sources: Sources, spec: CorpusSpec, path: Path, progress: Callable[[int], object]) -> Text:
    """``sources`` in a new file ``path``. Documents without text and, in a folder, files that are no text are
    left out, with a warning. ``progress`` gets numbers of bytes."""
    text = Text(path, progress)

    # Token ids and texts can't be joined.
    first_of_kind: dict[bool, str] = {}
    for part in sources.parts:
        first_of_kind.setdefault(part.has_ids(spec.tokenizer), part.name)
    if len(first_of_kind) > 1:
        names = f"{first_of_kind[True]} holds token ids, and {first_of_kind[False]} a text"
        raise UserError(f"{names}; name one kind alone.")
    if False in first_of_kind and spec.document_end is not None:
        name = first_of_kind[False]
        raise UserError(
            f"document_end={spec.document_end} applies to token ids, and {name} is a text; omit it."
        )
    # What is read, one file after the other.
    with text.file:
        for part in sources.parts:
            if True in first_of_kind:
                read_ids(text, part, spec)
            else:
                read_part(text, part, spec)
            text.splits[part.split] = text.bytes
    # What isn't.
    notes = []
    for reason, names_left_out in (sources.left_out | text.left_out).items():
        if names_left_out:
            notes.append(f"{reason} left out: {some_of(names_left_out)}")
    if not text.bytes:
        problem = "; ".join([f"{sources.source} contains no text", *notes])
        raise UserError(f"{problem}; name another file or folder.")
    for note in notes:
        warnings.warn(f"{sources.source}: {note}.", stacklevel=3)
    return text


def read_ids(text: Text, part: Part, spec: CorpusSpec) -> None:
    if spec.document_separator or spec.tokenizer in ("frequency", "word"):
        raise UserError(f"{part.name} holds token ids already; omit tokenizer and document_separator.")
    if isinstance(part.file, IdDocuments):
        for number, ids in enumerate(part.file.arrays, 1):
            name = f"{part.name}:{number}"
            text.add_ids(name, ids_in(as_array(ids), name)[0], is_document=True)
        return
    assert isinstance(part.file, Path | np.ndarray)
    ids, lengths = ids_in(part.file, part.name, spec.vocab_size)
    if spec.document_end is not None:
        if len(lengths):
            problem = f"the documents of {part.name} are listed in a file beside it already"
            raise UserError(f"{problem}; omit document_end.")
        lengths = documents_ended_by(spec.document_end, ids, part.name)
    if not len(lengths):
        text.add_ids(part.name, ids, is_document=part.is_document)
    start = 0
    for number, length in enumerate(lengths, 1):
        text.add_ids(f"{part.name}:{number}", ids[start : start + int(length)], is_document=True)
        start += int(length)
        if number % 1000 == 0:  # small documents, which don't fill a block
            drop_ids(ids)
    drop_ids(ids)


def as_array(ids: Any) -> Ids:
    """What a program passes as token ids ``[n]``, as an array; UserError for a number or a text."""
    array: Ids = np.asanyarray(ids)
    if not array.ndim:
        raise UserError(
            "expected ids as an array [n], or as a list of such arrays, each a document; convert a "
            "list of numbers by numpy.array(ids)."
        )
    return array


def read_part(text: Text, part: Part, spec: CorpusSpec) -> None:
    """Append the text of a file, or its documents. A file in a folder that is no text is left out."""
    separator = spec.document_separator
    try:
        documents = documents_in(part, spec)
        if separator and (documents or part.is_document):
            problem = f"document_separator={separator!r} divides one text"
            raise UserError(f"{problem}, and {part.name} consists of documents.")
        if not documents and not separator:
            text.add(part.name, texts_of(part, spec), is_document=part.is_document)
    except (NotText, Archive) as error:
        if not part.is_document:
            raise
        text.left_out["not text and"].append(f"{part.name} ({error.where})")
        return
    if separator:
        documents = texts_between(separator, texts_of(part, spec), part.name)
    for name, document in documents or ():
        text.add(name, [document], is_document=True)


def documents_in(part: Part, spec: CorpusSpec) -> Iterator[tuple[str, str]] | None:
    """The name and the text of each document in a table or in JSON; None for a plain text."""
    if isinstance(part.file, HubTable):
        return documents_on_hub(part.file, spec.text_field)
    kind = table_kind(part.name, spec.text_field)
    if kind and isinstance(part.file, Path):
        return documents_in_table(part.file, kind, spec.text_field)
    if not plain_name(part.name).lower().endswith(JSON_SUFFIXES):
        return None
    texts = texts_of(part, spec)
    head = head_of(texts)
    if is_json_array(head) and isinstance(part.file, Path):
        return documents_in_table(part.file, "json", spec.text_field)
    if is_plain_json(head, part.name, spec.text_field):
        return None
    return texts_of_json(chain([head], texts), part.name, spec.text_field)


def texts_of(part: Part, spec: CorpusSpec) -> Iterator[str]:
    """The text of a file, in portions; for tokens that are bytes, any bytes."""
    assert isinstance(part.file, Path | bytes)
    label = part.name if isinstance(part.file, bytes) else str(part.file)
    blocks = blocks_of(part.file)
    return bytes_as_text(blocks) if spec.tokenizer == "byte" else texts_in(blocks, label)


def parts_between(separator: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, bool]]:
    """What is between the ``separator`` in ``texts``, and whether it is the rest after the last one."""
    rest = ""
    n_searched = 0  # characters of the rest in which no separator begins
    number = 1
    for text in texts:
        rest += text
        if rest.find(separator, n_searched) >= 0:
            *parts, rest = rest.split(separator)
            for part in parts:
                yield part, False
            number += len(parts)
        n_searched = max(len(rest) - len(separator) + 1, 0)
        if n_searched > MAX_RECORD:
            limit = f"at most {MAX_RECORD:,} characters before the next {separator!r}"
            raise UserError(f"{name}:{number}: expected {limit}, got more; make a file of what is there.")
    yield rest, True


def texts_between(separator: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each document; what follows the last separator is one if it has text."""
    for number, (document, is_rest) in enumerate(parts_between(separator, texts, name), 1):
        if is_rest and number == 1:
            raise UserError(
                f"document_separator={separator!r} doesn't occur in {name}; give the text between its "
                f"documents (a line break is written as $'\\n' in a shell), or leave it out."
            )
        if not is_rest or document.strip():
            yield f"{name}:{number}", document


def texts_of_json(texts: Iterable[str], name: str, field: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each document in ``texts``, which are JSON lines."""
    for number, (line, _) in enumerate(parts_between("\n", texts, name), 1):
        if line.strip():
            label = f"{name}:{number}"
            yield label, text_in(line, label, field)


def head_of(texts: Iterator[str]) -> str:
    """The first of ``texts``, joined until they show what the file is: a compressed file may begin with a
    portion of a few characters."""
    head = ""
    for text in texts:
        head += text
        if len(head) >= BLOCK:
            break
    return head


def is_json_array(head: str) -> bool:
    """Whether a file that starts with ``head`` is an array of objects, which datasets reads."""
    start = head.lstrip()
    return start.startswith("[") and start[1:].lstrip().startswith("{")


def is_plain_json(head: str, name: str, field: str) -> bool:
    """Whether a .json file that starts with ``head`` is a text, since its first line is no object and no
    ``field`` is asked for."""
    if not plain_name(name).lower().endswith(".json") or field != TEXT_FIELD:
        return False
    line, line_end, _ = head.lstrip().partition("\n")
    if not line_end and len(head) >= BLOCK:  # an object, or a text, of megabytes
        return not line.startswith("{")
    try:
        return not isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return True


def text_in(line: str, label: str, field: str) -> str:
    """The text in the ``field`` of the JSON object in a line."""
    value = None
    reason = ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f" ({str(error).partition(':')[0]})"
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        line = line.strip()
        got = repr(line if len(line) <= 40 else f"{line[:40]}…") + reason
        what_to_do = "correct or remove it, or name another field with text_field"
        raise UserError(f'{label}: expected a JSON object with a string "{field}", got {got}; {what_to_do}.')
    return check_characters(text, label)


def read_prompt(name: str, tokenizer: Tokenizer) -> str:
    """The one text of a file, or of standard input for ``-``: what its token ids stand for, or as
    ``read_text``. UserError for documents."""
    path = STDIN if name == "-" else local(name)
    part = Part("", path.name, path, False)
    if part.has_ids(tokenizer.name):
        ids, _ = ids_in(path, name, tokenizer.vocab_size)
        if not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            limits = f"0 to {tokenizer.vocab_size - 1:,}"
            raise UserError(f"expected {name} to be ids from {limits}, got {ids.min():,} to {ids.max():,}.")
        return tokenizer.decode(ids)
    if documents_in(part, CorpusSpec(tokenizer=tokenizer.name)):
        raise UserError(f"{name} holds documents, and a prompt is one text; write that into a text file.")
    return read_text(path)


def read_text(path: Path) -> str:
    """The text of a file, or its bytes as text if it is none."""
    blocks = list(blocks_of(path))
    try:
        return "".join(texts_in(blocks, str(path)))
    except NotText:
        return "".join(bytes_as_text(blocks))
