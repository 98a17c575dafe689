"""From files to a dataset of tokens, in constant memory; subwords are encoded on all cores.

The text is first read into one file of UTF-8: so it can't change before it is encoded. For a small text, the
folder is temporary, and tokens stay in memory.
"""

import hashlib
import mmap
import random
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import platformdirs
from filelock import Timeout

from memformers.common.console import Progress
from memformers.common.errors import UserError
from memformers.common.files import atomic_dir, locked, remove, remove_leftovers, user_path, write_json
from memformers.data import SPLITS, TEST, TRAIN, VALIDATION
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.corpus_reader import Text, as_array, read
from memformers.data.dataset import (
    CARD,
    Counts,
    DatasetInfo,
    SplitWriter,
    TokenDataset,
    is_store,
    open_store,
    read_dataset,
)
from memformers.data.files import CONTEXT, PIECE, WORD_END, drop_resident_pages, local, pieces
from memformers.data.kept_text import TextCounter
from memformers.data.sources import (
    TINY_SHAKESPEARE,
    TINY_SHAKESPEARE_SHA256,
    CorpusSpec,
    IdDocuments,
    Part,
    Sources,
    find,
)
from memformers.data.tables import TEXT_FIELD, is_hub_name
from memformers.data.tokenizer import IdTokenizer, Tokenizer
from memformers.data.tokenizers import OWN, check_name, learn, load_tokenizer, save_tokenizer

# Bytes of a text from which on its tokens stay on the disk.
BIG = 32 << 20
# Bytes of a text whose encoding takes so short that no bar shows it.
SMALL_JOB = 4 << 20
# Bytes that are encoded at once, on all cores.
JOB = 2 << 20
# The most bytes, in pieces from all over the training part, from which subwords are learned.
LEARNED_FROM = 32 << 20
# Bytes that a tokenizer may need to see at once; they take about 130 times as much memory.
MAX_UNCUT = 32 << 20
# The file of the text while it is encoded.
TEXT = "text"
Job = list[tuple[int, int, int, int]]
"""Where pieces begin and end, and where their documents do."""


def dataset_of(spec: CorpusSpec, tokenizer: Tokenizer | None = None) -> TokenDataset:
    """The tokens of ``spec``; those of a large text are in the user's cache. With the ``tokenizer`` of a
    trained model, a text that has no splits is a test."""
    if not spec.data or is_hub_name(spec.data) or not is_store(local(spec.data)):
        return dataset_from(find(spec), spec, tokenizer)
    path = local(spec.data)
    store = open_store(path)
    if spec.tokenizer.endswith(".json"):
        tokenizer = tokenizer or load_tokenizer(Path(spec.tokenizer))
    if tokenizer and store.tokenizer.to_json() != tokenizer.to_json():
        raise UserError(f"{path} has the tokens of another tokenizer; name the text.")
    # It is divided into splits, documents and tokens.
    has_other_tokens = spec.tokenizer not in ("character", store.info.tokenizer)
    dividing = {
        "tokenizer": has_other_tokens and not tokenizer,
        "validation": spec.validation,
        "test": spec.test,
        "text_field": spec.text_field != TEXT_FIELD,
        "document_separator": spec.document_separator,
        "document_end": spec.document_end is not None,
    }
    if names := [name for name, is_given in dividing.items() if is_given]:
        state = f"prepared with tokenizer={store.info.tokenizer!r} already"
        raise UserError(f"{path} is {state}; omit {', '.join(names)}, or name the text.")
    return store


def dataset_from(sources: Sources, spec: CorpusSpec, tokenizer: Tokenizer | None = None) -> TokenDataset:
    is_large = sources.is_remote or sources.size >= BIG
    if is_large and sources.are_files and not tokenizer:
        store = open_store(in_cache(sources, spec))
        # The same file may have been prepared under another path.
        return replace(store, info=replace(store.info, source=sources.source))
    temporary = TemporaryDirectory(prefix="memformers-", ignore_cleanup_errors=True)
    folder = Path(temporary.name)
    info, names = tokenize(sources, spec, folder, tokenizer)
    dataset = read_dataset(folder, info, in_memory=not is_large)
    splits = {name: replace(split, names=names[name]) for name, split in dataset.splits.items()}
    return replace(dataset, splits=splits, folder=temporary if is_large else None)


