"""A run learns its subwords once."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest

from memformers.common.errors import UserError
from memformers.common.files import numbered, read_json
from memformers.common.processes import module_environment
from memformers.data import tokenize_corpus, tokenizers
from memformers.data.builtin import write_play
from memformers.evaluation.probe import common_corpus
from memformers.runs.reader import read_runs
from memformers.training.text import find_text, learned_subwords
from tests.builders import small_training
from tests.processes import run
from tests.training.runs import stop, train_run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(write_play(20_000), encoding="utf-8")
    return small_training(data=str(path), tokenizer="bpe", max_tokens=640)


def refuse_to_learn(*arguments):
    raise AssertionError("subwords are learned again")


def test_a_resumed_run_does_not_learn_its_subwords_again(config, tmp_path, monkeypatch):
    whole = train_run(config, tmp_path / "whole")
    stop(config, tmp_path / "run", 4)
    monkeypatch.setattr(tokenizers, "learn_bpe", refuse_to_learn)
    resumed = train_run(config, tmp_path / "run", resume=True)
    losses = [read_json(folder / "result.json")["loss"] for folder in (whole, resumed)]
    assert losses[0] == losses[1]
    for command in (["evaluate", "--checkpoint"], ["probe", "--tokens", 64], ["train", "--resume"]):
        ended = run(*command, resumed)
        assert ended.code == 0, ended.err


def test_a_run_without_a_checkpoint_learns(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "learn_bpe", refuse_to_learn)
    with pytest.raises(AssertionError, match="learned again"):
        train_run(config, tmp_path / "run", resume=True)


def test_a_changed_text_keeps_its_run_from_resuming(config, tmp_path):
    stop(config, tmp_path / "run", 4)
    with open(tmp_path / "play.txt", "a") as file:
        file.write("and one more line\n")
    with pytest.raises(UserError, match="different"):
        train_run(config, tmp_path / "run", resume=True)


def test_a_refused_resume_leaves_the_cache_right(config, tmp_path, monkeypatch):
    config = replace(config, model=replace(config.model, vocab_size=270))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_corpus, "BIG", 1)  # any text is large
        stop(config, tmp_path / "run", 4)
        (tmp_path / "play.txt").write_text("a text of quite other words and letters\n" * 500)
        with pytest.raises(UserError, match="different"):
            train_run(config, tmp_path / "run", resume=True)
        cached = find_text(config).tokenizer
    assert cached.to_json() == find_text(config).tokenizer.to_json()


def test_resuming_reads_the_token_cache(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_corpus, "BIG", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stop(config, tmp_path / "run", 4)
    folder = train_run(config, tmp_path / "run", resume=True)
    common_corpus(read_runs(folder), learned_subwords(folder))
    assert len(list((tmp_path / "cache").rglob("card.json"))) == 1


def test_a_broken_tokenizer_is_not_used(config, tmp_path):
    folder = train_run(config, tmp_path / "run")
    newest, earlier, *_ = numbered(folder / "checkpoints")
    right = learned_subwords(folder).to_json()
    (newest / "tokenizer.json").write_text('{"tokenizer": "byte"}')
    assert learned_subwords(folder).to_json() == right
    (earlier / "tokenizer.json").unlink()
    assert learned_subwords(folder) is None


def test_no_bar_counts_to_zero_while_subwords_are_learned(config, tmp_path):
    """The bars of a library are drawn on a real terminal only."""
    code = "import sys; from memformers.data.tokenize_corpus import dataset_of\n"
    code += "from memformers.data.sources import CorpusSpec\n"
    code += "dataset_of(CorpusSpec(sys.argv[1], tokenizer='bpe', vocab_size=400))"
    ours, theirs = os.openpty()
    rows_and_columns = struct.pack("HHHH", 24, 80, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, rows_and_columns)
    command = [sys.executable, "-c", code, config.data]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=module_environment()) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # how a terminal whose programs have ended is read on Linux
            pass
    os.close(ours)
    assert process.returncode == 0, shown
    assert b"learning tokens" in shown
    assert not re.search(rb"\b0\s*/\s*0\b", shown)
