"""The text of a training: the user's files, Tiny Shakespeare, or the built-in play."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import replacing
from memformers.common.network import get
from memformers.data.builtin import write_play
from memformers.data.gathering import Gathered, Recipe, gather, refuse_to_divide
from memformers.data.texts import bytes_of

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
IN_FOLDER = ("tinyshakespeare/input.txt", "input.txt")
"""Where Tiny Shakespeare may lie in a data folder."""
DOWNLOAD_SECONDS = 10.0
BUILTIN, STAND_IN = "builtin", "stand-in"
BUILTIN_LENGTH = 1_000_000
"""Characters of the built-in corpus, about as many as Tiny Shakespeare has."""


@dataclass(frozen=True)
class Corpus:
    """A text: the first 90 % of its characters are for training, the last 10 % for validation. For documents,
    the last ones are for validation: whole documents that together have about 10 % of the characters, or,
    where they can't have 5 to 20 %, exactly the last 10 %, whose first document is then cut."""

    name: str
    """For titles: "Tiny Shakespeare", "built-in play (seed 0)" or the file's name."""
    source: str
    """The path it was read from, or how it was made."""
    text: str
    is_builtin: bool = False
    """Whether it is the built-in play."""
    is_stand_in: bool = False
    """Whether it replaces Tiny Shakespeare, which was neither found nor downloadable."""
    documents: tuple[int, ...] = ()
    """The number of characters of each document, in the order in which they are joined in ``text``. Empty for
    a plain text."""

    @cached_property
    def sha256(self) -> str:
        """The checksum of the text in UTF-8 and of the ends of its documents, if it has any; in
        hexadecimal."""
        of_text = hashlib.sha256(bytes_of(self.text))
        if self.documents:
            of_text = hashlib.sha256(of_text.digest() + repr(self.documents).encode())
        return of_text.hexdigest()

    @cached_property
    def split(self) -> int:
        """The position at which validation starts, in characters."""
        return split_of(len(self.text), self.documents)

    @cached_property
    def train_text(self) -> str:
        """The text before the split."""
        return self.text[: self.split]

    @cached_property
    def validation_text(self) -> str:
        """The text after the split."""
        return self.text[self.split :]

    @cached_property
    def train_documents(self) -> tuple[str, ...]:
        """The documents for training; none for a plain text."""
        return tuple(self.documents_between(0, self.split))

    @cached_property
    def validation_documents(self) -> tuple[str, ...]:
        """The documents for validation; none for a plain text."""
        return tuple(self.documents_between(self.split, len(self.text)))

    def documents_between(self, start: int, stop: int) -> Iterator[str]:
        """The documents between two characters of the text; a document that is only partly there is cut."""
        ends = list(accumulate(self.documents))
        for end, length in zip(ends, self.documents, strict=True):
            if text := self.text[max(end - length, start) : min(end, stop)]:
                yield text


