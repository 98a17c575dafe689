"""Texts and documents, gathered into one text in memory or, in constant memory, in a file: from text files,
folders and JSON lines, compressed or not, and from between the separators of one text."""

import codecs
import hashlib
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO, NoReturn

from memformers.common.errors import UserError
from memformers.data.benchmarks import PYTHON_SOURCE, benchmark, python_sources
from memformers.data.files import STDIN, SeveralFiles, blocks_of, parts_of, plain_name
from memformers.data.kinds import as_utf8, not_text
from memformers.data.texts import STORE, are_json_lines, bytes_of, files_below, some_of, texts_of_json
from memformers.data.tokenizers import OWN, check_name

MARK = 4 << 20
"""Bytes between two places of a text that are known in bytes and in characters."""


@dataclass(frozen=True)
class Recipe:
    """What a folder of tokens is made from."""

    source: Path
    """A text file, a folder, or a file of JSON lines; - is standard input."""
    corpus: str = ""
    """The name of a corpus of [`memformers.data.benchmarks`][] whose file or folder this is; empty: none."""
    document_separator: str = ""
    tokenizer: str = "character"
    """As in [`TrainConfig`][memformers.training.config.TrainConfig]."""
    vocab_size: int | None = None
    """Of learned words or subwords."""

    def __post_init__(self) -> None:
        """Raise UserError for an unknown tokenizer, and for a ``vocab_size`` of one that learns none."""
        check_name(self.tokenizer)
        if self.vocab_size is not None and self.tokenizer not in ("word", "bpe"):
            raise UserError(
                f"vocab_size={self.vocab_size} is for tokenizer='word' and 'bpe', which learn their tokens; "
                f"leave it out with {self.tokenizer!r}."
            )

    @property
    def files(self) -> dict[str, Path]:
        """The files, by name; UserError where there are none."""
        if self.corpus:
            return (
                python_sources()
                if self.corpus == PYTHON_SOURCE
                else benchmark(self.corpus).found(self.source)
            )
        if all((self.source / name).is_file() for name in STORE):
            raise UserError(
                f"{self.source} holds tokens and no text; train on it as --data, or name the text itself."
            )
        if self.source.is_dir():
            return dict(sorted(files_below(self.source)[0].items()))
        if not self.source.exists() and self.source != STDIN:
            raise UserError(
                f"{self.source} doesn't exist; name a text file, a folder of texts or a .jsonl file."
            )
        return {self.source.name: self.source}

    @property
    def runs(self) -> list[str]:
        """The folders below the source that are left out, since they hold runs."""
        return [] if self.corpus or not self.source.is_dir() else files_below(self.source)[1]

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
    """A text in UTF-8, in a new file or in memory, and where its documents end."""

    def __init__(self, path: Path | None = None):
        self.path = path
        self.file: BinaryIO = open(path, "wb") if path else BytesIO()  # noqa: SIM115
        self.bytes = self.characters = 0
        self.marks: list[tuple[int, int]] = [(0, 0)]
        """Some of its places, in bytes and in characters."""
        self.ends, self.lengths = array("q"), array("q")
        """Where each document ends, in bytes, and how many characters it has; empty for a plain text."""
        self.names: list[str] = []
        """The names of the documents of a text in memory."""
        self.left_out: dict[str, list[str]] = {}
        """The names of documents and files without text, and of those that are not UTF-8, by the reason."""
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

    @property
    def text(self) -> str:
        """The text in memory; bytes that are not UTF-8 are lone surrogates."""
        self.file.seek(0)
        return self.file.read().decode("utf-8", errors="surrogateescape")

    @property
    def documents(self) -> list[tuple[str, str]]:
        """The name and the text of each document in memory."""
        text, ends = self.text, accumulate(self.lengths)
        named = zip(self.names, self.lengths, ends, strict=True)
        return [(name, text[end - length : end]) for name, length, end in named]

    def add(
        self, name: str, blocks: Iterable[bytes], *, is_document: bool = True, keep_bad: bool = True
    ) -> None:
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
            why = "documents without text are" if blank else "not UTF-8 and"
            self.left_out.setdefault(why, []).append(name)
            return
        self.bad = self.bad or bad
        if is_document:
            self.ends.append(self.bytes)
            self.lengths.append(self.characters - characters)
            if not self.path:
                self.names.append(name)

    def add_divided(self, name: str, blocks: Iterable[bytes], separator: str) -> None:
        """Append the documents between the ``separator`` in a text, without it; what follows the last one is
        a document if it has text. Raises UserError where the separator doesn't occur."""
        number = 0
        for number, part in enumerate(documents_between(blocks, separator), 1):
            self.add(f"{name}:{number}", part)
        if number == 1:
            raise UserError(
                f"document_separator={separator!r} doesn't occur in {name}; give the text between its "
                f"documents (a line break is written as $'\\n' in a shell), or leave it out."
            )
        for names in self.left_out.values():
            if names[-1:] == [f"{name}:{number}"]:
                names.pop()

    def check(self, source: str, tokenizer: str = "byte") -> "Gathered":
        """Itself, with a warning that names what was left out; UserError where nothing is left, and for what
        the ``tokenizer`` can't divide."""
        if not self.bytes:
            raise UserError(f"{source} contains no text; name another file or folder.")
        for why, names in self.left_out.items():
            if names:
                warnings.warn(f"{source}: {why} left out: {some_of(names)}.", stacklevel=3)
        if self.bad and tokenizer in ("character", "frequency", "word"):
            raise UserError(
                f"{source} is not UTF-8 text: {self.bad}; convert it to UTF-8 first, or use tokenizer='byte'."
            )
        return self

    def place(self, character: int) -> int:
        """Where a character begins, in bytes, in the file."""
        assert self.path
        at, before = max(mark for mark in self.marks if mark[1] <= character)
        with open(self.path, "rb") as file:
            file.seek(at)
            text = file.read(4 * (character - before)).decode("utf-8", errors="surrogateescape")
        return at + len(text[: character - before].encode("utf-8", errors="surrogateescape"))


