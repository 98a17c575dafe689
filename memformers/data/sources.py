"""The files of a dataset: those of a user, a published corpus, Tiny Shakespeare or the built-in play."""

import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import atomic_write, checksum, user_path
from memformers.common.network import get
from memformers.data import SPLITS, TEST, TRAIN, VALIDATION
from memformers.data.benchmarks import PYTHON_SOURCE, benchmark
from memformers.data.builtin import write_play
from memformers.data.files import JSON_SUFFIXES, STDIN, File, local, plain_name
from memformers.data.folders import FORMAT, LeftOut, files_below, holds_tokens, splits_in
from memformers.data.ids import ID_SUFFIXES, documents_beside, index_beside, is_beside_ids
from memformers.data.splits import splits_named
from memformers.data.tables import (
    TABLE_KINDS,
    TEXT_FIELD,
    HubTable,
    hub_tables,
    is_hub_name,
)
from memformers.data.tokenizer import Tokenizer

TINY_SHAKESPEARE = "Tiny Shakespeare"
TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Where Tiny Shakespeare may be in a folder of data.
IN_FOLDER = ("tinyshakespeare/input.txt", "input.txt")
DOWNLOAD_SECONDS = 10.0
BUILTIN = "builtin"
STAND_IN = "stand-in"
# Characters of the built-in play: about those of Tiny Shakespeare.
BUILTIN_LENGTH = 1_000_000


@dataclass(frozen=True)
class CorpusSpec:
    """What a dataset is made of; fields are as in [`TrainConfig`][memformers.training.config.TrainConfig]."""

    data: str = ""
    validation: str = ""
    test: str = ""
    document_separator: str = ""
    text_field: str = TEXT_FIELD
    tokenizer: str = "character"
    vocab_size: int | None = None  # of learned words or subwords, or of token ids
    corpus: str = ""  # the published corpus, of BENCHMARKS, that data holds, or PYTHON_SOURCE
    document_end: int | None = None  # the token id that ends each document, of token ids
    # What tokenizer="bpe" has learned from this text before, such as that of a run which is resumed.
    subwords: Tokenizer | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class IdDocuments:
    """Documents of token ids that a program yields, one array after the other."""

    arrays: Iterable[Any]


class Part(NamedTuple):
    split: str  # empty where the corpus is to be divided
    name: str
    file: File | IdDocuments | HubTable
    is_document: bool

    def has_ids(self, tokenizer: str) -> bool:
        """Whether it holds token ids; for a ``tokenizer`` of bytes, any file is a text."""
        if tokenizer == "byte":
            return False
        if isinstance(self.file, Path):
            return self.file.suffix.lower() in ID_SUFFIXES
        return isinstance(self.file, np.ndarray | IdDocuments)

    @property
    def has_fields(self) -> bool:
        """Whether its documents are in a field of lines of JSON, or in a column of a table."""
        return isinstance(self.file, HubTable) or plain_name(self.name).lower().endswith(
            (*JSON_SUFFIXES, *TABLE_KINDS)
        )


@dataclass(frozen=True)
class Sources:
    """The files of a corpus, in order."""

    name: str  # for titles: "Tiny Shakespeare", "built-in play (seed 0)" or the file's name
    source: str  # the path it is read from, or how it was made
    parts: Sequence[Part]
    left_out: LeftOut = field(default_factory=dict)  # names of what isn't read, by the reason
    is_stand_in: bool = False  # whether it replaces Tiny Shakespeare

    @property
    def paths(self) -> list[Path]:
        return [part.file for part in self.parts if isinstance(part.file, Path) and part.file != STDIN]

    @property
    def size(self) -> int:
        """About how many bytes the text has, where that is known; a compressed file's count four times."""
        total = 0
        for path in self.paths:
            is_compressed = plain_name(path.name) != path.name
            total += path.stat().st_size * (4 if is_compressed else 1)
        for part in self.parts:
            if isinstance(part.file, bytes | np.ndarray):
                total += len(part.file)
        return total

    @property
    def is_remote(self) -> bool:
        """Whether a part is read from the hub, and may be of any size."""
        return any(isinstance(part.file, HubTable) for part in self.parts)

    @property
    def are_files(self) -> bool:
        """Whether every part is a file that can be read again; standard input and pipes can't."""
        return len(self.paths) == len(self.parts) and all(path.is_file() for path in self.paths)

    def cache_path(self, spec: CorpusSpec) -> Path:
        """Where the cache has these tokens: a folder for each corpus and way to divide it, and in it one for
        each state of its files."""
        assert self.are_files
        identities: list[Any] = [FORMAT, spec.corpus, spec.document_separator, spec.text_field]
        identities += [spec.tokenizer, spec.vocab_size]
        if spec.document_end is not None:
            identities.append(spec.document_end)
        if spec.subwords:
            identities.append(digest(spec.subwords.to_json()))
        states = []
        for path, part in zip(self.paths, self.parts, strict=True):
            identities.append((str(path.resolve()), part.split, part.is_document))
            states.append(state_of(path))
            if part.has_ids(spec.tokenizer):
                states.append(state_of(documents_beside(path)))
                states.append(state_of(index_beside(path)))
        if spec.tokenizer.endswith(".json"):
            tokenizer = user_path(spec.tokenizer)
            identities.append(str(tokenizer.resolve()))
            states.append(state_of(tokenizer))
        return Path(digest(identities), digest(states))


