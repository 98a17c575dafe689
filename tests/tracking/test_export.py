"""Runs in other trackers: what was recorded, read back with the tracker's own means where it is installed."""

import pytest

from memformers.common.files import write_json
from memformers.tracking.export import export
from memformers.tracking.recorder import Tracking

LOSSES = {10 * step: 3.0 / step for step in range(1, 31)}


@pytest.fixture
def runs(tmp_path, quick_runs):
    """Two runs, the second with a result; a record of each is NaN."""
    for name in ("one", "two"):
        record(tmp_path / "runs" / name, LOSSES)
    write_json(tmp_path / "runs" / "two" / "result.json", {"loss": 0.25, "controls": 0.0, "prompt": "x"})
    return tmp_path / "runs"


def record(folder, losses):
    """A run with these losses by its tokens."""
    folder.mkdir(parents=True)
    with Tracking(folder, folder.name, {"model": {"model": "transformer"}}, "off") as tracking:
        for step, loss in losses.items():
            tracking.record({"tokens": step, "loss.train": loss})
        tracking.record({"tokens": 310, "loss.train": float("nan"), "other": 1.0})


def test_runs_that_can_t_be_exported_are_one_line(runs, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        export([tmp_path / "nothing"], "tensorboard")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        export([runs], "wandb")


def read_back(folder, name):
    """The values of a metric in TensorBoard's files."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(folder), {events.TENSORS: 0})
    accumulator.Reload()
    return {e.step: e.tensor_proto.float_val[0] for e in accumulator.Tensors(name)}


def test_tensorboard_reads_every_record_back(runs):
    pytest.importorskip("tensorboard")
    assert export([runs, runs / "one"], "tensorboard") == 2
    copy = runs / "two" / "tensorboard"
    assert read_back(copy, "loss.train") == {step: pytest.approx(loss) for step, loss in LOSSES.items()}
    assert read_back(copy, "final.loss") == {310: 0.25}
    assert read_back(copy, "final.controls") == {310: 0.0}
    before = sorted(runs.rglob("*"))
    with pytest.raises(ValueError, match="exists already"):
        export([runs], "tensorboard")
    assert sorted(runs.rglob("*")) == before


def test_runs_of_one_name_are_copied_to_two_places(runs, tmp_path):
    pytest.importorskip("tensorboard")
    record(tmp_path / "more" / "one", {10: 1.0})
    assert export([runs, tmp_path / "more"], "tensorboard", tmp_path / "out") == 3
    assert read_back(tmp_path / "out" / "more" / "one", "loss.train") == {10: 1.0}
    assert len(read_back(tmp_path / "out" / "runs" / "one", "loss.train")) == len(LOSSES)