def prepare(spec: CorpusSpec, folder: Path, sources: Sources | None = None) -> Path:
    """Write the tokens of ``spec`` to the new ``folder``, which appears whole or not at all; returns it. It
    waits while another process prepares a text in the same parent folder. UserError if ``folder`` exists."""
    check_is_new(folder)
    sources = sources or find(spec)
    with preparing_in(folder.parent):
        check_is_new(folder)  # the process that it waited for may have written it
        write_store(sources, spec, folder, is_new=True)
    return folder


def check_is_new(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder, with --out in a shell.")


@contextmanager
def preparing_in(parent: Path) -> Iterator[None]:
    """A block in which no other process prepares a text in ``parent``; it waits for one that does."""
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / ".preparing.lock"
    try:
        lock = locked(path)
    except Timeout:
        print(f"waiting for another process that prepares a text in {parent}", file=sys.stderr)
        lock = locked(path, seconds=-1)
    with lock:
        yield


def write_store(sources: Sources, spec: CorpusSpec, folder: Path, *, is_new: bool) -> None:
    """Write the tokens of ``sources`` to ``folder``. Unless it ``is_new``, they replace what is there."""
    try:
        remove_leftovers(folder.parent)
        with atomic_dir(folder) as temporary:
            tokenize(sources, spec, temporary)
            if is_new:
                check_is_new(folder)  # a user may have made it in the meantime
    except OSError as error:  # such as that of a full disk
        error.filename = error.filename or str(folder)
        raise


def prepare_ids(folder: str | Path, ids: Any, vocab_size: int) -> Path:
    """Write your token ids to ``folder``, for use as ``TrainConfig(data=folder)``.

    Args:
        folder: The new folder.
        ids: An array ``[n]`` of an integer type; or documents, such as pieces of music, as a list, a
            generator or any other iterable of such arrays, of which one at a time is in memory. About the
            last tenth is for validation. Or a dict of these by split: train, validation and, if there is
            one, test.
        vocab_size: The number of different ids; each must be below it.

    Returns:
        The folder.

    Raises:
        ValueError: For ids that are negative, not below ``vocab_size``, or of no integer type, and for a
            folder that is there already.
        OSError: If the folder can't be written.

    Examples:
        >>> import numpy as np
        >>> from memformers import prepare_ids
        >>> pieces = (np.arange(length) % 7 for length in (60, 90, 50))
        >>> print(prepare_ids("tokens/pieces", pieces, vocab_size=7))
        tokens/pieces
    """
    folder = user_path(folder)
    check_is_new(folder)
    by_split = ids if isinstance(ids, Mapping) else {"": ids}
    parts = []
    for split, value in by_split.items():
        name = f"ids {split}".rstrip()
        if hasattr(value, "__array__") or isinstance(value, str) or not isinstance(value, Iterable):
            parts.append(Part(split, name, as_array(value), False))
        else:
            parts.append(Part(split, name, IdDocuments(value), True))
    sources = Sources(folder.name, "token ids", parts)
    return prepare(CorpusSpec(vocab_size=vocab_size), folder, sources)


def in_cache(sources: Sources, spec: CorpusSpec) -> Path:
    """The folder of the tokens of ``sources`` in the user's cache; it replaces that of earlier files."""
    parent = Path(platformdirs.user_cache_dir("memformers")) / "tokens"
    folder = parent / sources.cache_path(spec)
    if is_store(folder):
        return folder
    # The same tokens may be there as those of a vocabulary of any size, or of one that was learned from the
    # text.
    learned = replace(spec, subwords=None)
    of_any_size = replace(learned, vocab_size=None)
    for similar in (of_any_size, learned):
        similar_folder = parent / sources.cache_path(similar)
        if is_store(similar_folder) and has_vocabulary(similar_folder, spec):
            return similar_folder
    print(f"{sources.source} is large and is prepared once, in {folder}.", file=sys.stderr)
    try:
        with preparing_in(folder.parent):
            if not is_store(folder):  # the process that it waited for may have written the same tokens
                write_store(sources, spec, folder, is_new=False)
    except OSError as error:
        raise UserError(
            f"the tokens of {sources.source} can't be written to the cache: {error}; set XDG_CACHE_HOME "
            f"to a folder with space, or choose one with memformers prepare --out."
        ) from None
    for earlier in folder.parent.glob("*/"):
        if earlier != folder and is_store(earlier):
            remove(earlier)
    return folder


def has_vocabulary(folder: Path, spec: CorpusSpec) -> bool:
    """Whether the tokens in ``folder`` are of the size and the subwords that ``spec`` wants."""
    tokenizer = load_tokenizer(folder)
    if spec.subwords:
        return bool(tokenizer.to_json() == spec.subwords.to_json())
    return spec.vocab_size in (None, tokenizer.vocab_size)


def tokenize(
    sources: Sources, spec: CorpusSpec, folder: Path, tokenizer_given: Tokenizer | None = None
) -> tuple[DatasetInfo, dict[str, Sequence[str]]]:
    """Write the tokens of ``sources`` into ``folder``, and the card; returns this, and the names of each
    split's documents, or none where there are too many."""
    check_name(spec.tokenizer)
    if any(part.has_ids(spec.tokenizer) for part in sources.parts):
        spec = replace(spec, vocab_size=n_ids(spec, tokenizer_given))

    # Everything that is read, in one file.
    with bytes_bar("reading", sources.size) as bar:
        text = read(sources, spec, folder / TEXT, bar.update)
    if tokenizer_given and tokenizer_given.name == "ids" and not text.are_ids:
        raise UserError(f"the model reads token ids; name a .npy or .bin file, not {sources.source}.")

    # Where each split ends in it.
    corpus = BENCHMARKS.get(spec.corpus)
    ends = corpus.ends(text.bytes, text.sha256) if corpus and corpus.sizes else text.splits
    if "" in ends:
        cut = text.offset_of(split_of(text.characters, text.lengths if text.are_documents else ()))
        ends = {TEST: text.bytes} if tokenizer_given else {TRAIN: cut, VALIDATION: text.bytes}

    # The tokens of each split.
    counts: dict[str, Counts] = {}
    names: dict[str, Sequence[str]] = {}
    begin = 0
    with open(folder / TEXT, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        tokenizer = tokenizer_given or tokenizer_for(raw, text, ends.get(TRAIN, 0), spec)
        with bytes_bar("encoding", text.bytes) as bar:
            for split, end in ends.items():
                writer = SplitWriter(folder, split, tokenizer.vocab_size)
                write_split(raw, text, begin, end, tokenizer, writer, bar)
                counts[split] = writer.close(are_documents=text.are_documents)
                first = bisect_right(text.ends, begin)
                split_names = text.names[first : first + counts[split].documents]
                names[split] = split_names if len(split_names) == counts[split].documents else ()
                begin = end
    (folder / TEXT).unlink()
    check_splits(counts, sources)
    if corpus:
        corpus.check(counts, spec.tokenizer)

    # The card. Splits that the user made are a part of what identifies the text.
    sha256 = text.sha256
    if len(text.splits) > 1 and not corpus:
        sha256 = hashlib.sha256(f"{sha256} {ends}".encode()).hexdigest()
    name = TINY_SHAKESPEARE if sha256 == TINY_SHAKESPEARE_SHA256 else sources.name
    kind = spec.tokenizer if spec.tokenizer == "frequency" else tokenizer.name
    documents = len(text.ends) if text.are_documents else 0
    info = DatasetInfo(name, sources.source, sha256, kind, counts, documents, sources.is_stand_in)
    save_tokenizer(tokenizer, folder)
    write_json(folder / CARD, info)
    return info, names


def check_splits(counts: dict[str, Counts], sources: Sources) -> None:
    for split, size in counts.items():
        if size.tokens < 2:
            raise UserError(f"{sources.source} leaves {size.tokens} tokens for {split}; use a longer text.")
    if not set(counts) <= set(SPLITS) or (TRAIN in counts) != (VALIDATION in counts):
        raise UserError(f"expected splits train, validation and perhaps test, got {', '.join(counts)}.")


def n_ids(spec: CorpusSpec, tokenizer: Tokenizer | None) -> int | None:
    """How many different token ids a file may have: those of the model that reads them, of the tokenizer
    that made them, or of the settings. So the same file is read alike by every command."""
    if tokenizer:
        return tokenizer.vocab_size
    return (
        load_tokenizer(Path(spec.tokenizer)).vocab_size
        if spec.tokenizer.endswith(".json")
        else spec.vocab_size
    )


def split_of(length: int, documents: Sequence[int] = ()) -> int:
    """Where validation starts: after 90 % of the characters, or between ``documents`` of these lengths, where
    the rest has about 10 %, and 5 to 20 % at all."""
    fit = [end for end in accumulate(documents) if length <= 20 * (length - end) <= 4 * length]
    return min(fit, key=lambda end: abs(10 * end - 9 * length), default=length * 9 // 10)


def tokenizer_for(raw: mmap.mmap, text: Text, trained_on: int, spec: CorpusSpec) -> Tokenizer:
    """Characters are learned from all of the text, words and subwords from its first ``trained_on`` bytes."""
    if spec.tokenizer == "bpe" and spec.subwords:
        return spec.subwords
    if spec.tokenizer not in OWN:
        return load_tokenizer(Path(spec.tokenizer))
    size = len(raw) if text.are_ids or spec.tokenizer in ("character", "frequency") else trained_on
    places: Iterable[tuple[int, int]] = places_in(raw, text, 0, size)
    if text.are_ids:
        if spec.vocab_size is None:
            largest = 0
            for start, stop in places:
                largest = max(largest, int(np.frombuffer(raw[start:stop], "<u4").max()))
            reason = f"the largest is {largest:,}, so at least {largest + 1}"
            raise UserError(f"{text.names[0]} contains token ids; give vocab_size, {reason}.")
        return IdTokenizer(spec.vocab_size)
    if spec.tokenizer == "bpe" and size > LEARNED_FROM:
        shuffled = list(places)
        random.Random(0).shuffle(shuffled)
        places = shuffled[: LEARNED_FROM // PIECE]
        size = LEARNED_FROM
    with bytes_bar("learning tokens", size, is_slow=spec.tokenizer == "bpe") as bar:

        def texts() -> Iterator[str]:
            for begin, end in places:
                yield text_at(raw, begin, end)
                bar.update(end - begin)
            bar.show("joining subwords" if spec.tokenizer == "bpe" else "")

        return learn(spec.tokenizer, spec.vocab_size, texts())


def places_in(
    raw: mmap.mmap, text: Text, begin: int, end: int, tokenizer: Tokenizer | None = None
) -> Iterator[tuple[int, int]]:
    """Where a text is cut for the ``tokenizer``, or token ids, between two bytes of a map."""
    for stop in ends_of_pieces(raw, text, begin, end):
        # Without a tokenizer, every end of a piece is a cut. With one, it is a cut where the tokens beside it
        # depend on nothing that is farther away; else the next end of a word may be one.
        cuts = [stop]
        if tokenizer:
            later = WORD_END.search(raw, stop + 1, min(stop + PIECE, end))
            cuts += [later.start()] if later else []
        for cut in cuts:
            if cut == end or not tokenizer or tokenizer.is_cut(*beside(raw, cut, cut, begin, end)):
                yield begin, cut
                begin = cut
                break
        if stop - begin > MAX_UNCUT:
            limit = f"words, or documents, of at most {MAX_UNCUT:,} bytes"
            raise UserError(f"expected {limit}, got more; give the tokenizer a pre-tokenizer of words.")
        drop_resident_pages(raw)


def ends_of_pieces(raw: mmap.mmap, text: Text, begin: int, end: int) -> Iterator[int]:
    if text.are_ids:
        for start in range(begin, end, PIECE):
            yield min(start + PIECE, end)
    elif end > begin:
        for _, stop in pieces(raw, begin, end):
            yield stop


def write_split(
    raw: mmap.mmap, text: Text, begin: int, end: int, tokenizer: Tokenizer, writer: SplitWriter, bar: Any
) -> None:
    ends = [end]
    if text.are_documents:
        ends = [*text.ends[bisect_right(text.ends, begin) : bisect_left(text.ends, end)], end]
    counter = TextCounter(tokenizer, writer.counts)
    job: Job = []
    for document_end in ends:
        for start, stop in places_in(raw, text, begin, document_end, None if text.are_ids else tokenizer):
            job.append((start, stop, begin, document_end))
            size = stop - job[0][0]
            if size >= JOB or stop == end:
                if text.are_ids:
                    write_ids(raw, job, tokenizer, writer)
                else:
                    write_tokens(raw, job, counter, writer)
                bar.update(size)
                job = []
        begin = document_end


def write_ids(raw: mmap.mmap, job: Job, tokenizer: Tokenizer, writer: SplitWriter) -> None:
    for begin, end, _, document_end in job:
        ids = np.frombuffer(raw[begin:end], "<u4")
        is_wrong = ids >= tokenizer.vocab_size
        if is_wrong.any():
            first = int(is_wrong.argmax())
            got = f"got {ids[first]:,} at {begin // 4 + first:,}; give the right vocab_size"
            raise UserError(f"expected token ids below vocab_size={tokenizer.vocab_size}, {got}.")
        writer.add(ids, is_end=end == document_end)
    writer.counts.characters = writer.counts.tokens
    drop_resident_pages(raw)


def write_tokens(raw: mmap.mmap, job: Job, counter: TextCounter, writer: SplitWriter) -> None:
    tokenizer = counter.tokenizer
    texts = []
    parts = []
    for begin, end, document_begin, document_end in job:
        text = text_at(raw, begin, end)
        left, right = beside(raw, begin, end, document_begin, document_end)
        is_end = end == document_end
        texts.append((text, is_end))
        parts.append((left, tokenizer.terminate(text) if is_end else text, right))
    for (text, is_end), tokens in zip(texts, tokenizer.ids_within(parts), strict=True):
        counter.add(text, tokens, is_end=is_end)
        writer.add(tokens, is_end=is_end)


def text_at(raw: mmap.mmap, begin: int, end: int, errors: str = "surrogateescape") -> str:
    text = raw[begin:end].decode("utf-8", errors)
    drop_resident_pages(raw)
    return text


def beside(raw: mmap.mmap, begin: int, end: int, document_begin: int, document_end: int) -> tuple[str, str]:
    """What is on the left and on the right of a piece of a document, up to ``CONTEXT`` bytes each."""
    left = max(document_begin, begin - CONTEXT)
    right = min(document_end, end + CONTEXT)
    return text_at(raw, left, begin, "ignore"), text_at(raw, end, right, "ignore")


def bytes_bar(doing: str, total: int, *, is_slow: bool = False) -> Progress:
    """A bar of the bytes that are read, for more of them than are read in a moment."""
    is_short = 0 < total < SMALL_JOB and not is_slow
    return Progress(is_short, total=total or None, desc=doing, unit="B", unit_scale=True, leave=False)
