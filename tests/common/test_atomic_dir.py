import json
import os

import pytest

from memformers.common.atomic_dir import atomic_dir, check_manifest, numbered, remove_leftovers


def written(folder, text="text"):
    with atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text(text)
        (temporary / "b.bin").write_bytes(bytes(range(256)))
    return folder


def is_whole(folder, text="text"):
    """Whether ``folder`` is what was written, and alone."""
    check_manifest(folder)
    return (folder / "a.txt").read_text() == text and list(folder.parent.iterdir()) == [folder]


def test_a_folder_is_whole_and_a_new_one_takes_its_place(tmp_path):
    folder = written(tmp_path / "deep" / "7")
    assert is_whole(folder)
    assert json.loads((folder / "manifest.json").read_text())["files"]["b.bin"]["size"] == 256
    assert is_whole(written(folder, "new"), "new")


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [("b.bin", bytes(256), "7.b.bin"), ("a.txt", None, "a.txt"),
     ("a.txt", b"longer", "a.txt .* 4 bytes .* 6"),
     ("manifest.json", None, "manifest.json"), ("manifest.json", b'{"format": 2}', "format 2"),
     ("manifest.json", b'{"format": 1, "files": 3}', "files to be"),
     ("manifest.json", b'{"format": 1, "files": {"a.txt": {}}}', "size"),
     ("manifest.json", b'{"format": 1, "files": {}}', "lists no a.txt")],
)  # fmt: skip
def test_what_is_wrong_is_said(file, content, word, tmp_path):
    path = written(tmp_path / "7") / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=word):
        check_manifest(tmp_path / "7", ("a.txt", "b.bin"))


def test_a_failure_leaves_what_was_there_and_what_was_being_replaced_comes_back(tmp_path, monkeypatch):
    folder = written(tmp_path / "7")
    with pytest.raises(ZeroDivisionError), atomic_dir(folder) as temporary:
        (temporary / "a.txt").write_text("half" * (1 // 0))
    assert is_whole(folder)
    rename, failed = type(folder).rename, []

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
    remove_leftovers(tmp_path)
    assert is_whole(folder)


def test_leftovers_are_no_checkpoints_and_go_away(tmp_path):
    for number in (9, 10):
        written(tmp_path / f"{number}")
    (tmp_path / ".unfinished-abc").mkdir()
    (tmp_path / ".unfinished-best").symlink_to("9")
    (tmp_path / "best").symlink_to("9")
    assert [path.name for path in numbered(tmp_path)] == ["10", "9"]
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9", "best"]