def gather(
    recipe: Recipe, path: Path | None = None, progress: Callable[[int], object] = lambda n: None
) -> Gathered:
    """The text or documents of ``recipe``, in memory or in a new file ``path``. A file of JSON lines has one
    document per line, and any other file of a folder is one document. Hidden files, folders of runs or
    tokens, documents without text and, in a folder, files that are no text are left out. ``progress`` gets
    the number of bytes that were read.

    Raises UserError where nothing is left, for a file or sub-folder that can't be read, for a line of JSON
    that isn't an object with a "text", and for a separator in a text that consists of documents."""
    found, separator = Gathered(path), recipe.document_separator
    no_text = found.left_out.setdefault("not text and", [])
    with found.file if path else nullcontext():
        for name, file in recipe.files.items():
            blocks = blocks_of(file, progress)
            try:
                head = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
            except SeveralFiles:
                if not recipe.files_are_documents:
                    raise
                no_text.append(f"{name} (not one file, but several)")
                continue
            if recipe.tokenizer != "byte":  # which was asked for bytes, and gets them
                head, blocks = as_utf8(head, blocks)
                if kind := not_text(head):
                    if not recipe.files_are_documents:
                        raise UserError(f"{file} looks like {kind}, or read its bytes with tokenizer='byte'.")
                    no_text.append(f"{name} ({kind.partition(';')[0]})")
                    continue
            is_lines, blocks = are_json_lines(name, head), chain([head], blocks)
            if separator and (is_lines or recipe.files_are_documents):
                refuse_to_divide(separator, str(recipe.source))
            if is_lines:
                for place, text in texts_of_json(blocks, name):
                    found.add(place, [text.encode()])
            elif separator:
                found.add_divided(name, blocks, separator)
            else:
                each = recipe.files_are_documents
                found.add(name, blocks, is_document=each, keep_bad=not each)
            found.files[name] = found.bytes
    found.left_out["folders of runs or tokens are"] = recipe.runs
    return found.check(str(recipe.source), recipe.tokenizer)


def refuse_to_divide(separator: str, source: str) -> NoReturn:
    """Raise UserError, since documents can't be divided again."""
    raise UserError(
        f"document_separator={separator!r} divides a single text, but {source} consists of documents "
        f"already; leave it out."
    )


def documents_between(blocks: Iterable[bytes], separator: str) -> Iterator[Iterator[bytes]]:
    """The blocks of each document between the ``separator``; each must be read before the next one."""
    parts = parts_of(blocks, bytes_of(separator))

    def until_end(part: bytes, is_end: bool) -> Iterator[bytes]:
        yield part
        while not is_end:
            part, is_end = next(parts)
            yield part

    for part, is_end in parts:
        yield until_end(part, is_end)
