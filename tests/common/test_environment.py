"""What is recorded of where a run was made."""

import re
import shutil
import subprocess

import pytest

from memformers.common import environment
from memformers.common.environment import git_commit


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_is_that_of_the_package_and_says_if_files_differ_from_it(tmp_path, monkeypatch):
    module = tmp_path / "environment.py"
    module.write_text("first")
    monkeypatch.setattr(environment, "__file__", str(module))
    assert git_commit() is None
    git(tmp_path, "init")
    assert git_commit() is None  # a repository that the package is not part of
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git_commit()
    assert re.fullmatch("[0-9a-f]{12}", commit)
    module.write_text("second")
    assert git_commit() == f"{commit}-dirty"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
