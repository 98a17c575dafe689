"""Tiny Shakespeare, the built-in play, the papers' corpora in small, folders, and splits of one's own."""

import errno
import hashlib
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from memformers.commands.prepare import Prepare
from memformers.common.errors import UserError
from memformers.data import benchmarks, files, sources
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.dataset import open_store
from memformers.data.sources import CorpusSpec, find
from tests.data.reading import dataset, text_and_documents, text_in
from tests.processes import Server

REAL = Path(os.environ.get("MEMFORMERS_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
NOWHERE = "http://127.0.0.1:9/input.txt"
FAKE = "Speak, speak.\n" * 50


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No corpus of this machine's, a cache of the test's own, and no network."""
    monkeypatch.delenv("MEMFORMERS_DATA", raising=False)
    for module in (sources, files):
        monkeypatch.setattr(module.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "TINY_SHAKESPEARE_URL", NOWHERE)


@pytest.fixture
def fake_is_real(monkeypatch):
    """A short text passes for Tiny Shakespeare."""
    monkeypatch.setattr(sources, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(FAKE.encode()).hexdigest())


@pytest.fixture
def serve(monkeypatch):
    """Answer at the corpus's address."""
    with ExitStack() as stack:

        def start(respond, length: int | None = None) -> None:
            server = stack.enter_context(Server(respond, length))
            monkeypatch.setattr(sources, "TINY_SHAKESPEARE_URL", f"http://{server.host}/x")

        yield start


def whole(found):
    return text_in(found.splits.values(), found.tokenizer)


@pytest.mark.skipif(not REAL.is_file(), reason="Tiny Shakespeare is not at $MEMFORMERS_DATA")
def test_the_real_corpus_is_known_by_its_checksum(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_DATA", str(REAL.parent.parent))
    found = dataset("")
    assert (found.info.name, found.info.total("tokens"), found.tokenizer.vocab_size) == (
        "Tiny Shakespeare", 1_115_394, 65,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["input.txt", "tinyshakespeare/input.txt"])
def test_a_data_folder_is_found_by_option_or_environment_and_has_the_whole_corpus(
    place, tmp_path, monkeypatch, fake_is_real
):
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_text(FAKE)
    assert find(CorpusSpec(str(tmp_path / "data"))).name == "Tiny Shakespeare"
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "data"))
    assert find(CorpusSpec()).name == "Tiny Shakespeare"
    path.write_text(FAKE[:300])
    with pytest.raises(UserError, match="the download is incomplete, or it is another text"):
        find(CorpusSpec(str(tmp_path / "data")))


@pytest.mark.parametrize("cached", ["", "half"])
def test_a_download_is_checked_and_cached_also_in_place_of_a_broken_one(
    cached, serve, tmp_path, fake_is_real
):
    path = tmp_path / "cache" / "tinyshakespeare" / "input.txt"
    if cached:
        path.parent.mkdir(parents=True)
        path.write_text(cached)
    serve(lambda *_: (200, FAKE.encode()))
    with pytest.warns(UserWarning, match="Downloading it again") if cached else nullcontext():
        assert (find(CorpusSpec()).name, whole(dataset(""))) == ("Tiny Shakespeare", FAKE)
    sources.TINY_SHAKESPEARE_URL = NOWHERE  # not asked again
    assert find(CorpusSpec()).source == str(path)
    assert [p.name for p in path.parent.iterdir()] == ["input.txt"]


def test_a_download_that_cannot_be_cached_is_used_all_the_same(serve, tmp_path, fake_is_real):
    serve(lambda *_: (200, FAKE.encode()))
    (tmp_path / "cache").write_text("a file where the cache's folder would be")
    with pytest.warns(UserWarning, match="can't be kept in the cache"):
        assert whole(dataset("")) == FAKE


def trickle(handler, _):
    """Each byte comes within the socket's own limit; only the whole takes too long."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(15):
        time.sleep(0.1)
        with suppress(OSError):  # the other side has gone
            handler.wfile.write(b"x")
    return 200, b""


def another_page(*_):
    return 200, b"<html>log in</html>"


@pytest.mark.parametrize(
    ("respond", "length", "said"),
    [(None, None, ""), (another_page, None, ""), (another_page, 5_000, ""),
     (trickle, None, "no answer within 1 s")],
    ids=["no network", "wrong", "cut short", "too slow"],
)  # fmt: skip
def test_without_a_download_the_built_in_play_stands_in_loudly(
    respond, length, said, serve, tmp_path, monkeypatch
):
    if respond:
        serve(respond, length)
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 1.0)
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path))
    with (
        pytest.warns(UserWarning, match=f"neither found nor downloadable .*{said}.*built-in play is used"),
        pytest.warns(UserWarning, match=r"MEMFORMERS_DATA to be a text file or a folder"),
    ):
        found = find(CorpusSpec())
    assert found.is_stand_in
    assert "built-in" in found.name
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def folder(tmp_path):
    """Texts in folders, and what is none of them."""
    texts = {
        "b.txt": "Second, naïve.\n", "a/z.md": "First.\n", "c.jsonl": '{"text": "Third"}\n{"text": "Fourth"}',
        "a/.hidden": "not read", ".git/config": "not read",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / "x" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "x" / name).write_text(text, encoding="utf-8")
    return tmp_path / "x"


def test_a_folder_is_read_by_the_order_of_its_paths_without_hidden_files(folder, tmp_path):
    text, documents = text_and_documents(folder, tmp_path)
    assert documents == [
        ("a/z.md", "First.\n"), ("b.txt", "Second, naïve.\n"),
        ("c.jsonl:1", "Third"), ("c.jsonl:2", "Fourth"),
    ]  # fmt: skip
    assert text == "First.\nSecond, naïve.\nThirdFourth"
    assert find(CorpusSpec(str(folder))).name == folder.name


@pytest.mark.parametrize(("where", "name"), [(os, "scandir"), (files, "open")])
def test_a_part_of_a_folder_that_cannot_be_read_is_an_error(where, name, folder, tmp_path, monkeypatch):
    real = getattr(where, name, open)

    def refused(path, *mode):
        if "a" in Path(path).parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *mode)

    monkeypatch.setattr(where, name, refused, raising=False)
    with pytest.raises(UserError, match=r"/a(/z\.md)? can't be read: Permission denied"):
        text_and_documents(folder, tmp_path)


@pytest.mark.parametrize(
    "names", [["config.json", "run.json"], ["experiment.json"], ["card.json", "tokenizer.json"]]
)
def test_a_folder_of_a_run_or_of_tokens_below_the_texts_is_no_text(names, folder, tmp_path):
    before = text_and_documents(folder, tmp_path)
    (folder / "runs" / "x").mkdir(parents=True)
    for name in (*names, "report.md"):
        (folder / "runs" / "x" / name).write_text("{}")
    with pytest.warns(UserWarning, match=r"folders of runs or tokens are left out: runs/x\.$"):
        assert text_and_documents(folder, tmp_path) == before


SPLITS = {"train": "to learn from. " * 9, "validation": "to choose by. " * 5, "test": "to claim on. " * 4}


@pytest.mark.parametrize(
    "names",
    [("train.txt", "valid.txt", "test.txt"), ("wiki.train.raw", "wiki.val.raw", "wiki.test.raw"),
     ("train.jsonl", "validation.jsonl", "test.jsonl"), ("Train/a.txt", "VALID/b.txt", "test/c.txt"),
     ("a/x.txt", "b/y.txt", "c/z.txt")],
)  # fmt: skip
def test_a_folder_or_options_may_have_splits_of_their_own(names, tmp_path):
    for name, text in zip(names, SPLITS.values(), strict=True):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text(f'{{"text": "{text}"}}' if name.endswith("l") else text)
    if names[0] == "a/x.txt":
        train, validation, test = (str(tmp_path / "x" / name) for name in names)
        found = dataset(train, validation=validation, test=test)
    else:
        found = dataset(tmp_path / "x")
    assert {split: text_in([read], found.tokenizer) for split, read in found.splits.items()} == SPLITS
    same_text = tmp_path / "same"
    same_text.write_text("".join(SPLITS.values()))
    assert dataset(same_text).info.sha256 != found.info.sha256


def test_a_split_that_is_there_twice_or_empty_and_other_files_are_named(tmp_path):
    for name in ("train.txt", "valid.txt", "notes.md"):
        (tmp_path / name).write_text("some words " * 9)
    with pytest.warns(UserWarning, match=r"of no split and left out: notes\.md"):
        dataset(tmp_path)
    (tmp_path / "val.txt").write_text("more words")
    with pytest.raises(UserError, match=r"/val\.txt and .*/valid\.txt are all for validation"):
        dataset(tmp_path)
    (tmp_path / "notes.md").write_text(" \n")
    with pytest.warns(UserWarning, match="notes"), pytest.raises(UserError, match="0 tokens for validation"):
        dataset(tmp_path / "train.txt", validation=str(tmp_path / "notes.md"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty contains no text"):
        dataset(tmp_path / "train.txt", validation=str(tmp_path / "empty"))
    with pytest.raises(UserError, match="a text for test was given, and none as validation"):
        dataset(tmp_path / "train.txt", test=str(tmp_path / "val.txt"))


def test_a_text_of_another_machine_is_copied_and_copied_again_when_it_has_changed(tmp_path):
    far = fsspec.filesystem("memory")
    for text in ("first words " * 9, "and other words " * 9):
        far.pipe("/far/x.txt", text.encode())
        assert whole(dataset("memory://far/x.txt")) == text
    for name, words in (("memory://far/y.txt", "y.txt"), ("nowhere://x", "Protocol not known: nowhere")):
        with pytest.raises(UserError, match=f"can't be read: .*{words}"):
            dataset(name)


@pytest.fixture
def small(monkeypatch):
    """A function that gives a corpus other published numbers."""

    def change(name, **published):
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], **published))

    return change


def prepared(tmp_path, name, source="", **options):
    Prepare(name, str(source), out=tmp_path / "out", **options).run()
    return open_store(tmp_path / "out")


def test_one_file_is_cut_at_the_published_bytes_and_another_file_is_refused(small, tmp_path):
    raw = ("naïve " * 200).encode()[:1000]
    (tmp_path / "enwik8").write_bytes(raw)
    for published in ({"sizes": (1, 1, 1)}, {"sizes": (998, 1, 1)}):
        small("enwik8", **published)
        with pytest.raises(UserError, match="SHA-256 2b49"):
            prepared(tmp_path, "enwik8", tmp_path / "enwik8")
        assert not (tmp_path / "out").exists()
    small("enwik8", sizes=(901, 49, 50), sha256="")  # which cuts a character
    store = prepared(tmp_path, "enwik8", tmp_path / "enwik8")
    assert [bytes(split.tokens) for split in store.splits.values()] == [raw[:901], raw[901:950], raw[950:]]
    assert (store.tokenizer.name, store.info.name) == ("byte", "enwik8")


def test_words_have_the_originals_numbers_and_the_files_are_the_splits(small, tmp_path):
    lines = {
        "train": " \n = Title = \n \n the of the <unk> . \n",
        "valid": " \n the cat \n",
        "test": " the \n",
    }
    for split, text in lines.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(text)
    small("wikitext-103", words=(12, 4, 2))
    store = prepared(tmp_path, "wikitext-103", tmp_path)
    # As Vocab counts: <eos>, then by frequency in the training part, and in the order of their occurrence.
    assert store.tokenizer.vocabulary == ["<eos>", "=", "the", "Title", "of", "<unk>", "."]
    assert store.splits["validation"].tokens.tolist() == [0, 2, 5, 0]
    assert store.splits["test"].tokens.tolist() == [2, 0]
    small("wikitext-103", words=(13, 4, 2))
    with pytest.raises(UserError, match="12, 4, 2"):
        Prepare("wikitext-103", str(tmp_path), out=tmp_path / "other").run()


def test_books_are_documents_of_their_split(small, tmp_path):
    rng, books = np.random.default_rng(0), {"train": 3, "validation": 1, "test": 2}
    for split, number in books.items():
        (tmp_path / split).mkdir()
        for i in range(number):
            words = rng.choice([f"{a}{b}" for a in "abcdef" for b in "ghij"], 300)
            (tmp_path / split / f"{i}.txt").write_text(" ".join(words))
    small("pg19", documents=tuple(books.values()), vocab_size=280)
    store = prepared(tmp_path, "pg19", tmp_path)
    assert {name: len(split.documents) for name, split in store.splits.items()} == books
    assert (store.tokenizer.name, store.tokenizer.vocab_size) == ("bpe", 280)
    (tmp_path / "test" / "0.txt").unlink()
    with pytest.raises(UserError, match=r"\(3, 1, 1\)"):
        Prepare("pg19", str(tmp_path), out=tmp_path / "other").run()


def test_python_sources_are_documents_in_a_fixed_order(monkeypatch, tmp_path):
    for name in ("b/one.py", "a.py", "b/two.txt"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"# {name}\n" * 30)
    monkeypatch.setattr(benchmarks.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(benchmarks.sys, "path", [])
    store = prepared(tmp_path, "python-source", tokenizer="byte")
    assert [path.rpartition("lib/")[2] for path in benchmarks.python_sources()] == ["a.py", "b/one.py"]
    assert (store.info.name, store.info.total("bytes")) == ("python-source", 30 * len("# a.py\n# b/one.py\n"))


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("enwik9", "x", "enwik8, text8, wikitext-103, pg19, python-source"),
        ("enwik8", "nothing", "to be one file"), ("wikitext-103", "nothing", "train, valid and test"),
    ],
)  # fmt: skip
def test_a_corpus_that_is_not_there_is_one_line(name, source, said, tmp_path):
    with pytest.raises(UserError, match=said):
        Prepare(name, str(tmp_path / source), out=tmp_path / "out").run()
