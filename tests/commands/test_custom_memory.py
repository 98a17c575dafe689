"""The commands with a user's memory in a folder, and from another working directory."""

import shlex
from pathlib import Path

import pytest

from memformers.common.files import read_json
from memformers.models import registry
from tests.builders import SMALL_RUN, write_memory
from tests.processes import run


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path, quick_runs):
    """What forgets which memories were named, as another process does."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    write_memory("a b/my.memory.py")
    built_in = {name: kind for name, kind in registry.MODELS.items() if ":" not in name}

    def forget():
        monkeypatch.setattr(registry, "MODELS", dict(built_in))

    forget()
    return forget


def suggestions(printed):
    """The commands that a training suggests, as lists of arguments."""
    commands = [shlex.split(line.removeprefix("next:")) for line in printed.splitlines()]
    return [
        words[words.index(name) :] for words in commands for name in ("generate", "evaluate") if name in words
    ]


def test_commands_that_a_training_suggests_work(forget):
    trained = run("train", "--model", "a b/my.memory.py:Mine", *SMALL_RUN, "--out", "run")
    suggested = suggestions(trained.out)
    assert [command[0] for command in suggested] == ["generate", "evaluate"]
    for command in suggested:
        forget()
        assert run(*command).code == 0


def test_a_training_is_extended_from_another_folder(forget, monkeypatch):
    run("train", "--model", "a b/my.memory.py:Mine", *SMALL_RUN, "--out", "run")
    monkeypatch.chdir("elsewhere")
    forget()
    more = ["train", "--resume", "../run", "--max-tokens", "3000"]
    assert run(*more).says("pass my.memory.py:Mine, with the path of its file")
    extended = run(*more, "--model", "../a b/my.memory.py:Mine")
    assert extended.code == 0
    assert read_json(Path("../run/result.json"))["tokens"] >= 3000
    forget()
    for command in suggestions(extended.out):
        assert run(*command).code == 0


def test_another_file_of_the_same_name_is_refused(forget):
    write_memory("elsewhere/my.memory.py")
    run("check", "a b/my.memory.py:Mine")
    assert run("check", "elsewhere/my.memory.py:Mine").says("would have the same name")
