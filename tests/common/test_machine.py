"""Where a model can run, what is said where it can't, and what is recorded of where a run was made."""

import re
import shutil
import subprocess

import pytest
import torch

from memformers.common import machine
from memformers.common.errors import UserError
from memformers.common.machine import choose_device, git_commit


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("meta", "it keeps shapes and no numbers"),
        ("xla", "this PyTorch doesn't have it"),
        ("hpu", "No module named"),
        ("warp", "Expected one of cpu, cuda"),
        ("", "Device string must not be empty"),
        pytest.param(
            "mps", "", marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="it is here")
        ),
    ],
)
def test_a_device_that_holds_no_numbers_here_is_one_line_that_says_what_to_do(name, reason):
    with pytest.raises(UserError) as error:
        choose_device(name)
    said = str(error.value)
    assert said.startswith(f"device={name!r} can't be used here: {reason}")
    assert said.endswith("; use auto, cpu or, with a GPU, cuda.")
    assert "\n" not in said


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_is_that_of_the_package_and_says_if_files_differ_from_it(tmp_path, monkeypatch):
    module = tmp_path / "machine.py"
    module.write_text("first")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert git_commit() is None
    git(tmp_path, "init")
    assert git_commit() is None  # a repository that the package is not part of
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git_commit()
    assert re.fullmatch("[0-9a-f]{12}", commit)
    module.write_text("second")
    assert git_commit() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
