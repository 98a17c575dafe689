"""Files and folders that appear whole, where and with the mode that a user expects."""

import os
from unittest.mock import Mock

import pytest
from filelock import FileLock, Timeout

from memformers.common.files import (
    atomic_dir,
    atomic_write,
    check_manifest,
    locked,
    numbered,
    read_json,
    remove_leftovers,
    write_json,
    write_text,
)
from memformers.common.intervals import mean_of
from memformers.runs.plan import PlannedArm


def test_new_files_have_the_mode_of_the_umask_and_links_stay(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "new") as temporary:
            temporary.unlink()
            temporary.touch(mode=0o600)  # as safetensors does
        with atomic_dir(tmp_path / "folder") as temporary:
            (temporary / "weights").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"new": 0o640, "folder": 0o750, "weights": 0o640, "manifest.json": 0o640}
    (tmp_path / "link").symlink_to("new")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").read_text() == "text"


def test_json_holds_dataclasses_and_names_that_are_not_utf8(tmp_path):
    written = {"arm": PlannedArm("a", {"seeds": (mean_of([1.0, 1.0]),)}), "caf\udce9": "\ud800\\ é"}
    write_json(tmp_path / "x.json", written)
    settings = {"seeds": [{"mean": 1.0, "half_width": 0.0, "n": 2}]}
    arm = {"name": "a", "config": settings, "label": ""}
    assert read_json(tmp_path / "x.json") == written | {"arm": arm}
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"x": object()})
    write_text(tmp_path / "x.txt", "caf\udce9 \ud800\n")
    assert (tmp_path / "x.txt").read_text() == "caf\ufffd \ufffd\n"


def test_a_held_lock_is_refused(tmp_path, monkeypatch, capsys):
    with locked(tmp_path / ".lock"), pytest.raises(Timeout):
        locked(tmp_path / ".lock")
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=NotImplementedError))
    with locked(tmp_path / ".lock"):
        pass
    assert "no other process" in capsys.readouterr().err


def written(folder, text="text"):
    with atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text(text)
        (temporary / "b.bin").write_bytes(bytes(range(256)))
    return folder


def is_whole(folder, text="text"):
    """Whether ``folder`` is what was written, and alone."""
    check_manifest(folder)
    return (folder / "a.txt").read_text() == text and list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [("b.bin", bytes(256), "7.b.bin"), ("a.txt", None, "a.txt"), ("a.txt", b"longer", "a.txt"),
     ("manifest.json", None, "manifest.json"), ("manifest.json", b'{"format": 2}', "format 2"),
     ("manifest.json", b'{"format": 1, "files": {"a.txt": {}}}', "a.txt"),
     ("manifest.json", b'{"format": 1, "files": {}}', "lists no a.txt")],
)  # fmt: skip
def test_what_is_wrong_is_said(file, content, word, tmp_path):
    path = written(tmp_path / "7") / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=word):
        check_manifest(tmp_path / "7", ("a.txt", "b.bin"))


def test_a_failed_write_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = written(tmp_path / "deep" / "7")
    assert is_whole(written(folder, "new"), "new")
    assert is_whole(written(folder))
    with pytest.raises(ZeroDivisionError), atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text("half" * (1 // 0))
    assert is_whole(folder)
    rename = type(folder).rename
    failed = []

    def fail_once(self, target):
        if target == folder and not failed:
            failed.append(self)
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(type(folder), "rename", fail_once)
    with pytest.raises(OSError, match="no"):
        written(folder, "new")
    assert is_whole(folder)
    if (child := os.fork()) == 0:
        monkeypatch.setattr(
            type(folder), "rename", lambda f, to: os._exit(9) if to == folder else rename(f, to)
        )
        written(folder, "new")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not folder.exists()
    (folder.parent / ".unfinished-best").symlink_to("9")
    remove_leftovers(folder.parent)
    assert is_whole(folder)
    assert numbered(folder.parent) == [folder]
