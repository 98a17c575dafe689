"""A folder of tokens: what a text is when it is prepared, and read from where it lies.

``train.npy``, ``validation.npy`` and, where there is one, ``test.npy`` are the tokens of a split: one
dimension, of the smallest unsigned type that holds the vocabulary. ``train_documents.npy`` and so on are the
places where documents begin, and the end, int64 ``[documents + 1]``; a plain text has none.
``tokenizer.json`` is the tokenizer; ``card.json`` says what the text is
([`Card`][memformers.data.store.Card]); ``manifest.json`` has the size and the checksum of each file.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from memformers.common.atomic_dir import MANIFEST, check_manifest
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.data.texts import STORE
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, load_tokenizer

CARD, FORMAT = STORE[0], 1
TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Counts:
    """How large a split is."""

    bytes: int
    """In UTF-8."""
    characters: int
    words: int
    """Separated by white space."""
    tokens: int
    documents: int = 0
    """0 for a plain text."""


@dataclass(frozen=True)
class Card:
    """What a text is that is divided into tokens."""

    name: str
    """For titles."""
    source: str
    """The path it was read from, or how it was made."""
    sha256: str
    """As in [`Corpus`][memformers.data.corpora.Corpus]."""
    tokenizer: str
    splits: dict[str, Counts]
    documents: int = 0
    """Of all splits, before one was cut; 0 for a plain text."""
    is_stand_in: bool = False
    """Whether it replaces Tiny Shakespeare."""
    format: int = FORMAT

    def total(self, what: str) -> int:
        """The sum of one of the [`Counts`][] over all splits."""
        return sum(getattr(counts, what) for counts in self.splits.values())


@dataclass(frozen=True)
class Split:
    """The tokens of a split."""

    tokens: npt.NDArray[Any]
    """``[n]``, of an unsigned type; read from the disk when it is used."""
    documents: npt.NDArray[np.int64]
    """How many tokens each document has, ``[documents]``; empty for a plain text."""


@dataclass(frozen=True)
class TokenStore:
    """A folder of tokens, opened."""

    card: Card
    tokenizer: Tokenizer
    splits: dict[str, Split]

    @property
    def source(self) -> str:
        """Of its card."""
        return self.card.source

    @property
    def sha256(self) -> str:
        """Of its card."""
        return self.card.sha256


class TokenFile:
    """A .npy file of one dimension that grows."""

    def __init__(self, path: Path, dtype: npt.DTypeLike):
        self.dtype, self.length = np.dtype(dtype), 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._write_header()
        self._begin = self._file.tell()

    def append(self, numbers: npt.ArrayLike) -> None:
        """Write ``numbers [n]`` at the end."""
        array = np.asarray(numbers).astype(self.dtype)
        self._file.write(array.tobytes())
        self.length += len(array)

    def _write_header(self) -> None:
        about = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self._file, about)  # with room for a larger shape

    def __enter__(self) -> "TokenFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._begin
        finally:
            self._file.close()


def smallest_type(vocab_size: int) -> npt.DTypeLike:
    """The smallest unsigned type of tokens below ``vocab_size``."""
    return np.min_scalar_type(vocab_size - 1)


def documents_file(split: str) -> str:
    """The name of the file that says where the documents of a split begin."""
    return f"{split}_documents.npy"


def write_card(card: Card, folder: Path) -> None:
    """Write ``card.json``."""
    write_json(folder / CARD, asdict(card))


def is_store(folder: Path) -> bool:
    """Whether ``folder`` is a folder of tokens."""
    return (folder / CARD).is_file() and (folder / MANIFEST).is_file()


def open_store(folder: Path) -> TokenStore:
    """The folder that ``memformers prepare`` wrote; tokens stay on the disk. Raises UserError for one that is
    incomplete, has changed, or comes from another version. Changed tokens in a file of the same size
    aren't noticed, since checksums of all would take long."""
    source = str(folder / CARD)
    data = read_json(folder / CARD)
    if data.get("format") != FORMAT:
        raise UserError(
            f"expected {source} to have format {FORMAT}, got {data.get('format')!r}; prepare it again."
        )
    check_manifest(folder, (CARD, TOKENIZER))
    card, tokenizer = config_from_dict(Card, data, source), load_tokenizer(folder)
    return TokenStore(
        card, tokenizer, {name: _split(folder, name, counts) for name, counts in card.splits.items()}
    )


def _split(folder: Path, name: str, counts: Counts) -> Split:
    """A split, mapped; UserError unless it has as many tokens and documents as the card says."""
    begins: npt.NDArray[Any] = np.zeros(1, np.int64)
    if counts.documents:
        begins = _mapped(folder / documents_file(name), counts.documents + 1)
    return Split(_mapped(folder / f"{name}.npy", counts.tokens), np.diff(begins))


def _mapped(path: Path, length: int) -> npt.NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read: {error}; prepare the text again.") from None
    if found.shape != (length,) or found.dtype.kind not in "ui":
        raise UserError(
            f"expected {path} to have [{length}] whole numbers, got {list(found.shape)} of {found.dtype}; "
            f"prepare the text again."
        )
    return found
