"""The papers' corpora, in small."""

from dataclasses import replace

import numpy as np
import pytest

from memformers.commands.prepare import Prepare
from memformers.common.errors import UserError
from memformers.data import benchmarks
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.store import open_store

WORDS = [
    "the", "of", "and", "in", "to", "a", "was", "on", "for", "as",
    "is", "by", "with", "from", "at", "that", "his", "it", "an", "were",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A function that gives a corpus other published numbers."""

    def change(name, **published):
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], **published))

    return change


def prepared(tmp_path, name, source, **options):
    Prepare(name, source, out=tmp_path / "out", **options).run()
    return open_store(tmp_path / "out")


def test_one_file_is_cut_at_the_published_bytes_and_is_of_bytes(small, tmp_path):
    raw = ("naïve " * 200).encode()[:1000]
    (tmp_path / "enwik8").write_bytes(raw)
    small("enwik8", sizes=(901, 49, 50), sha256="")  # which cuts a character
    store = prepared(tmp_path, "enwik8", tmp_path / "enwik8")
    assert [bytes(split.tokens) for split in store.splits.values()] == [raw[:901], raw[901:950], raw[950:]]
    assert (store.tokenizer.name, store.card.name) == ("byte", "enwik8")


@pytest.mark.parametrize("published", [{"sizes": (1, 1, 1)}, {"sizes": (8, 1, 1)}])
def test_another_file_is_refused_and_leaves_nothing(published, small, tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    small("enwik8", **published)
    with pytest.raises(UserError, match="SHA-256 2b49"):
        prepared(tmp_path, "enwik8", tmp_path / "file")
    assert not (tmp_path / "out").exists()


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
        Prepare("wikitext-103", tmp_path, out=tmp_path / "other").run()


def test_books_are_documents_of_their_split(small, tmp_path):
    rng, books = np.random.default_rng(0), {"train": 3, "validation": 1, "test": 2}
    for split, number in books.items():
        (tmp_path / split).mkdir()
        for i in range(number):
            (tmp_path / split / f"{i}.txt").write_text(" ".join(rng.choice(WORDS, 300)))
    small("pg19", documents=tuple(books.values()), vocab_size=280)
    store = prepared(tmp_path, "pg19", tmp_path)
    assert {name: len(split.documents) for name, split in store.splits.items()} == books
    assert (store.tokenizer.name, store.tokenizer.vocab_size) == ("bpe", 280)
    (tmp_path / "test" / "0.txt").unlink()
    with pytest.raises(UserError, match=r"\(3, 1, 1\)"):
        Prepare("pg19", tmp_path, out=tmp_path / "other").run()


def test_python_sources_are_documents_in_a_fixed_order(monkeypatch, tmp_path):
    for name in ("b/one.py", "a.py", "b/two.txt"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"# {name}\n" * 30)
    monkeypatch.setattr(benchmarks.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(benchmarks.sys, "path", [])
    store = prepared(tmp_path, "python-source", None, tokenizer="byte")
    assert [path.rpartition("lib/")[2] for path in benchmarks.python_sources()] == ["a.py", "b/one.py"]
    assert (store.card.name, store.card.total("bytes")) == ("python-source", 30 * len("# a.py\n# b/one.py\n"))


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("enwik9", "x", "enwik8, text8, wikitext-103, pg19, python-source"),
        ("enwik8", "nothing", "to be one file"), ("wikitext-103", "nothing", "wiki.train.tokens for train"),
    ],
)  # fmt: skip
def test_a_corpus_that_is_not_there_is_one_line(name, source, said, tmp_path):
    with pytest.raises(UserError, match=said):
        Prepare(name, tmp_path / source, out=tmp_path / "out").run()
