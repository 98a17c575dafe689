"""The texts that are prepared, gathered into one file: from text files, folders and JSON lines, compressed or
not, in constant memory."""

import codecs
import hashlib
import json
import warnings
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.data.benchmarks import PYTHON_SOURCE, benchmark, python_sources
from memformers.data.files import blocks_of, lines_of, parts_of, plain_name
from memformers.data.texts import are_json_lines, bytes_of, divided, files_below, some_of, text_of_line
from memformers.data.tokenizers import OWN, check_name

MARK = 4 << 20
"""Bytes between two places of a text that are known in bytes and in characters."""


@dataclass(frozen=True)
class Recipe:
    """What a folder of tokens is made from."""

    source: Path
    """A text file, a folder, or a file of JSON lines."""
    corpus: str = ""
    """The name of a corpus of [`memformers.data.benchmarks`][] whose file or folder this is; empty: none."""
    document_separator: str = ""
    tokenizer: str = "character"
    """As in [`TrainConfig`][memformers.training.config.TrainConfig]."""
    vocab_size: int | None = None
    """Of learned words or subwords."""

    def __post_init__(self) -> None:
        """Raise UserError for an unknown tokenizer."""
        check_name(self.tokenizer)

    @property
    def files(self) -> dict[str, Path]:
        """The files, by name; UserError where there are none."""
        if self.corpus:
            return (
                python_sources()
                if self.corpus == PYTHON_SOURCE
                else benchmark(self.corpus).found(self.source)
            )
        if self.source.is_dir():
            return dict(sorted(files_below(self.source)[0].items()))
        if not self.source.is_file():
            raise UserError(
                f"{self.source} doesn't exist; name a text file, a folder of texts or a .jsonl file."
            )
        return {self.source.name: self.source}

    @property
    def files_are_documents(self) -> bool:
        """Whether each file is a document."""
        if self.corpus:
            return self.corpus == PYTHON_SOURCE or bool(benchmark(self.corpus).documents)
        return self.source.is_dir()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.files.values())

    @property
    def text_size(self) -> int:
        """The bytes of the text, about."""
        files = self.files.items()
        return sum(path.stat().st_size * (4 if plain_name(name) != name else 1) for name, path in files)

    def key(self) -> str:
        """A name that no other text, no other state of this one and no other tokens of it have."""
        files = [*self.files.values(), *([] if self.tokenizer in OWN else [Path(self.tokenizer)])]
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        said = json.dumps([states, self.corpus, self.document_separator, self.tokenizer, self.vocab_size])
        return hashlib.sha256(said.encode()).hexdigest()[:32]


class Gathered:
    """A text in one file of UTF-8, and where its documents end."""

    def __init__(self, path: Path):
        self.path, self.file = path, open(path, "wb")  # noqa: SIM115
        self.bytes = self.characters = 0
        self.marks: list[tuple[int, int]] = [(0, 0)]
        """Some of its places, in bytes and in characters."""
        self.ends, self.lengths = array("q"), array("q")
        """Where each document ends, in bytes, and how many characters it has; empty for a plain text."""
        self.bad = ""
        """What is not UTF-8 first, and where, in words."""
        self.files: dict[str, int] = {}
        """Where each file ends, in bytes."""
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """As [`Corpus.sha256`][memformers.data.corpora.Corpus.sha256]."""
        if not self.lengths:
            return self._hash.hexdigest()
        return hashlib.sha256(self._hash.digest() + repr(tuple(self.lengths)).encode()).hexdigest()

    def add(self, name: str, blocks: Iterable[bytes], *, is_document: bool, keep_bad: bool = True) -> str:
        """Append the text in ``blocks``; returns why it was left out, or an empty text."""
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
            self.file.write(block)
            self._hash.update(block)
            self.bytes, self.characters = self.bytes + len(block), self.characters + len(text)
            if self.bytes - self.marks[-1][0] > MARK and not decoder.getstate()[0]:
                self.marks.append((self.bytes, self.characters))
        if blank or (bad and not keep_bad):
            self.bytes, self.characters, self._hash = start, characters, digest
            del self.marks[marks:]
            self.file.seek(start)
            self.file.truncate()
            return "blank" if blank else "not UTF-8"
        self.bad = self.bad or bad
        if is_document:
            self.ends.append(self.bytes)
            self.lengths.append(self.characters - characters)
        return ""

    def place(self, character: int) -> int:
        """Where a character begins, in bytes."""
        at, before = max(mark for mark in self.marks if mark[1] <= character)
        with open(self.path, "rb") as file:
            file.seek(at)
            text = file.read(4 * (character - before)).decode("utf-8", errors="surrogateescape")
        return at + len(text[: character - before].encode("utf-8", errors="surrogateescape"))


def gather(recipe: Recipe, path: Path, bar: Any) -> Gathered:
    """The text or documents of ``recipe`` in a new file ``path``, as
    [`load_corpus`][memformers.data.corpora.load_corpus] would read them. Raises UserError where they can't be
    read or have no text."""
    found, source = Gathered(path), recipe.source
    left_out: dict[str, list[str]] = {}

    def add(name: str, blocks: Iterable[bytes], **how: bool) -> None:
        if why := found.add(name, blocks, **how):
            left_out.setdefault(why, []).append(name)

    with found.file:
        for name, file in recipe.files.items():
            blocks = blocks_of(file, bar.update)
            head = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
            is_lines, blocks = are_json_lines(name, head), chain([head], blocks)
            if recipe.document_separator and (is_lines or recipe.files_are_documents):
                divided([], recipe.document_separator, str(source))
            if is_lines:
                for number, line in enumerate(lines_of(blocks, name), 1):
                    if line.strip():
                        place = f"{name}:{number}"
                        add(place, [text_of_line(line, place).encode()], is_document=True)
            elif recipe.document_separator:
                for part in documents_between(blocks, recipe.document_separator, name):
                    add(f"{name}:{len(found.ends) + 1}", part, is_document=True)
            else:
                each = recipe.files_are_documents
                add(name, blocks, is_document=each, keep_bad=not each)
            found.files[name] = found.bytes
    if not found.bytes:
        raise UserError(f"{source} contains no text; name another file or folder.")
    for why, names in left_out.items():
        what = "not UTF-8 and" if why == "not UTF-8" else "documents without text are"
        warnings.warn(f"{source}: {what} left out: {some_of(names)}.", stacklevel=2)
    if found.bad and recipe.tokenizer in ("character", "frequency", "word"):
        raise UserError(
            f"{source} is not UTF-8 text: {found.bad}; convert it to UTF-8 first, or use tokenizer='byte'."
        )
    return found


def documents_between(blocks: Iterable[bytes], separator: str, source: str) -> Iterator[Iterator[bytes]]:
    """The blocks of each document between the ``separator``; each must be read before the next one. Raises
    UserError where the separator doesn't occur."""
    parts = parts_of(blocks, bytes_of(separator))
    ends = 0

    def until_end(part: bytes, is_end: bool) -> Iterator[bytes]:
        nonlocal ends
        yield part
        while not is_end:
            part, is_end = next(parts)
            yield part
        ends += 1

    for part, is_end in parts:
        yield until_end(part, is_end)
    if ends == 1:
        divided("", separator, source)  # which raises