def state_of(path: Path) -> tuple[int, ...]:
    """What changes when the file at ``path`` does; empty for none. Its content may change while size and
    mtime stay, as when it comes from another archive whose files have a fixed date, but not its ctime."""
    if not path.exists():
        return ()
    status = path.stat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def digest(data: Any) -> str:
    """32 hexadecimal digits that identify ``data``, which must be JSON."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]


def find(spec: CorpusSpec) -> Sources:
    """The files of ``spec``. No ``data`` means Tiny Shakespeare, from ``$MEMFORMERS_DATA``, the user's cache,
    or its public address, else the built-in play, with a warning."""
    if spec.corpus == PYTHON_SOURCE:
        documents = [Part("", name, path, True) for name, path in python_sources().items()]
        return Sources(PYTHON_SOURCE, PYTHON_SOURCE, documents)
    if (spec.test and not spec.validation) or (spec.validation and not spec.data):
        missing = "validation" if spec.data else "data"
        present = "test" if spec.test else "validation"
        raise UserError(f"a text for {present} was given, and none as {missing}.")
    if spec.data in (BUILTIN, STAND_IN):
        return builtin_play(is_stand_in=spec.data == STAND_IN)
    if is_hub_name(spec.data):
        return on_hub(spec)
    return at_path(spec, local(spec.data)) if spec.data else tiny_shakespeare()


def builtin_play(length: int = BUILTIN_LENGTH, seed: int = 0, is_stand_in: bool = False) -> Sources:
    name = f"built-in play (seed {seed})"
    source = f"made by code: {length:,} characters, seed {seed}"
    return Sources(name, source, [Part("", name, write_play(length, seed).encode(), False)], {}, is_stand_in)


def on_hub(spec: CorpusSpec) -> Sources:
    """A dataset on the hub has the splits that it names there."""
    tables = hub_tables(spec.data)
    parts = []
    left_out: LeftOut = {"of no split and": []}
    for table in tables:
        splits = splits_named(table.split)
        if len(tables) == 1:
            parts.append(Part("", table.name, table, True))
        elif splits:
            parts.append(Part(splits[0], f"{table.name} {table.split}", table, True))
        else:
            left_out["of no split and"].append(table.split)
    splits_found = [part.split for part in parts]
    if splits_found != [""] and (
        not {TRAIN, VALIDATION} <= {*splits_found} or len({*splits_found}) < len(parts)
    ):
        names = ", ".join(table.split for table in tables)
        raise UserError(
            f"expected {spec.data} to have a train, a validation and perhaps a test split, got {names}; "
            f"name one of them, as {spec.data}?split={tables[0].split}."
        )
    if spec.validation:
        raise UserError(f"{spec.data} has its own splits; omit validation, or prepare it without.")
    parts.sort(key=lambda part: [*SPLITS, ""].index(part.split))
    return Sources(spec.data, spec.data, parts, left_out)


def at_path(spec: CorpusSpec, path: Path) -> Sources:
    """A folder is Tiny Shakespeare, has splits, or is one of documents."""
    for name in IN_FOLDER:
        if (path / name).is_file():
            return tiny_shakespeare_at(path / name)
    left_out: LeftOut = defaultdict(list)

    # The files or folders of each split.
    split_paths: dict[str, list[Path]] = {}
    if spec.validation:
        split_paths = {TRAIN: [path], VALIDATION: [local(spec.validation)]}
        if spec.test:
            split_paths[TEST] = [local(spec.test)]
    elif path.is_dir() and not holds_tokens(path):
        split_paths = splits_in(path, left_out)

    if spec.corpus:
        is_one_file = bool(benchmark(spec.corpus).sizes)
        has_form = path.is_file() if is_one_file else set(split_paths) == set(SPLITS)
        if not has_form:
            form = "one file, decompressed" if is_one_file else "a folder with train, valid and test"
            raise UserError(f"expected {path} to be {form}, as {spec.corpus} is published; name that.")

    # The files of each split, in order.
    parts = []
    for split, paths in (split_paths or {"": [path]}).items():
        for split_path in paths:
            is_shard = len(paths) > 1
            parts += parts_at(split, split_path, left_out, is_shard=is_shard)
    sources = Sources(spec.corpus or path.resolve().name, spec.data, parts, left_out)
    if spec.text_field != TEXT_FIELD and not any(part.has_fields for part in parts):
        suffixes = ", ".join((*JSON_SUFFIXES, *TABLE_KINDS))
        raise UserError(
            f"text_field={spec.text_field!r} names a field of JSON lines or a column of a table, and "
            f"{parts[0].name} is neither; leave it out, or name a file that ends with one of {suffixes}."
        )
    return sources


def parts_at(split: str, path: Path, left_out: LeftOut, *, is_shard: bool = False) -> list[Part]:
    """The files at ``path``. Those of a folder are documents, and so are shards, of which a split has
    several."""
    if holds_tokens(path):
        raise UserError(f"{path} holds tokens and no text; train on it as --data, or name the text itself.")
    if path.is_dir():
        if not (files := files_below(path, left_out)):
            raise UserError(f"{path} contains no text; name another file or folder.")
        return [Part(split, name, file, True) for name, file in sorted(files.items())]
    if not path.exists() and path != STDIN:
        for suffix in ID_SUFFIXES:  # Megatron names its data without one
            if path.with_name(f"{path.name}{suffix}").is_file():
                raise UserError(f"{path} doesn't exist; name {path}{suffix}.")
        raise UserError(f"{path} doesn't exist; name a text file, a folder of texts or a .jsonl file.")
    if is_beside_ids(path):
        raise UserError(f"{path} only describes token ids in another file; name that file.")
    return [Part(split, path.name, path, is_shard)]


def tiny_shakespeare_at(path: Path) -> Sources:
    if (actual := checksum(path)) != TINY_SHAKESPEARE_SHA256:
        raise UserError(
            f"expected {path} to be Tiny Shakespeare, sha256 {TINY_SHAKESPEARE_SHA256}, got "
            f"{path.stat().st_size:,} bytes with {actual}: the download is incomplete, or it is another "
            f"text; remove it, name the file itself, or rename it to read all files of the folder."
        )
    return Sources(TINY_SHAKESPEARE, str(path), [Part("", path.name, path, False)])


def tiny_shakespeare() -> Sources:
    # From a file of the user's.
    cached = Path(platformdirs.user_cache_dir("memformers")) / IN_FOLDER[0]
    try:
        if named := os.environ.get("MEMFORMERS_DATA", ""):
            path = Path(named)
            if path.is_file() or any((path / name).is_file() for name in IN_FOLDER):
                return at_path(CorpusSpec(named), path)
            names = " or ".join(IN_FOLDER)
            problem = f"expected MEMFORMERS_DATA to be a text file or a folder with {names}, got {path}."
            warnings.warn(problem, stacklevel=4)
        if cached.is_file():
            return tiny_shakespeare_at(cached)
    except UserError as error:
        warnings.warn(f"{error} Downloading it.", stacklevel=4)

    # From its public address, or else the play, which is no text of a person's.
    try:
        _, raw = get(TINY_SHAKESPEARE_URL, DOWNLOAD_SECONDS)
        if hashlib.sha256(raw).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise OSError(f"{len(raw):,} bytes that aren't the corpus were received")
    except OSError as error:
        reason = f"Tiny Shakespeare was neither found nor downloadable ({error}): the built-in play is used,"
        effect = "which is easier to predict, so its losses can't be compared with those of Tiny Shakespeare."
        what_to_do = "To train on that, give --data or MEMFORMERS_DATA its path."
        warnings.warn(f"{reason} {effect}\n{what_to_do}", stacklevel=4)
        return builtin_play(is_stand_in=True)

    # Into the cache, for the next time.
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(cached) as temporary:
            temporary.write_bytes(raw)
    except OSError as error:
        warnings.warn(f"Tiny Shakespeare can't be kept in the cache: {error}", stacklevel=4)
        return Sources(TINY_SHAKESPEARE, TINY_SHAKESPEARE_URL, [Part("", cached.name, raw, False)])
    return tiny_shakespeare_at(cached)


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def python_sources() -> dict[str, Path]:
    """The files of the standard library and of the packages, by their paths, in order."""
    names = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    names += [path for path in sys.path if path.endswith("-packages")]
    paths: set[Path] = set()
    for name in names:
        paths.update(Path(name).resolve().rglob("*.py"))
    return {str(path): path for path in sorted(paths) if path.is_file()}