def split_of(length: int, documents: Sequence[int] = ()) -> int:
    """Where validation starts in a text of ``length`` characters, or of ``documents`` of these lengths."""
    fit = [end for end in accumulate(documents) if length <= 20 * (length - end) <= 4 * length]
    return min(fit, key=lambda end: abs(10 * end - 9 * length), default=length * 9 // 10)


def load_corpus(data: str = "", document_separator: str = "", tokenizer: str = "character") -> Corpus:
    """The corpus to train on: the file or folder ``data``, the built-in play for the words ``"builtin"`` and
    ``"stand-in"`` (which marks it as a replacement for Tiny Shakespeare), or, if ``data`` is empty, Tiny
    Shakespeare, from ``$MEMFORMERS_DATA``, the user's cache, or its public address.

    A folder, unless it is Tiny Shakespeare's, and a file of JSON lines are documents
    ([`memformers.data.gathering.gather`][]); another text is cut into documents if ``document_separator`` is
    given. If Tiny Shakespeare isn't available, the built-in corpus replaces it, with a warning. With the
    ``tokenizer`` "byte", all files are read as they are. Raises ValueError for a ``data`` that isn't there,
    an empty text, what is no text, and documents that can't be read.
    """
    corpus = _load(data, tokenizer)
    if not document_separator:
        return corpus
    if corpus.documents:
        refuse_to_divide(document_separator, corpus.name)
    found = Gathered()
    found.add_divided(corpus.name, [bytes_of(corpus.text)], document_separator)
    found.check(corpus.name)
    return replace(corpus, text=found.text, documents=tuple(found.lengths))


def _load(data: str, tokenizer: str) -> Corpus:
    if data in (BUILTIN, STAND_IN):
        return builtin_corpus(is_stand_in=data == STAND_IN)
    if data:
        return _from_path(Path(data), asked_by="--data", tokenizer=tokenizer)
    if named := os.environ.get("MEMFORMERS_DATA", ""):
        try:
            return _from_path(Path(named), asked_by="MEMFORMERS_DATA")
        except ValueError as error:
            warnings.warn(f"{error} Looking further.", stacklevel=3)
    try:
        return _tiny_shakespeare()
    except OSError as error:
        warnings.warn(
            f"Tiny Shakespeare was neither found nor downloadable ({TINY_SHAKESPEARE_URL}: {error}): the "
            "built-in play is used instead. To use the real corpus, give --data or MEMFORMERS_DATA its path.",
            stacklevel=3,
        )
        return builtin_corpus(is_stand_in=True)


def builtin_corpus(length: int = BUILTIN_LENGTH, seed: int = 0, is_stand_in: bool = False) -> Corpus:
    """The play that [`memformers.data.builtin`][] writes."""
    name, source = f"built-in play (seed {seed})", f"made by code: {length:,} characters, seed {seed}"
    return Corpus(name, source, write_play(length, seed), True, is_stand_in)


def corpus_at(path: Path, tokenizer: str = "character", *, is_tiny_shakespeare: bool = False) -> Corpus:
    """The corpus in a file or folder; UserError where it has no text, or must be Tiny Shakespeare and is
    something else."""
    found = gather(Recipe(path, tokenizer=tokenizer))
    documents = tuple(found.lengths)
    corpus = Corpus(path.resolve().name, str(path), found.text, documents=documents)
    if corpus.sha256 == TINY_SHAKESPEARE_SHA256:
        return replace(corpus, name="Tiny Shakespeare")
    if is_tiny_shakespeare:
        raise UserError(
            f"expected {path} to be Tiny Shakespeare, sha256 {TINY_SHAKESPEARE_SHA256}, got "
            f"{found.characters:,} characters with {corpus.sha256}: the download is incomplete, or it is "
            f"another text. Remove it, rename it to read all files of the folder as documents, or name the "
            f"file itself to train on it unchanged."
        )
    return corpus


def _from_path(path: Path, asked_by: str, tokenizer: str = "character") -> Corpus:
    """The corpus in a file, or in a folder: the unchanged Tiny Shakespeare, or where --data names it,
    documents."""
    for name in IN_FOLDER:
        if (path / name).is_file():
            return corpus_at(path / name, is_tiny_shakespeare=True)
    if path.is_file() or (asked_by == "--data" and path.is_dir()):
        return corpus_at(path, tokenizer)
    folder = "of texts" if asked_by == "--data" else f"with {' or '.join(IN_FOLDER)}"
    raise UserError(f"expected {asked_by} to be a text file or a folder {folder}, got {path}.")


def _tiny_shakespeare() -> Corpus:
    """Tiny Shakespeare from the user's cache, else downloaded and cached; OSError if neither works."""
    path = Path(platformdirs.user_cache_dir("memformers")) / "tinyshakespeare" / "input.txt"
    if path.is_file():
        try:
            return corpus_at(path, is_tiny_shakespeare=True)
        except ValueError as error:
            warnings.warn(f"{error} Downloading it again.", stacklevel=3)
    _, raw = get(TINY_SHAKESPEARE_URL, DOWNLOAD_SECONDS)
    if hashlib.sha256(raw).hexdigest() != TINY_SHAKESPEARE_SHA256:
        raise OSError(f"{len(raw):,} bytes that aren't the corpus came")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(raw)
    except OSError as error:
        warnings.warn(f"Tiny Shakespeare can't be kept in the cache: {error}", stacklevel=3)
        return Corpus("Tiny Shakespeare", TINY_SHAKESPEARE_URL, raw.decode())
    return corpus_at(path)
