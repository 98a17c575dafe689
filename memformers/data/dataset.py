"""Datasets of tokens, in memory or in a folder from which they are read in place.

``train.npy``, ``validation.npy`` and perhaps ``test.npy`` are the tokens ``[n]`` of a split, of the smallest
unsigned type that holds the vocabulary; ``train_documents.npy`` and so on, unless it is a plain text, the
places where documents begin, and the end, int64. ``card.json`` is a ``DatasetInfo``.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from memformers.common.errors import UserError
from memformers.common.files import MANIFEST, check_manifest, config_from_dict, read_json
from memformers.data import TRAIN, VALIDATION
from memformers.data.files import Ids
from memformers.data.folders import FORMAT, STORE
from memformers.data.ids import DOCUMENTS_SUFFIX, ids_in
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import load_tokenizer

CARD = STORE[0]


@dataclass
class Counts:
    """How large a split is; of token ids, each counts as a character, and bytes and words are 0."""

    bytes: int = 0  # in UTF-8
    characters: int = 0
    words: int = 0  # separated by white space
    tokens: int = 0
    documents: int = 0  # 0 for a plain text
    is_lossy: bool = False  # whether the tokens lose a part of the text
    # Of the first token of each document, which is not predicted; counted only where tokens may lose a part.
    first_bytes: int = 0
    first_characters: int = 0
    first_words: int = 0


@dataclass(frozen=True)
class DatasetInfo:
    name: str  # for titles
    source: str  # the path it was read from, or how it was made
    sha256: str  # the checksum of the text in UTF-8, or of the ids, and of the ends of its documents
    tokenizer: str
    splits: dict[str, Counts]
    documents: int = 0  # of all splits, before one was cut; 0 for a plain text
    is_stand_in: bool = False  # whether it replaces Tiny Shakespeare
    format: int = FORMAT

    def total(self, unit: str) -> int:
        """How many ``unit`` all splits have: a field of [`Counts`][memformers.data.dataset.Counts]."""
        return sum(getattr(counts, unit) for counts in self.splits.values())


@dataclass(frozen=True)
class Split:
    tokens: Ids  # those of a folder stay on the disk until they are used
    counts: Counts
    documents: npt.NDArray[np.int64]  # how many tokens each document has; empty for a plain text
    names: Sequence[str] = ()  # of the documents; those of a folder have none


@dataclass(frozen=True)
class TokenDataset:
    info: DatasetInfo
    tokenizer: Tokenizer
    splits: dict[str, Split]
    folder: Any = None  # what deletes the files that are mapped when nothing uses them any more

    @property
    def train(self) -> Split:
        return self.splits[TRAIN]

    @property
    def validation(self) -> Split:
        return self.splits[VALIDATION]


class SplitWriter:
    def __init__(self, folder: Path, split: str, vocab_size: int):
        self.path = folder / f"{split}.npy"
        self.dtype = np.dtype(np.min_scalar_type(vocab_size - 1))
        self.counts = Counts()
        self.begins = array("q", [0])
        self._file = open(self.path, "wb")  # noqa: SIM115
        self._write_header()

    def add(self, tokens: Ids, *, is_end: bool) -> None:
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.counts.tokens += len(tokens)
        # A document of which the tokenizer leaves nothing is none.
        if is_end and self.counts.tokens > self.begins[-1]:
            self.begins.append(self.counts.tokens)

    def close(self, *, are_documents: bool) -> Counts:
        with self._file:
            self._file.seek(0)
            self._write_header()
        if are_documents:
            np.save(f"{self.path.with_suffix('')}{DOCUMENTS_SUFFIX}", np.array(self.begins, np.int64))
            self.counts.documents = len(self.begins) - 1
        return self.counts

    def _write_header(self) -> None:
        shape = (self.counts.tokens,)
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        # It leaves room for a larger shape, so that the header can be written again at the end.
        npy.write_array_header_1_0(self._file, header)


def is_store(folder: Path) -> bool:
    return (folder / CARD).is_file() and (folder / MANIFEST).is_file()


def read_info(folder: Path) -> DatasetInfo:
    data = read_json(folder / CARD)
    if data.get("format") != FORMAT:
        raise UserError(f"{folder / CARD} has format {data.get('format')!r}, not {FORMAT}; prepare it again.")
    return config_from_dict(DatasetInfo, data, str(folder / CARD))


def open_store(folder: Path) -> TokenDataset:
    """What ``memformers prepare`` wrote; a file that changed within its size isn't noticed, to save time."""
    info = read_info(folder)
    check_manifest(folder, STORE)
    return read_dataset(folder, info)


def read_dataset(folder: Path, info: DatasetInfo, *, in_memory: bool = False) -> TokenDataset:
    splits = {}
    for name, counts in info.splits.items():
        path = folder / f"{name}.npy"
        tokens, lengths = ids_in(path, str(path))
        splits[name] = Split(np.array(tokens) if in_memory else tokens, counts, lengths)
    return TokenDataset(info, load_tokenizer(folder), splits)
