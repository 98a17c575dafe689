"""Tiny Shakespeare, the built-in play, splits of one's own, books, and texts of other machines."""

import hashlib
import sys
import sysconfig
import time
from contextlib import nullcontext, suppress

import fsspec
import pytest

from memformers.data import sources
from memformers.data.builtin import write_play
from tests.data.reading import dataset, whole, write
from tests.processes import Server

FAKE = "Speak, speak.\n" * 50
PLAY = "neither found nor downloadable .*{}.*built-in play is used"


def corpus(*_):
    return 200, FAKE.encode()


def other_page(*_):
    return 200, b"<html>log in</html>"


def trickle(handler, _):
    """Each byte comes within the socket's own limit; only the whole takes too long."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(15):
        time.sleep(0.1)
        with suppress(OSError):  # the other side has gone
            handler.wfile.write(b"x")
    return 200, b""


@pytest.mark.filterwarnings("ignore:expected MEMFORMERS_DATA", "ignore:Tiny Shakespeare can't be kept")
@pytest.mark.parametrize(
    ("there", "respond", "length", "said", "asked"),
    [("data/input.txt", corpus, None, "", 0), ("data/tinyshakespeare/input.txt", corpus, None, "", 0),
     ("", corpus, None, "MEMFORMERS_DATA to be a text file or a folder", 1),
     ("cache/memformers/tinyshakespeare/input.txt", corpus, None, "Downloading it again", 1),
     ("cache/memformers", corpus, None, "can't be kept in the cache", 2),
     ("", None, None, PLAY, 0), ("", other_page, None, PLAY.format("19 bytes that aren't"), 1),
     ("", other_page, 5_000, PLAY, 1), ("", trickle, None, PLAY.format("no answer within 1 s"), 1)],
)  # fmt: skip
def test_tiny_shakespeare_is_found_or_downloaded_once_or_replaced_loudly(
    there, respond, length, said, asked, tmp_path, monkeypatch
):
    write(tmp_path, {there: FAKE if there[:4] == "data" else FAKE[:99]} if there else {})
    for name, place in (("MEMFORMERS_DATA", "data"), ("XDG_CACHE_HOME", "cache")):
        monkeypatch.setenv(name, str(tmp_path / place))
    monkeypatch.setattr(sources, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(FAKE.encode()).hexdigest())
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 1.0)
    with Server(respond, length) as server:
        monkeypatch.setattr(
            sources, "TINY_SHAKESPEARE_URL", f"http://{server.host if respond else '[::1]:9'}"
        )
        with pytest.warns(UserWarning, match=said.format("")) if said else nullcontext():
            found = dataset("")
        if respond is corpus:
            assert whole(dataset(tmp_path / "data" if asked == 0 else "")) == whole(found) == FAKE
        else:
            assert not (tmp_path / "cache").exists()
    assert len(server.bodies) == asked
    assert found.info.is_stand_in == (respond is not corpus)
    assert found.info.name == ("built-in play (seed 0)" if found.info.is_stand_in else "Tiny Shakespeare")


def test_the_built_in_play_is_the_same_everywhere():
    found, text = dataset("builtin"), write_play(50_000)
    assert found.info.sha256 == "271e63d42e89431b99c26d278b80638c6317ade8467630bddc5fa62ceac2106b"
    assert whole(found).startswith(text)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "14ba9181b177dc20"
    assert write_play(50_000, seed=1) != text
    with pytest.raises(ValueError, match="length=0"):
        write_play(0)


SPLITS = {"train": "to learn from. " * 9, "validation": "to choose by. " * 5, "test": "to claim on. " * 4}


@pytest.mark.parametrize(
    "names",
    [("train.txt", "valid.txt", "test.txt"), ("wiki.train.raw", "wiki.val.raw", "wiki.test.raw"),
     ("train.jsonl", "validation.jsonl", "test.jsonl"), ("Train/a.txt", "VALID/b.txt", "test/c.txt"),
     ("a/x.txt", "b/y.txt", "c/z.txt")],
)  # fmt: skip
def test_a_folder_or_options_may_have_splits_of_their_own(names, tmp_path, monkeypatch):
    as_json = {name: f'{{"text": "{text}"}}' for name, text in zip(names, SPLITS.values(), strict=True)}
    files = {name: text if name[-1] == "l" else text[10:-2] for name, text in as_json.items()}
    monkeypatch.chdir(write(tmp_path, files | {"same": "".join(SPLITS.values())}))
    is_given = names[0] == "a/x.txt"
    with nullcontext() if is_given else pytest.warns(UserWarning, match="of no split and left out: same"):
        found = dataset(names[0], validation=names[1], test=names[2]) if is_given else dataset(".")
    assert {split: whole(found, split) for split in found.splits} == SPLITS
    assert dataset("same").info.sha256 != found.info.sha256


def test_a_text_of_another_machine_is_copied_and_copied_again_when_it_has_changed():
    for text in ("first words " * 9, "and other words " * 9):
        fsspec.filesystem("memory").pipe("/far/x.txt", text.encode())
        assert whole(dataset("memory://far/x.txt")) == text


def test_the_sources_of_python_are_documents_in_a_fixed_order(tmp_path, monkeypatch):
    write(tmp_path, {f"lib/{name}": f"# {name}\n" * 30 for name in ("b/one.py", "a.py", "b/two.txt")})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "path", [])
    found = dataset("", corpus="python-source")
    assert [found.info.name, whole(found)] == ["python-source", "# a.py\n" * 30 + "# b/one.py\n" * 30]
    assert found.info.documents == 2
