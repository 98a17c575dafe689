"""The files of a dataset: those of a user, a published corpus, Tiny Shakespeare or the built-in play."""

import hashlib
import json
import os
import re
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from memformers.data.files import OF_IDS, STDIN, File, documents_beside, local, plain_name, raise_unreadable
from memformers.data.tokenizer import Tokenizer
from memformers.runs.folder import CONFIG, EXPERIMENT, FACTS

SPLIT_NAME = re.compile(r"(?:wiki\.)?(train|validation|valid|val|test)(?:\.\w+)*", re.IGNORECASE)
"""The names of the files or folders that are a split, also as WikiText publishes them."""
LIKE_SPLIT = re.compile(r"(train|validation|valid|val|dev|eval|test)(?:[-.].*)?", re.IGNORECASE)
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
    text_field: str = "text"
    tokenizer: str = "character"
    vocab_size: int | None = None  # of learned words or subwords, or of token ids
    corpus: str = ""  # the published corpus, of BENCHMARKS, that data holds, or PYTHON_SOURCE
    # What tokenizer="bpe" has learned from this text before, such as that of a run which is resumed.
    subwords: Tokenizer | None = field(default=None, compare=False, repr=False)


class Part(NamedTuple):
    split: str  # empty where the corpus is to be divided
    name: str
    file: File
    is_document: bool

    @property
    def has_ids(self) -> bool:
        named = isinstance(self.file, Path) and self.file.suffix.lower() in (".npy", ".bin")
        return named or isinstance(self.file, np.ndarray)


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
        on_disk = sum(p.stat().st_size * (1 if plain_name(p.name) == p.name else 4) for p in self.paths)
        return on_disk + sum(len(part.file) for part in self.parts if not isinstance(part.file, Path))

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
        if spec.subwords:
            identities.append(digest(spec.subwords.to_json()))
        states = []
        for path, part in zip(self.paths, self.parts, strict=True):
            identities.append((str(path.resolve()), part.split, part.is_document))
            states.append(state_of(path))
            if part.has_ids:
                states.append(state_of(documents_beside(path)))
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
    return at_path(spec, local(spec.data)) if spec.data else tiny_shakespeare()


def builtin_play(length: int = BUILTIN_LENGTH, seed: int = 0, is_stand_in: bool = False) -> Sources:
    name, source = f"built-in play (seed {seed})", f"made by code: {length:,} characters, seed {seed}"
    return Sources(name, source, [Part("", name, write_play(length, seed).encode(), False)], {}, is_stand_in)


def at_path(spec: CorpusSpec, path: Path) -> Sources:
    """A folder is Tiny Shakespeare, has splits, or is one of documents."""
    if text_file := next((path / name for name in IN_FOLDER if (path / name).is_file()), None):
        return tiny_shakespeare_at(text_file)
    left_out: dict[str, list[str]] = defaultdict(list)
    if spec.validation:
        named = {TRAIN: path, VALIDATION: local(spec.validation), TEST: local(spec.test)}
        places = {split: place for split, place in named.items() if split != TEST or spec.test}
    else:
        places = splits_in(path, left_out) if path.is_dir() and not holds_tokens(path) else {}
    known = benchmark(spec.corpus) if spec.corpus else None
    if known and (not path.is_file() if known.sizes else set(places) != set(SPLITS)):
        form = "one file, decompressed" if known.sizes else "a folder with train, valid and test"
        raise UserError(f"expected {path} to be {form}, as {spec.corpus} is published; name that.")
    parts = [part for s, p in (places or {"": path}).items() for part in parts_at(s, p, left_out)]
    return Sources(spec.corpus or path.resolve().name, spec.data, parts, left_out)


def holds_tokens(path: Path) -> bool:
    return all((path / name).is_file() for name in STORE)


def parts_at(split: str, path: Path, left_out: dict[str, list[str]]) -> list[Part]:
    if holds_tokens(path):
        raise UserError(f"{path} holds tokens and no text; train on it as --data, or name the text itself.")
    if path.is_dir():
        if not (files := files_below(path, left_out)):
            raise UserError(f"{path} contains no text; name another file or folder.")
        return [Part(split, name, file, True) for name, file in sorted(files.items())]
    if not path.exists() and path != STDIN:
        raise UserError(f"{path} doesn't exist; name a text file, a folder of texts or a .jsonl file.")
    return [Part(split, path.name, path, False)]


def splits_in(folder: Path, left_out: dict[str, list[str]]) -> dict[str, Path]:
    """The files or folders in ``folder`` that are its splits, if some are to train and to validate on. Names
    there, or in a folder there, that look like other splits are refused: their texts would be learned."""
    by_split: dict[str, list[Path]] = {}
    for path in visible(folder):
        named = SPLIT_NAME.fullmatch(path.name)
        split = next(s for s in SPLITS if s.startswith(named[1].lower()[:3])) if named else ""
        by_split.setdefault(split, []).append(path)
    if not {TRAIN, VALIDATION} <= by_split.keys():
        for place in [folder, *(path for path in visible(folder) if path.is_dir() and not holds_run(path))]:
            looks = {p: m[1].lower() for p in visible(place) if (m := LIKE_SPLIT.fullmatch(p.name))}
            if len(set(looks.values())) > 1:
                names = some_of([path.relative_to(folder).as_posix() for path in looks])
                raise UserError(
                    f"expected the splits in {folder} to be train.*, valid.* and perhaps test.*, got "
                    f"{names}; rename them, name their own folder, or use --data, --validation and --test."
                )
        return {}
    others = [path for path in by_split.pop("", ()) if not path.name.endswith(OF_IDS) and not holds_run(path)]
    left_out["of no split and"] = [path.name for path in others]
    for split, paths in by_split.items():
        if len(paths) > 1:
            raise UserError(f"{' and '.join(map(str, paths))} are all for {split}; keep one of them there.")
    return {split: by_split[split][0] for split in SPLITS if split in by_split}


def visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise_unreadable(error)


def files_below(folder: Path, left_out: dict[str, list[str]]) -> dict[str, Path]:
    """All files in ``folder`` and below, by their paths there, but hidden ones and those of runs and tokens:
    a command may write into the folder of its texts. Links are followed, and each folder is read once."""
    files: dict[str, Path] = {}
    seen = set[Path]()
    for where, folders, names in os.walk(folder, onerror=raise_unreadable, followlinks=True):
        at, here = Path(where), Path(where).relative_to(folder)
        if at.resolve() in seen:
            left_out["folders that are read already are"].append(here.as_posix())
            folders.clear()
            continue
        seen.add(at.resolve())
        folders[:] = sorted(name for name in folders if name[0] != ".")
        runs = [name for name in folders if holds_run(at / name)]
        left_out["folders of runs or tokens are"] += [(here / name).as_posix() for name in runs]
        folders[:] = [name for name in folders if name not in runs]
        for name in names:
            if name[0] != "." and not name.endswith(OF_IDS):
                if (at / name).is_file():
                    files[(here / name).as_posix()] = at / name
                elif not (at / name).exists():
                    left_out["links that lead nowhere are"].append((here / name).as_posix())
    return files


def holds_run(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in n) for n in ((EXPERIMENT,), (CONFIG, FACTS), STORE))


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
