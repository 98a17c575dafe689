"""From what is read to a dataset of tokens, in memory and in a folder."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from memformers.common.errors import UserError
from memformers.data import sources, tokenize_corpus
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.builtin import write_play
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of, prepare, split_of
from memformers.data.tokenizers import OWN
from tests.data.reading import as_text, contents, dataset, refused, whole, write
from tests.processes import Server, program, run, start, wait_for

REAL = Path(os.environ.get("MEMFORMERS_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
LINES = [f"Line {n}: naïve kings — and {'crowns ' * (n % 7)}…" for n in range(400)]
TEXT = "\n".join(LINES) + "\n"
TEXTS = ["to learn from. " * 9, "to choose by. " * 5, "to claim on. " * 4]
CORPUS = (200, b"Speak, speak.\n" * 50)
# Answers of a server: a status, and a text.
PAGE = (200, b"<html>log in</html>")
PLAY = "neither found nor downloadable .*{}.*built-in play is used"
LONG = pytest.mark.long
# The sizes of small benchmarks.
CORPORA = {
    "enwik8": {"sizes": (901, 49, 50), "sha256": ""},
    "text8": {"sizes": (901, 49, 50)},
    "wikitext-103": {"words": (3596, 602, 596)},
    "pg19": {"documents": (3, 1, 2)},
}


def wikitext():
    """A file for each split, of lines with empty ones between."""
    files = {}
    for part, first, end in (("train", 0, 300), ("valid", 300, 350), ("test", 350, 400)):
        files[f"wikitext-103/wiki.{part}.tokens"] = "\n \n".join(LINES[first:end]) + "\n"
    return files


def pg19():
    """A folder of books for each split."""
    files = {}
    for part, numbers in (("train", (0, 1, 2)), ("validation", (1,)), ("test", (0, 2))):
        for number in numbers:
            files[f"pg19/{part}/{number}.txt"] = "\n".join(LINES[number::3])
    return files


def books():
    """Documents of rising lengths, in a folder and one below it."""
    files = {}
    for number in range(12):
        lines = LINES[20 * number :][: 5 + 3 * number]
        folder = "books/b" if number % 2 else "books"
        files[f"{folder}/{number}.txt"] = "\n".join(lines)
    return files


# Files, and the checksum of their tokens by tokenizer, as they were first made.
SOURCES = [
    ({"play": write_play(60_000)}, "045be437 3eebd3e7 04640c3d fc63b412 15aeb417"),
    ({"x.jsonl": "\n".join(json.dumps({"text": line}) for line in LINES)},
     "ae25c6da 353f876b 297f4bee 78d160b9 f84b47ae"),
    (books(), "c930c1ac 99c9ddb7 5638eaf3 4eebbab2 f16ed939"),
    ({"divided": "<end>".join(LINES)}, "ae25c6da 353f876b 297f4bee 78d160b9 f84b47ae"),
    ({"enwik8": ("naïve " * 200).encode()[:1000]}, "- - f59556cf - -"),
    ({"text8": ("a quick brown fox " * 60)[:1000]}, "300af649 - - - -"),
    (wikitext(), "- - - 20fab90c -"),
    (pg19(), "- - - - 423b8d31"),
]  # fmt: skip
if REAL.is_file():
    SOURCES.append(({"shakespeare": REAL.read_bytes()}, "bc4437a5 7332bdc3 dbcfebea 4d9f8ad3 26e53625"))


def list_prepared():
    """Files, a tokenizer, and the checksum of the tokens."""
    for files, checksums in SOURCES:
        for name, checksum in zip(OWN, checksums.split(), strict=True):
            is_long = name == "bpe" and "shakespeare" in files
            if checksum != "-":
                yield pytest.param(files, name, checksum, marks=LONG if is_long else ())


def checksum(data):
    digest = hashlib.sha256()
    for name, split in data.splits.items():
        digest.update(name.encode())
        digest.update(np.asarray(split.tokens).astype("<i8"))
        digest.update(split.documents.astype("<i8"))
    sizes = {}
    for name, counts in data.info.splits.items():
        sizes[name] = (counts.bytes, counts.characters, counts.words, counts.tokens, counts.documents)
    digest.update(f"{json.dumps(data.tokenizer.to_json())}{sizes}".encode())
    return digest.hexdigest()[:8]


@pytest.mark.parametrize(("files", "tokenizer", "expected"), list(list_prepared()))
def test_tokens_are_always_the_same_in_memory_and_on_the_disk(
    files, tokenizer, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(write(tmp_path, files))
    name, _, _ = next(iter(files)).partition("/")
    folder = Path("tokens", f"{name}-{tokenizer}")
    spec = CorpusSpec(
        name,
        document_separator="<end>" if name == "divided" else "",
        tokenizer=tokenizer,
        vocab_size=400 if tokenizer == "bpe" else None,
        corpus=name if name in CORPORA else "",
    )
    if name in CORPORA:  # of which the command knows the tokenizer
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], vocab_size=400, **CORPORA[name]))
        printed = run("prepare", name, name).out
        assert f"{dataset(folder, tokenizer=tokenizer).info.splits['test'].tokens:,} tokens" in printed
    else:
        prepare(spec, folder)
    in_memory = dataset_of(spec)
    stored = dataset(folder, tokenizer=tokenizer)
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    in_cache = dataset_of(spec)
    for data in (in_memory, stored, in_cache):
        assert checksum(data) == expected
        assert data.info == in_memory.info
    assert not isinstance(in_memory.train.tokens, np.memmap)
    assert isinstance(stored.train.tokens, np.memmap)
    assert stored.train.tokens.dtype == (np.uint8 if stored.tokenizer.vocab_size <= 256 else np.uint16)


@pytest.mark.parametrize(
    "options",
    [
        {"validation": "y"},
        {"validation": "y", "test": "y"},
        {"text_field": "body"},
        {"document_separator": "<end>"},
        {"document_end": 0},
        {"tokenizer": "bpe"},
    ],
)
def test_options_that_tokens_cannot_obey_are_one_line(options, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"x": TEXT, "y": TEXT}))
    prepare(CorpusSpec("x", tokenizer="byte"), Path("tokens"))
    with refused(f"omit {', '.join(options)}, or name the text"):
        dataset("tokens", **options)


def test_a_document_of_which_no_token_is_left_is_none(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    invisible = "\N{ZERO WIDTH SPACE}"
    texts = {"0": "a " * 30, "1": invisible, "2": "a " * 20, "3": "a " * 6, "4": invisible}
    data = dataset(write(tmp_path / "x", texts), tokenizer=str(tmp_path / "tokenizer.json"))
    lengths = [split.documents.tolist() for split in data.splits.values()]
    assert lengths == [[30, 20], [6]]


@pytest.mark.filterwarnings("ignore:expected MEMFORMERS_DATA", "ignore:Tiny Shakespeare can't be kept")
@pytest.mark.parametrize(
    ("path", "answer", "size", "delay", "warning", "n_requests"),
    [("data/input.txt", CORPUS, None, 0, "", 0), ("data/tinyshakespeare/input.txt", CORPUS, None, 0, "", 0),
     ("x", CORPUS, None, 0, "MEMFORMERS_DATA to be a text file or a folder", 1),
     ("cache/memformers/tinyshakespeare/input.txt", CORPUS, None, 0, "Downloading it", 1),
     ("cache/memformers", CORPUS, None, 0, "can't be kept in the cache", 2), ("x", None, None, 0, PLAY, 1),
     ("x", PAGE, None, 0, PLAY.format("19 bytes that aren't"), 1), ("x", PAGE, 5_000, 0, PLAY, 1),
     ("x", CORPUS, None, 2, PLAY, 1)],
)  # fmt: skip
def test_tiny_shakespeare_is_found_or_replaced(
    path, answer, size, delay, warning, n_requests, tmp_path, monkeypatch
):
    _, corpus = CORPUS
    write(tmp_path, {path: corpus if path.startswith("data") else "half"})
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(corpus).hexdigest())
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 1.0)

    def respond(*_):
        time.sleep(delay)
        return answer

    with Server(respond, size) as server:
        monkeypatch.setattr(sources, "TINY_SHAKESPEARE_URL", f"http://{server.host}")
        with pytest.warns(UserWarning, match=warning.format("")) if warning else nullcontext():
            data = dataset("")
        if warning.startswith("neither found"):
            assert data.info.sha256.startswith("293bfe6254e4d081")
            assert data.info.is_stand_in
            assert not (tmp_path / "cache").exists()
        else:
            read_again = dataset("" if n_requests else tmp_path / "data")
            assert whole(data) == whole(read_again) == corpus.decode()
            assert data.info.name == "Tiny Shakespeare"
            assert not data.info.is_stand_in
    assert len(server.bodies) == n_requests


@pytest.mark.parametrize(
    "names", [("train.txt", "valid.txt", "test.txt"), ("wiki.train.raw", "wiki.val.raw", "wiki.test.raw"),
              ("train.jsonl", "validation.jsonl", "test.jsonl"), ("Train/a", "VALID/b", "test/c"), "xyz",
              ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"), ("x-train", "x-dev", "x-eval"),
              ("train_data.txt", "val_data.txt", "test_data.txt"), ("x_train/a", "x_valid/b", "x_test/c"),
              ("train-0-of-2.txt", "dev-0-of-1.txt", "test-0-of-1.txt"), ("train1", "val1", "test1"),
              ("Training set.md", "Validation set.md", "Testing set.md")],
)  # fmt: skip
def test_a_folder_or_options_may_have_splits_of_their_own(names, tmp_path, monkeypatch):
    texts = TEXTS
    if names[0] == "train.jsonl":
        texts = [json.dumps({"text": text}) for text in TEXTS]
    monkeypatch.chdir(write(tmp_path, {"same": "".join(TEXTS), **dict(zip(names, texts, strict=True))}))
    if names == "xyz":
        data = dataset("x", validation="y", test="z")
    else:
        with pytest.warns(UserWarning, match="of no split and left out: same"):
            data = dataset(".")
    assert [whole(data, split) for split in ("train", "validation", "test")] == TEXTS
    assert dataset("same").info.sha256 != data.info.sha256


def test_a_text_of_another_machine_is_copied_again_when_it_changes():
    for text in ("first words " * 9, "and other words " * 9):
        fsspec.filesystem("memory").pipe("/far/x.txt", text.encode())
        assert whole(dataset("memory://far/x.txt")) == text


def test_the_sources_of_python_are_documents_in_a_fixed_order(tmp_path, monkeypatch):
    write(tmp_path, {f"lib/{name}": f"# {name}\n" * 30 for name in ("b/one.py", "a.py", "b/two.txt")})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "path", [])
    data = dataset("", corpus="python-source")
    assert data.info.name == "python-source"
    assert data.info.documents == 2
    assert whole(data) == "# a.py\n" * 30 + "# b/one.py\n" * 30


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 40))
@example([2, 110])
@example([50, 50])
@example([110, 2])
def test_about_a_tenth_is_held_out(lengths):
    """In whole documents, where these come near it."""
    total = sum(lengths)
    cut = split_of(total, lengths)
    # The share that would be held out, by the position of each cut between documents.
    shares = {end: (total - end) / total for end in accumulate(lengths[:-1])}
    about_a_tenth = [share for share in shares.values() if 0.05 <= share <= 0.2]
    if about_a_tenth:
        nearest = min(about_a_tenth, key=lambda share: abs(share - 0.1))
        assert abs(shares[cut] - 0.1) == pytest.approx(abs(nearest - 0.1))
    else:
        assert cut == total * 9 // 10


def test_a_checksum_is_that_of_the_ends_of_documents_too(tmp_path):
    datasets = []
    for number, lengths in enumerate(((40, 60, 20), (60, 40, 20), (120,))):
        lines = "".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(lines)
        datasets.append(dataset(path))
    assert len({data.info.sha256 for data in datasets}) == 3
    assert [len(data.train.tokens) for data in datasets] == [100, 100, 108]


NAMES = st.from_regex(
    r"(x|train|a b|ünï|-|valid|x_documents)(\.(txt|json|jsonl|csv|parquet|npy|bin|tar))?"
    r"(\.(gz|bz2|xz|zst|zip))?", fullmatch=True,
)  # fmt: skip
RAW = (
    st.binary(max_size=400) | st.builds(str.encode, st.text(max_size=200), st.sampled_from(["utf8", "utf16"]))
    | st.lists(st.builds(dict, text=st.text(max_size=40)).map(json.dumps), max_size=5).map("\n".join)
    | st.lists(st.integers(0, 300), max_size=99).map(lambda ids: np.array(ids, "<u2").tobytes())
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=60)
@given(st.dictionaries(NAMES, RAW, min_size=1, max_size=3), st.booleans(), st.sampled_from(["bpe", "byte"]))
@example({"x.npy": b"\x93NUMPY\x01\x00v\x00{'descr'"}, False, "bpe")
@example({"x.csv": b"\r\0"}, False, "bpe")
def test_any_file_becomes_its_tokens_or_one_line(tmp_path_factory, files, is_folder, tokenizer):
    folder = write(tmp_path_factory.mktemp("any"), files)
    source = folder if is_folder else folder / next(iter(files))
    out = folder / "out" / "tokens"
    try:
        data = dataset(prepare(CorpusSpec(str(source), tokenizer=tokenizer), out), tokenizer=tokenizer)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert not out.exists()
        return
    if source.is_file() and tokenizer == "byte" and source.suffix in ("", ".txt", ".bin", ".npy"):
        assert whole(data) == as_text(source.read_bytes().removeprefix(b"\xef\xbb\xbf"))


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write(tmp_path, {"x.txt": TEXT * 200}) / "x.txt"
    changing = start(["sh", "-c", 'while :; do echo more >> "$0"; done', path])
    try:
        with refused(r"x\.txt changed while it was read"):
            contents(path)
    finally:
        changing.kill()


@pytest.mark.parametrize(
    ("end", "message"),
    [("kill", ""), pytest.param("Ctrl-C", "interrupted\n", marks=LONG),
     pytest.param("full disk", "File too large: 'x'\n", marks=LONG)],
)  # fmt: skip
def test_a_preparation_takes_the_place_of_one_that_ends_early(end, message, tmp_path):
    """It has waited for it."""
    write(tmp_path, {"x.txt": TEXT})
    command = program("prepare", "-", "--out", "x")
    if end == "full disk":
        command = ["sh", "-c", 'ulimit -f 9; exec "$@"', "sh", *command]
    elif end == "Ctrl-C":
        command += ["--vocab-size", "300000"]  # learning takes ten seconds
    pipe = subprocess.PIPE
    first = start(command, cwd=tmp_path, stdin=pipe, stderr=pipe)
    first.stdin.write(TEXT)  # it waits for more
    wait_for(lambda: [*tmp_path.glob(".unfinished-*/text")])
    second = start(program("prepare", "x.txt", "--out", "x"), cwd=tmp_path, stderr=pipe)
    assert "waiting for another process that prepares a text" in second.stderr.readline()
    if end == "kill":
        first.kill()
        first.stdin.close()
    elif end == "Ctrl-C":
        first.stdin.write("".join(np.random.default_rng(0).choice(list("abcdefghijkl "), 4_000_000)))
        first.stdin.close()
        time.sleep(2)
        first.send_signal(signal.SIGINT)
    else:
        first.stdin.close()
    assert first.wait(timeout=60 if end == "full disk" else 5) != 0
    assert message in first.stderr.read()
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"x.txt", "x", ".preparing.lock"}
    assert dataset(tmp_path / "x", tokenizer="bpe").info.source == "x.txt"


def test_a_large_text_is_in_the_cache_once_as_it_is_now(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    path = write(tmp_path, {"x.txt": TEXT, "y.txt": TEXT}) / "x.txt"

    def cached(path=path, **changes):
        """The folder in the cache that has these tokens."""
        return Path(dataset(path, **changes).train.tokens.filename).parent

    first = cached()
    assert cached() == first
    assert cached(vocab_size=len({*TEXT})) == first
    assert capsys.readouterr().err.count("prepared once") == 1
    of_other_tokens = {
        cached(path.with_name("y.txt")), cached(tokenizer="byte"), cached(document_separator="naïve"),
    }  # fmt: skip
    for seconds in range(3):
        os.utime(path, (seconds, seconds))
        newest = cached()
    path.write_text(TEXT + "more")
    assert whole(dataset(path)).endswith("more")
    cache = tmp_path.with_name(f"{tmp_path.name}-cache")
    in_cache = {card.parent for card in cache.rglob("card.json")}
    assert in_cache == {cached(), *of_other_tokens}
    assert len({first, newest, *in_cache}) == 6


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [("train.npy", Path.unlink, "train.npy"),
     ("train.npy", lambda path: path.write_bytes(path.read_bytes()[:-5]), "train.npy"),
     ("validation.npy", lambda path: np.save(path, np.zeros((2, 3), np.uint8)), "validation.npy"),
     ("train_documents.npy", lambda path: np.save(path, np.load(path)[::-1]), "rise from 0 .* steps that"),
     ("train_documents.npy", lambda path: np.save(path, np.load(path) + 1), "train_documents.npy to rise"),
     ("card.json", lambda path: path.write_text(path.read_text().replace('t": 2', 't": 9')), "format.* 9"),
     ("card.json", lambda path: path.write_text(path.read_text().replace("x.txt", "y.txt")), "card.json has"),
     ("tokenizer.json", lambda path: path.write_text("{}"), "tokenizer.json")],
)  # fmt: skip
def test_a_folder_that_has_changed_is_an_error(name, change, words, tmp_path):
    spec = CorpusSpec(str(write(tmp_path, {"x.txt": TEXT}) / "x.txt"), document_separator="\n")
    change(prepare(spec, tmp_path / "tokens") / name)
    with refused(words):
        dataset(tmp_path / "tokens")
