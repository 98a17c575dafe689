"""A large text is prepared once, in the user's cache, and again whenever its tokens would differ."""

import io
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from memformers.data import tokenize_corpus
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from tests.data.reading import dataset, whole, write

FOX = "the quick brown fox\n" * 50
CAT = "the quick brown cat\n" * 50


@pytest.fixture(autouse=True)
def _any_text_is_large(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenize_corpus, "BIG", 1)
    monkeypatch.chdir(tmp_path)


def cards():
    """The files that every prepared text has one of."""
    return list(Path(os.environ["XDG_CACHE_HOME"]).rglob("card.json"))


def give(monkeypatch, content):
    """Make ``content`` the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))


@pytest.mark.parametrize("name", ["ids.npy", "ids.bin", "train.npy"])
def test_changed_documents_beside_ids_are_read_again(name):
    ids = np.arange(4000, dtype=np.uint16) % 50
    Path("x").mkdir()
    if name.endswith(".bin"):
        ids.tofile(f"x/{name}")
    else:
        np.save(f"x/{name}", ids)
    np.save("x/valid.npy", ids[:100])
    named = {"data": "x"} if name == "train.npy" else {"data": f"x/{name}", "validation": "x/valid.npy"}
    starts_file = Path("x", f"{Path(name).stem}_documents.npy")
    for starts in ([], [0, 1000, 4000], [0, 500, 1000, 2000, 4000], [0, 500, 1500, 2000, 4000], []):
        starts_file.unlink(missing_ok=True)
        if starts:
            np.save(starts_file, np.array(starts))
        read = dataset_of(CorpusSpec(**named, vocab_size=50))
        assert read.train.documents.tolist() == np.diff(starts).tolist()


def test_standard_input_is_read_each_time(monkeypatch):
    write(Path(), {"valid.txt": FOX})
    for text in (FOX, CAT):
        give(monkeypatch, text)
        read = dataset_of(CorpusSpec("-", validation="valid.txt"))
        assert whole(read, "train") == text
    assert not cards()


def test_standard_input_to_validate_on_is_read_each_time(monkeypatch):
    write(Path(), {"train.txt": FOX})
    for text in (FOX, CAT):
        give(monkeypatch, text)
        read = dataset_of(CorpusSpec("train.txt", validation="-"))
        assert whole(read, "validation") == text


def test_a_named_pipe_is_read_each_time():
    os.mkfifo("pipe")
    for text in (FOX, CAT):
        writer = threading.Thread(target=Path("pipe").write_text, args=(text,))
        writer.start()
        assert whole(dataset("pipe")) == text
        writer.join()
    assert not cards()


def test_a_file_and_a_folder_with_only_this_file_are_told_apart():
    write(Path(), {"folder/x.txt": FOX, "valid.txt": CAT})
    text = dataset("folder/x.txt", validation="valid.txt")
    documents = dataset("folder", validation="valid.txt")
    assert (text.info.documents, documents.info.documents) == (0, 2)


def test_a_text_of_the_same_size_and_date_is_read_again():
    """As two archives with fixed dates would unpack it."""
    path = write(Path(), {"x.txt": FOX}) / "x.txt"
    status = path.stat()
    assert whole(dataset(path)) == FOX
    path.write_text(CAT)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert whole(dataset(path)) == CAT


def test_a_text_has_the_path_by_which_it_was_named_now(monkeypatch):
    write(Path(), {"folder/x.txt": FOX})
    assert dataset("folder/x.txt").info.source == "folder/x.txt"
    monkeypatch.chdir("folder")
    assert dataset("x.txt").info.source == "x.txt"
    assert len(cards()) == 1


@pytest.mark.parametrize("missing", ["card.json", "manifest.json"])
def test_a_folder_that_lost_files_is_prepared_again(missing):
    write(Path(), {"x.txt": FOX})
    dataset("x.txt")
    cards()[0].with_name(missing).unlink()
    assert whole(dataset("x.txt")) == FOX
