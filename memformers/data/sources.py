"""The files of a dataset: those of a user, a published corpus, Tiny Shakespeare or the built-in play."""

import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import atomic_write, checksum, user_path
from memformers.common.network import get
from memformers.data import SPLITS, TEST, TRAIN, VALIDATION
from memformers.data.builtin import write_play
from memformers.data.files import STDIN, File, local, plain_name, raise_unreadable
from memformers.data.foreign import check_folder, check_sizes
from memformers.data.ids import ID_SUFFIXES, documents_beside, index_beside, is_beside_ids
from memformers.data.splits import look_like_splits, refuse_splits, splits_among, splits_named
from memformers.data.tables import (
    TABLE_KINDS,
    TEXT_FIELD,
    HubTable,
    describes_tables,
    hub_tables,
    is_hub_name,
    saved_shards,
)
from memformers.data.tokenizer import Tokenizer
from memformers.runs.folder import CONFIG, EXPERIMENT, FACTS

JSON_SUFFIXES = (".jsonl", ".jsonlines", ".ndjson", ".json")
STORE = ("card.json", "tokenizer.json")  # files that every folder of tokens has
FORMAT = 2  # of these files
TINY_SHAKESPEARE = "Tiny Shakespeare"
TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
IN_FOLDER = ("tinyshakespeare/input.txt", "input.txt")  # where Tiny Shakespeare may be in a data folder
DOWNLOAD_SECONDS = 10.0
BUILTIN, STAND_IN = "builtin", "stand-in"
BUILTIN_LENGTH = 1_000_000  # characters of the built-in play, about those of Tiny Shakespeare
PYTHON_SOURCE = "python-source"  # of this interpreter and its packages, which differ between machines


@dataclass(frozen=True)
class Benchmark:
    tokenizer: str
    vocab_size: int | None = None  # of subwords
    sizes: tuple[int, ...] = ()  # bytes of each split in its one file; empty: each split is a file or folder
    sha256: str = ""  # of that file, if it is published
    documents: tuple[int, ...] = ()  # how many each split has, each a file; empty: a split is one text
    words: tuple[int, ...] = ()  # how many words and ends of lines each split has

    def ends(self, total: int, sha256: str) -> dict[str, int]:
        """Where each split ends in its one file of ``total`` bytes."""
        if total != sum(self.sizes) or (self.sha256 and sha256 != self.sha256):
            raise UserError(
                f"expected the published file of {sum(self.sizes):,} bytes, SHA-256 {self.sha256 or 'any'}, "
                f"got {total:,} bytes, {sha256}; download it again, or prepare it without the corpus's name."
            )
        return {split: sum(self.sizes[: i + 1]) for i, split in enumerate(SPLITS)}

    def check(self, counts: Mapping[str, Any], tokenizer: str) -> None:
        """Raise UserError unless splits of these [`Counts`][memformers.data.dataset.Counts] are whole."""
        of_words = self.words if tokenizer == "word" else ()  # in whose text each token is a word
        for what, expected in (("documents", self.documents), ("tokens", of_words)):
            numbers = tuple(getattr(count, what) for count in counts.values())
            if expected and numbers != expected:
                raise UserError(f"expected {expected} {what}, got {numbers}; is the corpus complete?")


BENCHMARKS = {
    # Mahoney, mattmahoney.net/dc/textdata.html; the splits are those of the papers.
    "enwik8": Benchmark(
        "byte",
        sizes=(90_000_000, 5_000_000, 5_000_000),
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    ),
    "text8": Benchmark("character", sizes=(90_000_000, 5_000_000, 5_000_000)),
    # Merity et al. 2016 (arXiv 1609.07843), table 1.
    "wikitext-103": Benchmark("word", words=(103_227_021, 217_646, 245_569)),
    # Rae et al. 2020 (arXiv 1911.05507), table 2.
    "pg19": Benchmark("bpe", 32_000, documents=(28_602, 50, 100)),
}  # the published corpora, by their names


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

    @property
    def has_ids(self) -> bool:
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
    left_out: dict[str, list[str]] = field(default_factory=dict)  # names of what isn't read, by the reason
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
            if part.has_ids:
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
        missing, other = "validation" if spec.data else "data", "test" if spec.test else "validation"
        raise UserError(f"a text for {other} was given, and none as {missing}.")
    if spec.data in (BUILTIN, STAND_IN):
        return builtin_play(is_stand_in=spec.data == STAND_IN)
    if is_hub_name(spec.data):
        return on_hub(spec)
    return at_path(spec, local(spec.data)) if spec.data else tiny_shakespeare()


def builtin_play(length: int = BUILTIN_LENGTH, seed: int = 0, is_stand_in: bool = False) -> Sources:
    name, source = f"built-in play (seed {seed})", f"made by code: {length:,} characters, seed {seed}"
    return Sources(name, source, [Part("", name, write_play(length, seed).encode(), False)], {}, is_stand_in)


def on_hub(spec: CorpusSpec) -> Sources:
    """A dataset on the hub has the splits that it names there."""
    tables = hub_tables(spec.data)
    parts = []
    left_out: dict[str, list[str]] = {"of no split and": []}
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
    left_out: dict[str, list[str]] = defaultdict(list)

    # The files or folders of each split.
    split_paths: dict[str, list[Path]] = {}
    if spec.validation:
        split_paths = {TRAIN: [path], VALIDATION: [local(spec.validation)]}
        if spec.test:
            split_paths[TEST] = [local(spec.test)]
    elif path.is_dir() and not holds_tokens(path):
        split_paths = splits_in(path, left_out)

    known = benchmark(spec.corpus) if spec.corpus else None
    if known and (not path.is_file() if known.sizes else set(split_paths) != set(SPLITS)):
        form = "one file, decompressed" if known.sizes else "a folder with train, valid and test"
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


