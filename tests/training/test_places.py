"""A training overwrites nothing that is no run's, and a resume decides nothing from what it can't read."""

import errno
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from memformers.common import atomic_dir
from memformers.common.files import read_json, write_json
from memformers.common.machine import describe_environment
from memformers.comparison.text import MEMORIES, CompareConfig, compare
from memformers.report.document import write_report
from memformers.runs.folder import METRICS
from memformers.tracking import recorder
from memformers.training import run as run_module
from memformers.training.callbacks import in_one_line
from memformers.training.data_module import find_text
from memformers.training.run import check_folder
from tests.builders import small_lm, small_training
from tests.training.runs import train_run

CONFIG = small_training()


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, f"has a {name} that no run wrote") for name in
     ("config.json", "sample.txt", "report.md", "result.json", "report.html")]
    + [(name, "already holds a run; name a new folder") for name in (METRICS, "checkpoints/064/config.json")],
)  # fmt: skip
def test_a_file_that_is_no_runs_and_another_run_are_not_overwritten(name, message, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=message):
        train_run(CONFIG, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_a_saved_model_and_a_run_do_not_take_each_others_place(tmp_path):
    small_lm("compressive").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has a config\.json that no run wrote"):
        train_run(CONFIG, tmp_path / "model")
    write_json(tmp_path / "config.json", asdict(CONFIG))
    with pytest.raises(ValueError, match=r"has a config\.json .* save_pretrained didn't write"):
        small_lm("compressive").save_pretrained(tmp_path)


def test_a_run_below_its_own_texts_is_resumed_and_one_among_them_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_text", find_text)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"This is {name}.\n" * 100)
    config, folder = small_training(tokens=512, data=str(tmp_path)), tmp_path / "runs" / "first"
    train_run(config, folder)
    (folder / "result.json").unlink()
    with pytest.warns(UserWarning, match="folders of runs or tokens are left out: runs/first"):
        train_run(config, folder, resume=True)
    assert read_json(folder / "run.json")["corpus"]["documents"] == 2
    compared = CompareConfig(replace(config, model=MEMORIES))
    for begin in (lambda: train_run(config, tmp_path), lambda: compare(compared, tmp_path)):
        with (
            pytest.warns(UserWarning, match="folders of runs"),
            pytest.raises(ValueError, match="holds the texts to train on"),
        ):
            begin()


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_is_not_scattered_over_the_current_folder(resume):
    with pytest.raises(ValueError, match="out='' is the current folder"):
        check_folder(CONFIG, Path(), resume)
    with pytest.raises(ValueError, match="out='' is the current folder"):
        compare(CompareConfig(small_training(model="compressive")), Path(), resume=resume)


def test_a_comparison_does_not_overwrite_a_report_of_something_else(tmp_path):
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(ValueError, match=r"has a report\.md that no run wrote"):
        compare(CompareConfig(small_training(model="compressive")), tmp_path)


@pytest.fixture
def run_of_its_own(tmp_path):
    """A run that a test may change."""
    return train_run(small_training(tokens=512), tmp_path / "run")


def test_a_read_error_ends_the_resume_with_nothing_changed(run_of_its_own, monkeypatch):
    """A file system that fails for a moment, as a network's does."""
    (run_of_its_own / "result.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in run_of_its_own.rglob("*") if p.name != ".lock"}
    real, failing = atomic_dir.checksum, max((run_of_its_own / "checkpoints").glob("0*")).name

    def checksum(path):
        if failing in path.parts:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    config = small_training(tokens=512)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_dir, "checksum", checksum)
        with pytest.raises(OSError, match="Input/output error"):
            train_run(config, run_of_its_own, resume=True)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    train_run(config, run_of_its_own, resume=True)
    assert (run_of_its_own / "result.json").is_file()


def test_a_sample_cannot_write_to_the_terminal():
    assert in_one_line("a\nb\x1b[2J\x07\r€") == "a⏎b�[2J��€"


@pytest.mark.parametrize(("minutes", "tokens"), [(1e-9, [1280, 960, 640, 320]), (0.0, [1280])])
def test_a_checkpoint_is_kept_when_the_last_one_is_minutes_old(minutes, tokens, tmp_path):
    config = small_training(
        tokens=1280, evaluations=1, log_every=5, checkpoint_minutes=minutes, keep_checkpoints=99
    )
    train_run(config, tmp_path / "run")
    assert [int(path.name) for path in atomic_dir.numbered(tmp_path / "run" / "checkpoints")] == tokens


def test_a_resume_on_another_machine_is_seen_in_the_run_and_in_its_report(tmp_path, monkeypatch):
    config, folder = small_training(tokens=512), tmp_path / "run"
    train_run(config, folder)
    assert "environments" not in read_json(folder / "run.json")
    (folder / "result.json").unlink()
    here = describe_environment(torch.device("cpu"))
    monkeypatch.setattr(run_module, "describe_environment", lambda device: here | {"device": "another CPU"})
    train_run(config, folder, resume=True)
    assert [e["device"] for e in read_json(folder / "run.json")["environments"]][1:] == ["another CPU"]
    assert "the same machine and package versions" in write_report(folder).with_suffix(".md").read_text()


def test_a_training_goes_on_where_no_process_can_be_started_for_labml(tmp_path, monkeypatch, capsys):
    def none_left(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(recorder, "start_relay", none_left)
    with recorder.Tracking(tmp_path, "run", {}, "off") as tracking:
        tracking.record({"tokens": 1.0})
    assert (tmp_path / METRICS).read_text() == '{"tokens": 1.0}\n'
    assert "labml gets nothing, since no process could be started for it" in capsys.readouterr().err
