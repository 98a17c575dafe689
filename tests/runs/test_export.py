"""Runs in other trackers: what was recorded, read back with the tracker's own means where it is installed."""

import csv
import json
import sqlite3
import threading
import time

import pytest

from memformers.common.files import write_json
from memformers.runs.export import export
from memformers.tracking.recorder import Tracking

LOSSES = {10 * step: 3.0 / step for step in range(1, 31)}


@pytest.fixture
def runs(tmp_path, quick_runs):
    """Two runs, the second with a result; a record of each is NaN."""
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        with Tracking(tmp_path / "runs" / name, name, {"model": {"model": "transformer"}}, "off") as tracking:
            for step, loss in LOSSES.items():
                tracking.record({"tokens": step, "loss.train": loss})
            tracking.record({"tokens": 310, "loss.train": float("nan"), "other": 1.0})
    write_json(tmp_path / "runs" / "two" / "result.json", {"loss": 0.25, "prompt": "x"})
    return tmp_path / "runs"


def test_csv_has_a_row_for_each_number_of_tokens(runs, tmp_path):
    assert export([runs], "csv", tmp_path / "out") == 2
    with open(tmp_path / "out" / "two.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["tokens"]): float(row["loss.train"]) for row in rows[:-1]} == LOSSES
    assert rows[-1] == {"tokens": "310", "loss.train": "", "other": "1.0", "final.loss": "0.25"}


def test_with_follow_a_run_is_copied_until_it_has_ended_even_if_another_has(quick_runs, runs, tmp_path):
    (tmp_path / "run").mkdir()
    with Tracking(tmp_path / "run", "run", {}, "off") as tracking:
        tracking.record({"tokens": 1, "loss.train": 3.0})
        folders = [tmp_path / "run", runs]
        copying = threading.Thread(target=export, args=(folders, "csv"), kwargs={"follow": True})
        copying.start()
        time.sleep(0.5)
        assert copying.is_alive()
        tracking.record({"tokens": 2, "loss.train": 2.0})
    copying.join(timeout=20)
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines() == [
        "tokens,loss.train",
        "1,3.0",
        "2,2.0",
    ]


def test_what_can_t_be_exported_is_said(runs, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        export([tmp_path / "nothing"], "csv")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        export([runs], "wandb")


def test_tensorboard_reads_every_record_back(runs):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export([runs], "tensorboard")
    found = events.EventAccumulator(str(runs / "two" / "tensorboard"), {events.TENSORS: 0})
    found.Reload()
    values = {e.step: e.tensor_proto.float_val[0] for e in found.Tensors("loss.train")}
    assert values == {step: pytest.approx(loss) for step, loss in LOSSES.items()}
    assert found.Tensors("final.loss")[0].step == 310
    with pytest.raises(ValueError, match="is there already"):
        export([runs], "tensorboard")


def test_trackio_has_every_record_in_its_database(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    export([runs], "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "memformers.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'two'").fetchall()
    read = {step: json.loads(metrics).get("loss.train") for step, metrics in rows}
    assert {step: loss for step, loss in read.items() if loss} == LOSSES