def holds_tokens(path: Path) -> bool:
    return all((path / name).is_file() for name in STORE)


def parts_at(split: str, path: Path, left_out: dict[str, list[str]], *, is_shard: bool = False) -> list[Part]:
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


def splits_in(folder: Path, left_out: dict[str, list[str]]) -> dict[str, list[Path]]:
    """The files or folders in ``folder`` that are its splits, if it has such."""
    candidates = []
    for path in visible(folder):
        if not is_beside_ids(path) and not describes_tables(path) and not holds_run(path):
            candidates.append(path)
    split_paths = splits_among(candidates, folder)
    if split_paths:
        chosen = {path for paths in split_paths.values() for path in paths}
        left_out["of no split and"] = [path.name for path in candidates if path not in chosen]
    return split_paths


def visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise_unreadable(error)


def files_below(folder: Path, left_out: dict[str, list[str]]) -> dict[str, Path]:
    """All files in ``folder`` and below, by their paths there, but hidden ones and those of runs and tokens:
    a command may write into the folder of its texts. Links are followed, and each folder is read once.
    UserError for a folder of another library, or one whose files look like splits: they are no documents."""
    files: dict[str, Path] = {}
    seen = set[Path]()
    for parent, subfolders, names in os.walk(folder, onerror=raise_unreadable, followlinks=True):
        path = Path(parent)
        relative = path.relative_to(folder)
        if path.resolve() in seen:
            left_out["folders that are read already are"].append(relative.as_posix())
            subfolders.clear()
            continue
        seen.add(path.resolve())
        check_folder(path, names)

        # What is below is visited in this order.
        shown = sorted(name for name in subfolders if not name.startswith("."))
        runs = [name for name in shown if holds_run(path / name)]
        subfolders[:] = [name for name in shown if name not in runs]
        for name in runs:
            left_out["folders of runs or tokens are"].append((relative / name).as_posix())

        # Of a folder that datasets saved, the files that it lists.
        shards = saved_shards(path)
        texts = []
        for name in shards or names:
            file = path / name
            if name.startswith(".") or is_beside_ids(file) or describes_tables(file):
                continue
            if file.is_file():
                texts.append(file)
                files[(relative / name).as_posix()] = file
            elif not file.exists():
                left_out["links that lead nowhere are"].append((relative / name).as_posix())
        subpaths = [path / name for name in subfolders]
        if named := look_like_splits(sorted([*texts, *subpaths])):
            refuse_splits(named, folder)
    check_sizes(folder, files.values())
    return files


def holds_run(folder: Path) -> bool:
    kinds = ((EXPERIMENT,), (CONFIG, FACTS), STORE)
    return any(all((folder / name).is_file() for name in names) for names in kinds)


def tiny_shakespeare_at(path: Path) -> Sources:
    if (actual := checksum(path)) != TINY_SHAKESPEARE_SHA256:
        raise UserError(
            f"expected {path} to be Tiny Shakespeare, sha256 {TINY_SHAKESPEARE_SHA256}, got "
            f"{path.stat().st_size:,} bytes with {actual}: the download is incomplete, or it is another "
            f"text; remove it, name the file itself, or rename it to read all files of the folder."
        )
    return Sources(TINY_SHAKESPEARE, str(path), [Part("", path.name, path, False)])


def tiny_shakespeare() -> Sources:
    cached = Path(platformdirs.user_cache_dir("memformers")) / IN_FOLDER[0]
    try:
        if named := os.environ.get("MEMFORMERS_DATA", ""):
            path = Path(named)
            if path.is_file() or any((path / name).is_file() for name in IN_FOLDER):
                return at_path(CorpusSpec(named), path)
            places = " or ".join(IN_FOLDER)
            what = f"expected MEMFORMERS_DATA to be a text file or a folder with {places}, got {path}."
            warnings.warn(what, stacklevel=4)
        if cached.is_file():
            return tiny_shakespeare_at(cached)
    except UserError as error:
        warnings.warn(f"{error} Downloading it.", stacklevel=4)
    try:
        _, raw = get(TINY_SHAKESPEARE_URL, DOWNLOAD_SECONDS)
        if hashlib.sha256(raw).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise OSError(f"{len(raw):,} bytes that aren't the corpus were received")
    except OSError as error:
        why = f"Tiny Shakespeare was neither found nor downloadable ({error}): the built-in play is used."
        what_to_do = "to train on Tiny Shakespeare, give --data or MEMFORMERS_DATA its path."
        warnings.warn(f"{what_to_do}\n{why}", stacklevel=4)
        return builtin_play(is_stand_in=True)
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


def benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UserError(f"corpus={name!r} is unknown; use one of {', '.join([*BENCHMARKS, PYTHON_SOURCE])}.")
    return BENCHMARKS[name]


def python_sources() -> dict[str, Path]:
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    roots |= {Path(path).resolve() for path in sys.path if path.endswith("-packages")}
    return {str(path): path for path in sorted({p for r in roots for p in r.rglob("*.py")}) if path.is_file()}
