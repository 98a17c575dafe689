import json
import os
import re

import pytest

from memformers.common.atomic_dir import (
    LEFTOVER,
    atomic_dir,
    check_manifest,
    numbered,
    remove_leftovers,
)


def written(folder, text="text"):
    with atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text(text)
        (temporary / "b.bin").write_bytes(bytes(range(256)))
    return folder


def test_a_folder_is_whole_and_knows_every_byte(tmp_path):
    folder = written(tmp_path / "deep" / "7")
    check_manifest(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["b.bin"]["size"] == 256
    assert sorted(path.name for path in folder.parent.iterdir()) == ["7"]
    for path in folder.iterdir():
        data = path.read_bytes()
        for place in (0, len(data) // 2):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(ValueError, match=re.escape(str(folder))):
                check_manifest(folder)
        path.write_bytes(data)
    check_manifest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda f: f.joinpath("a.txt").unlink(), "a.txt"),
     (lambda f: f.joinpath("a.txt").write_text("longer"), "a.txt .* 4 .* 6"),
     (lambda f: f.joinpath("manifest.json").unlink(), "manifest.json"),
     (lambda f: f.joinpath("manifest.json").write_text('{"format": 2}'), "format 2"),
     (lambda f: f.joinpath("manifest.json").write_text('{"format": 1, "files": 3}'), "files to be")],
)  # fmt: skip
def test_what_is_wrong_is_said(change, message, tmp_path):
    folder = written(tmp_path / "7")
    change(folder)
    with pytest.raises(ValueError, match=message):
        check_manifest(folder)


def test_a_file_that_must_be_there_and_was_never_written_is_missed(tmp_path):
    with pytest.raises(ValueError, match=r"lists no c\.txt"):
        check_manifest(written(tmp_path / "7"), ("a.txt", "c.txt"))


def test_a_failure_leaves_what_was_there(tmp_path):
    folder = written(tmp_path / "7")
    with pytest.raises(ZeroDivisionError), atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text("half" * (1 // 0))
    check_manifest(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    written(folder, "new")
    assert (folder / "a.txt").read_text() == "new"


def test_a_folder_that_was_being_replaced_comes_back_when_the_process_dies(tmp_path, monkeypatch):
    folder = written(tmp_path / "7")
    rename = type(folder).rename

    def die(self, target):
        if target == folder:
            os._exit(9)
        return rename(self, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(type(folder), "rename", die)
        written(folder, "new")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not folder.exists()
    remove_leftovers(tmp_path)
    check_manifest(folder)
    assert (folder / "a.txt").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_folder_stays_where_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    folder = written(tmp_path / "7")
    rename = type(folder).rename

    def fail_once(self, target):
        if target == folder and self.name.startswith(LEFTOVER):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(type(folder), "rename", fail_once)
    with pytest.raises(OSError, match="no"):
        written(folder, "new")
    assert (folder / "a.txt").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_leftovers_are_no_checkpoints_and_go_away(tmp_path):
    for number in (9, 10):
        written(tmp_path / f"{number}")
    (tmp_path / ".unfinished-abc").mkdir()
    (tmp_path / "best").symlink_to("9")
    assert [path.name for path in numbered(tmp_path)] == ["10", "9"]
    remove_leftovers(tmp_path)
    assert not (tmp_path / ".unfinished-abc").exists()
