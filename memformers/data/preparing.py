"""From files to a folder of tokens, in constant memory; subwords are encoded on all cores.

The text is first gathered into one file of UTF-8, which is deleted in the end: so it can't change between the
time when it is divided, learned from and encoded. It is encoded in pieces that are cut by a rule of the text
alone ([`pieces`][memformers.data.subwords.pieces]), so the number of cores changes nothing.
"""

import mmap
import random
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import Timeout
from tqdm import tqdm

from memformers.common.atomic_dir import atomic_dir, remove_leftovers
from memformers.common.errors import UserError
from memformers.common.files import locked
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.corpora import IN_FOLDER, split_of
from memformers.data.files import COMPRESSED, STDIN, forget
from memformers.data.gathering import Gathered, Recipe, gather
from memformers.data.store import (
    TEST,
    TRAIN,
    VALIDATION,
    Card,
    Counts,
    TokenFile,
    TokenStore,
    documents_file,
    is_store,
    open_store,
    smallest_type,
    write_card,
)
from memformers.data.subwords import PIECE, pieces
from memformers.data.tokenizer import Numbers, Tokenizer
from memformers.data.tokenizers import OWN, learn, load_tokenizer, save_tokenizer

BIG = 32 << 20
"""Bytes of a text from which on it isn't read into memory, but prepared on the disk."""
SMALL_JOB = 4 << 20
"""Bytes of text whose encoding takes so short that no bar shows it."""
JOB = 2 << 20
"""Bytes that are encoded at once."""
LEARNED_FROM = 32 << 20
"""The most bytes of the training part, in pieces from all over it, that subwords are learned from."""
TEXT = "text"
Part = tuple[int, int, bool]
"""Where a piece of the gathered text begins and ends, and whether its text or document ends there."""


