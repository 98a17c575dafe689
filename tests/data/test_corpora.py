import hashlib
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memformers.data import corpora
from memformers.data.corpora import Corpus, load_corpus
from tests.processes import Server

REAL = Path(os.environ.get("MEMFORMERS_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
NOWHERE = "http://127.0.0.1:9/input.txt"
FAKE = "Speak, speak.\n" * 50


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No corpus of this machine's, a cache of the test's own, and no network."""
    monkeypatch.delenv("MEMFORMERS_DATA", raising=False)
    monkeypatch.setattr(corpora.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "cache"))
    monkeypatch.setattr(corpora, "TINY_SHAKESPEARE_URL", NOWHERE)


@pytest.fixture
def fake_is_real(monkeypatch):
    """A short text passes for Tiny Shakespeare."""
    monkeypatch.setattr(corpora, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(FAKE.encode()).hexdigest())


@pytest.fixture
def serve(monkeypatch):
    """Answer at the corpus's address."""
    with ExitStack() as stack:

        def start(respond, length: int | None = None) -> None:
            server = stack.enter_context(Server(respond, length))
            monkeypatch.setattr(corpora, "TINY_SHAKESPEARE_URL", f"http://{server.host}/x")

        yield start


@pytest.mark.skipif(not REAL.is_file(), reason="Tiny Shakespeare is not at $MEMFORMERS_DATA")
def test_the_real_corpus_is_known_by_its_checksum(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_DATA", str(REAL.parent.parent))
    corpus = load_corpus()
    assert (corpus.name, len(corpus.text), len(set(corpus.text))) == ("Tiny Shakespeare", 1_115_394, 65)


def test_any_utf8_file_is_accepted_and_split_nine_to_one(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("naïve—" * 100, encoding="utf-8")
    corpus = load_corpus(str(path))
    assert corpus.name == "book.txt"
    assert (len(corpus.train_text), len(corpus.validation_text)) == (540, 60)
    assert corpus.train_text + corpus.validation_text == corpus.text


@pytest.mark.parametrize("place", ["input.txt", "tinyshakespeare/input.txt"])
def test_a_data_folder_is_found_by_option_or_environment_and_has_the_whole_corpus(
    place, tmp_path, monkeypatch, fake_is_real
):
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_text(FAKE)
    assert load_corpus(str(tmp_path / "data")).name == "Tiny Shakespeare"
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "data"))
    assert load_corpus().name == "Tiny Shakespeare"
    path.write_text(FAKE[:300])
    with pytest.raises(ValueError, match="the download is incomplete, or it is another text"):
        load_corpus(str(tmp_path / "data"))


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
        corpus = load_corpus()
    assert (corpus.name, corpus.text) == ("Tiny Shakespeare", FAKE)
    corpora.TINY_SHAKESPEARE_URL = NOWHERE  # not asked again
    assert load_corpus().source == str(path)
    assert [p.name for p in path.parent.iterdir()] == ["input.txt"]


def test_a_download_that_cannot_be_cached_is_used_all_the_same(serve, tmp_path, fake_is_real):
    serve(lambda *_: (200, FAKE.encode()))
    (tmp_path / "cache").write_text("a file where the cache's folder would be")
    with pytest.warns(UserWarning, match="can't be kept in the cache"):
        corpus = load_corpus()
    assert (corpus.name, corpus.text) == ("Tiny Shakespeare", FAKE)


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
    monkeypatch.setattr(corpora, "DOWNLOAD_SECONDS", 1.0)
    with pytest.warns(UserWarning, match=f"neither found nor downloadable .*{said}.*built-in play is used"):
        corpus = load_corpus()
    assert corpus.is_stand_in
    assert "built-in" in corpus.name
    assert not (tmp_path / "cache").exists()


def test_a_folder_in_the_environment_without_the_corpus_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path))
    with (
        pytest.warns(UserWarning, match=r"MEMFORMERS_DATA to be a text file or a folder"),
        pytest.warns(UserWarning, match="neither found nor downloadable"),
    ):
        assert load_corpus().is_stand_in


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
@example([2, 110])
@example([50, 50])
@example([110, 2])
def test_about_a_tenth_is_held_out_in_whole_documents_where_these_come_near_it(lengths):
    length = sum(lengths)
    corpus = Corpus("x", "x", "".join(chr(97 + i % 26) * n for i, n in enumerate(lengths)), documents=lengths)
    assert corpus.train_text + corpus.validation_text == corpus.text
    assert "".join(corpus.train_documents) == corpus.train_text
    assert "".join(corpus.validation_documents) == corpus.validation_text
    shares = [sum(lengths[n:]) / length for n in range(1, len(lengths))]
    if near := [share for share in shares if 0.05 <= share <= 0.2]:
        assert [*map(len, (*corpus.train_documents, *corpus.validation_documents))] == lengths
        off = abs(len(corpus.validation_text) / length - 0.1)
        assert off == pytest.approx(min(abs(share - 0.1) for share in near))
    else:
        assert corpus.split == length * 9 // 10


def test_the_checksum_is_that_of_the_text_and_its_boundaries():
    plain, documents, others = (Corpus("x", "x", "abcdef", documents=d) for d in ((), (3, 3), (2, 4)))
    assert len({plain.sha256, documents.sha256, others.sha256}) == 3
    assert plain.sha256 == "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721"
