"""Several preparations with the same folder, one of which is there first."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memformers import prepare_ids
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from tests.data.reading import dataset, refused, whole, write
from tests.processes import program, start, wait_for

FIRST = "what the first one reads\n" * 20
SECOND = "what the second one reads\n" * 20
IDS = """
import numpy as np
from memformers import prepare_ids
prepare_ids("out", np.arange(300) % 7, vocab_size=7)
"""
COMMAND = ["prepare", "-", "--out", "out", "--tokenizer", "byte"]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The preparation of a text to the folder out, which reads its text until standard input is closed."""
    monkeypatch.chdir(write(tmp_path, {"second.txt": SECOND}))
    process = start(program(*COMMAND), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(FIRST)
    wait_for(lambda: [*tmp_path.glob(".unfinished-*/text")])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "command",
    [program("prepare", "second.txt", "--out", "out", "--tokenizer", "byte"), [sys.executable, "-c", IDS]],
    ids=["prepare", "prepare_ids"],
)
def test_a_preparation_that_waited_for_another_is_refused(begun, command):
    second = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "waiting for another process" in second.stderr.readline()
    begun.stdin.close()
    assert begun.wait(timeout=60) == 0
    printed, errors = second.communicate(timeout=60)
    assert second.returncode != 0
    assert "out exists already; name a new folder" in errors
    assert not printed
    assert whole(dataset("out", tokenizer="byte")) == FIRST


def test_a_folder_that_the_user_makes_in_the_meantime_is_kept(begun):
    write(Path("out"), {"notes.txt": "mine"})
    begun.stdin.close()
    assert begun.wait(timeout=60) == 2
    assert "out exists already" in begun.stderr.read()
    assert [path.read_text() for path in Path("out").iterdir()] == ["mine"]
    assert not [*Path().glob(".unfinished-*")]


@pytest.mark.parametrize("files", [{}, {"train.npy": b""}, {"manifest.json": "{}"}, {"card.json": "{}"}])
def test_a_folder_that_is_there_is_never_replaced(files, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"x.txt": FIRST}))
    Path("out").mkdir()
    write(Path("out"), files)
    with refused("out exists already"):
        prepare(CorpusSpec("x.txt"), Path("out"))
    with refused("out exists already"):
        prepare_ids("out", np.arange(300) % 7, vocab_size=7)
    assert {path.name for path in Path("out").iterdir()} == {*files}
