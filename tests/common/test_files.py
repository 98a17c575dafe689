"""Files that appear whole, where and with the mode that a user expects."""

import os

import pytest
from filelock import FileLock, Timeout

from memformers.common.atomic_dir import atomic_dir
from memformers.common.errors import UserError
from memformers.common.files import locked, read_json, replacing, write_json, write_text
from memformers.common.intervals import mean_of
from memformers.runs.folder import check_named
from memformers.runs.plan import Arm


@pytest.fixture
def _private_umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_private_umask")
def test_a_new_file_has_the_mode_of_the_umask_and_one_that_is_there_keeps_its_own(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("old")
    old.chmod(0o604)
    for path in (new, old):
        with replacing(path) as temporary:
            temporary.unlink()
            temporary.write_text("text")
            temporary.chmod(0o600)  # as safetensors does
    assert [path.stat().st_mode & 0o777 for path in (new, old)] == [0o640, 0o604]


@pytest.mark.usefixtures("_private_umask")
def test_an_atomic_folder_and_its_files_have_the_modes_of_the_umask(tmp_path):
    with atomic_dir(tmp_path / "folder") as temporary:
        (temporary / "weights").touch(mode=0o600)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "folder").iterdir()}
    assert set(modes.values()) == {0o640}
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


def test_a_run_is_given_no_name_that_safetensors_cannot_read(tmp_path):
    with pytest.raises(UserError, match="is not UTF-8; choose another name"):
        check_named(tmp_path / "\udcff")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_dataclasses_are_written_as_their_fields_or_as_they_say(tmp_path):
    write_json(tmp_path / "x.json", {"arm": Arm("a", {"seeds": (mean_of([1.0, 1.0]),)})})
    settings = {"seeds": [{"mean": 1.0, "half_width": 0.0, "n": 2}]}
    assert read_json(tmp_path / "x.json") == {"arm": {"name": "a", "settings": settings, "label": ""}}
    with pytest.raises(TypeError, match="object is no JSON"):
        write_json(tmp_path / "x.json", {"x": object()})


def test_what_is_not_utf8_is_replaced_in_a_text_and_kept_in_json(tmp_path):
    write_text(tmp_path / "x.txt", "caf\udce9 \ud800\n")
    assert (tmp_path / "x.txt").read_text() == "caf\ufffd \ufffd\n"
    write_json(tmp_path / "x.json", {"caf\udce9": "\ud800\\ é"})
    assert read_json(tmp_path / "x.json") == {"caf\udce9": "\ud800\\ é"}


def test_a_lock_is_refused_while_it_is_held_and_free_afterwards(tmp_path):
    with locked(tmp_path / ".lock"), pytest.raises(Timeout):
        locked(tmp_path / ".lock")
    with locked(tmp_path / ".lock"):
        pass


def test_where_files_can_not_be_locked_the_block_runs_and_says_so(tmp_path, monkeypatch, capsys):
    def acquire(self, timeout):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with locked(tmp_path / ".lock"):
        pass
    assert "let no other process use it" in capsys.readouterr().err