def prepare(recipe: Recipe, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write ``folder``, the tokens of the text of ``recipe``; it appears whole or not at all. Returns it.
    With the ``tokenizer`` of a trained model, the whole text is a test.

    Beside another preparation, it waits until that one has ended; where ``folder`` is there then, nothing is
    left to do. What a killed one left behind is removed.

    Raises UserError for a text that can't be read, that changes meanwhile or is too short; OSError if the
    folder can't be written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone_beside(folder):
        if is_store(folder):
            return folder
        remove_leftovers(folder.parent)
        with atomic_dir(folder) as temporary, naming(folder), ExitStack() as opened:
            unknown = any(path == STDIN or path.suffix in COMPRESSED for path in recipe.files.values())
            total = None if unknown else recipe.size
            bar = opened.enter_context(bytes_bar("reading", total))
            text = gather(recipe, temporary / TEXT, bar.update)
            bar.close()
            known = BENCHMARKS.get(recipe.corpus)
            splits = known.places(text.files, text.bytes, text.sha256) if known else split_places(text)
            if tokenizer:
                splits = {TEST: (0, text.bytes)}
            counts = write_tokens(text, splits, recipe, temporary, tokenizer)
            if known:
                known.check(counts, recipe.tokenizer)
            (temporary / TEXT).unlink()
    return folder


def open_prepared(
    data: str, document_separator: str = "", tokenizer: str = "character", vocab_size: int | None = None
) -> TokenStore | None:
    """The folder of tokens that ``data`` names, or that of a text of more than [`BIG`][] bytes, in the user's
    cache; None for anything else. Raises UserError for a folder with another tokenizer than the one that is
    asked for."""
    path = Path(data)
    if not data or not path.exists():
        return None
    if not is_store(path):
        size = vocab_size if tokenizer in ("word", "bpe") else None
        recipe = Recipe(path, "", document_separator, tokenizer, size)
        alone = path.is_dir() and any((path / name).is_file() for name in IN_FOLDER)
        return None if alone or recipe.text_size < BIG else open_store(in_cache(recipe))
    store = open_store(path)
    if document_separator or tokenizer not in ("character", store.tokenizer.name):
        raise UserError(
            f"{path} is divided into tokens already, by tokenizer={store.tokenizer.name!r}; leave out "
            f"tokenizer and document_separator."
        )
    return store


def in_cache(recipe: Recipe) -> Path:
    """The folder of the tokens of ``recipe`` in the user's cache, prepared unless it is there."""
    parent = Path(platformdirs.user_cache_dir("memformers")) / "tokens"
    folder, size = parent / recipe.key(), recipe.vocab_size
    left_to_the_text = parent / replace(recipe, vocab_size=None).key()
    if is_store(left_to_the_text) and size in (None, load_tokenizer(left_to_the_text).vocab_size):
        return left_to_the_text
    if not is_store(folder):
        print(f"{recipe.source} is large and is prepared once, in {folder}.", file=sys.stderr)
    return prepare(recipe, folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block whose errors of the system name ``path`` if they name no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def alone_beside(folder: Path) -> Iterator[None]:
    """A block in which nothing else is prepared beside ``folder``; it waits for that."""
    path = folder.parent / ".preparing.lock"
    try:
        lock = locked(path)
    except Timeout:
        print(f"waiting for another process that prepares a text in {folder.parent}", file=sys.stderr)
        lock = locked(path, seconds=-1)
    with lock:
        yield


def split_places(text: Gathered) -> dict[str, tuple[int, int]]:
    """Where training and validation begin and end, in bytes, as in
    [`Corpus.split`][memformers.data.corpora.Corpus.split]."""
    cut = text.place(split_of(text.characters, text.lengths))
    return {TRAIN: (0, cut), VALIDATION: (cut, text.bytes)}


def write_tokens(
    text: Gathered,
    splits: Mapping[str, tuple[int, int]],
    recipe: Recipe,
    folder: Path,
    given: Tokenizer | None = None,
) -> dict[str, Counts]:
    """Write the tokens of the ``splits`` of ``text``, each from one byte to another, the tokenizer, which is
    learned unless it is ``given``, and the card; returns the size of each split."""
    with open(folder / TEXT, "rb") as file, ExitStack() as opened:
        whole = opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        tokenizer = given or learned(whole, splits, recipe)
        save_tokenizer(tokenizer, folder)
        bar = opened.enter_context(bytes_bar("encoding", text.bytes))
        counts = {
            name: write_split(whole, text, place, tokenizer, folder / name, bar)
            for name, place in splits.items()
        }
    for name, found in counts.items():
        if found.tokens < 2:
            raise UserError(f"{recipe.source} leaves {found.tokens} tokens for {name}; use a longer text.")
    source, name = str(recipe.source), recipe.corpus or recipe.source.resolve().name
    write_card(Card(name, source, text.sha256, tokenizer.name, counts, len(text.ends)), folder)
    return counts


def learned(whole: mmap.mmap, splits: Mapping[str, tuple[int, int]], recipe: Recipe) -> Tokenizer:
    """The tokenizer of ``recipe`` for the text in ``whole``: characters from all of it, words from the
    training part, subwords from pieces all over the training part."""
    if recipe.tokenizer not in OWN:
        return load_tokenizer(Path(recipe.tokenizer))
    everywhere = recipe.tokenizer in ("character", "frequency")
    begin, end = (0, len(whole)) if everywhere else splits[TRAIN]
    places: Iterable[tuple[int, int]] = pieces_of(whole, begin, end)
    size = end - begin
    if recipe.tokenizer == "bpe" and size > LEARNED_FROM:
        places, size = list(places), LEARNED_FROM
        random.Random(0).shuffle(places)
        places = islice(places, size // PIECE)
    with bytes_bar("learning tokens", size) as bar:

        def texts() -> Iterator[str]:
            for a, b in places:
                yield text_at(whole, a, b)
                bar.update(b - a)

        return learn(recipe.tokenizer, recipe.vocab_size, texts())


def pieces_of(whole: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The [`pieces`][memformers.data.subwords.pieces] of a map, in memory only while it is used."""
    for place in pieces(whole, begin, end):
        yield place
        forget(whole)


def text_at(whole: mmap.mmap, begin: int, end: int) -> str:
    """The text between two bytes."""
    return whole[begin:end].decode("utf-8", errors="surrogateescape")


def write_split(
    whole: mmap.mmap,
    text: Gathered,
    place: tuple[int, int],
    tokenizer: Tokenizer,
    path: Path,
    bar: Any,
) -> Counts:
    """Write the tokens of the split that is at ``place``, and where its documents begin; returns its size."""
    begins, characters, words = array("q", [0]), 0, 0
    with TokenFile(path.with_suffix(".npy"), smallest_type(tokenizer.vocab_size)) as file:
        for job in jobs(whole, text, place):
            done = encoded(whole, job, tokenizer)
            file.append(done.tokens)
            characters, words = characters + done.characters, words + done.words
            at = file.length - len(done.tokens)
            for (_, _, is_end), tokens in zip(job, done.lengths, strict=True):
                at += tokens
                if is_end:
                    begins.append(at)
            bar.update(job[-1][1] - job[0][0])
    if not text.ends:
        return Counts(place[1] - place[0], characters, words, file.length)
    with TokenFile(path.with_name(documents_file(path.name)), np.int64) as documents:
        documents.append(np.frombuffer(begins, dtype=np.int64))
    return Counts(place[1] - place[0], characters, words, file.length, len(begins) - 1)


def jobs(whole: mmap.mmap, text: Gathered, place: tuple[int, int]) -> Iterator[list[Part]]:
    """The pieces of a split, in order, some [`JOB`][] bytes at a time."""
    job: list[Part] = []
    begin, stop = place
    first = bisect_right(text.ends, begin)
    for end in chain((min(text.ends[i], stop) for i in range(first, len(text.ends))), [stop]):
        if begin == end:
            continue
        for a, b in pieces_of(whole, begin, end):
            job.append((a, b, b == end))
            if b - job[0][0] >= JOB:
                yield job
                job = []
        begin = end
    if job:
        yield job


@dataclass(frozen=True)
class Encoded:
    """A job, done."""

    tokens: Numbers
    lengths: list[int]
    """How many tokens each piece has."""
    characters: int
    words: int


def encoded(whole: mmap.mmap, job: list[Part], tokenizer: Tokenizer) -> Encoded:
    """The tokens of some pieces of the text in ``whole``, which is in memory only meanwhile."""
    texts = [text_at(whole, begin, end) for begin, end, _ in job]
    forget(whole)
    ended = [tokenizer.ended(text) if is_end else text for text, (*_, is_end) in zip(texts, job, strict=True)]
    tokens = tokenizer.numbers_of(ended)
    words = sum(len(text.split()) for text in texts)
    numbers = np.concatenate(tokens).astype(smallest_type(tokenizer.vocab_size))
    return Encoded(numbers, list(map(len, tokens)), sum(map(len, texts)), words)


def bytes_bar(what: str, total: int | None) -> "tqdm[Any]":
    """A progress bar of bytes a second; a short text needs none."""
    short = total is not None and total < SMALL_JOB
    return tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=True if short else None, leave=False
    )
