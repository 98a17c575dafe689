"""Files that appear whole, where and with the mode that a user expects."""

import os

import pytest
from filelock import FileLock, Timeout

from memformers.common.atomic_dir import atomic_dir
from memformers.common.files import locked, read_json, replacing, write_json, write_text
from memformers.common.intervals import mean_of
from memformers.runs.folder import Arm


def test_new_files_have_the_mode_of_the_umask_and_one_that_is_there_or_linked_to_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        new, old, link = (tmp_path / name for name in ("new", "old", "link"))
        old.write_text("old")
        old.chmod(0o604)
        link.symlink_to("old")
        for path in (new, link):
            with replacing(path) as temporary:
                temporary.unlink()
                temporary.write_text("text")
                temporary.chmod(0o600)  # as safetensors does
        with atomic_dir(tmp_path / "folder") as temporary:
            (temporary / "weights").touch(mode=0o600)
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert old.read_text() == "text"
    paths = [new, old, tmp_path / "folder", *(tmp_path / "folder").iterdir()]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o640, 0o604, 0o750, 0o640, 0o640]
    assert len(list(tmp_path.iterdir())) == 4


def test_json_holds_dataclasses_and_names_that_are_not_utf8_which_a_text_replaces(tmp_path):
    written = {"arm": Arm("a", {"seeds": (mean_of([1.0, 1.0]),)}), "caf\udce9": "\ud800\\ é"}
    write_json(tmp_path / "x.json", written)
    settings = {"seeds": [{"mean": 1.0, "half_width": 0.0, "n": 2}]}
    arm = {"name": "a", "settings": settings, "label": "", "rival": ""}
    assert read_json(tmp_path / "x.json") == written | {"arm": arm}
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"x": object()})
    write_text(tmp_path / "x.txt", "caf\udce9 \ud800\n")
    assert (tmp_path / "x.txt").read_text() == "caf\ufffd \ufffd\n"


def test_a_lock_is_refused_while_it_is_held_and_missing_ones_are_said(tmp_path, monkeypatch, capsys):
    with locked(tmp_path / ".lock"), pytest.raises(Timeout):
        locked(tmp_path / ".lock")

    def acquire(self, timeout):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with locked(tmp_path / ".lock"):
        pass
    assert "no other process" in capsys.readouterr().err
