"""Where a model can run, what is said where it can't, and what is recorded of where a run was made."""

import re
import shutil
import subprocess

import pytest

from memformers.common import machine
from memformers.common.errors import UserError
from memformers.common.machine import choose_device, git_commit


@pytest.mark.parametrize(
    ("name", "reason"),
    [("meta", "on meta tensors"), ("xla", "'XLA' backend"), ("hpu", "No module"), ("warp", "Expected one of"),
     ("", "empty")],
)  # fmt: skip
def test_an_unusable_device_is_one_line_with_advice(name, reason):
    with pytest.raises(UserError, match=rf"device={name!r} .*{reason}.*; use auto") as error:
        choose_device(name)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_is_that_of_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    module = tmp_path / "machine.py"
    module.write_text("first")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert git_commit() is None
    git("init")
    assert git_commit() is None  # a repository that the package is not part of
    git("add", ".")
    git("commit", "-m", "first")
    commit = git_commit()
    assert re.fullmatch("[0-9a-f]{12}", commit)
    module.write_text("second")
    assert git_commit() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
