"""Other trackers see a run while it trains, and none of them can end it."""

import sys
from types import SimpleNamespace

import pytest

from memformers.comparison.text import CompareConfig, compare
from memformers.runs.metrics import read_metrics
from memformers.tracking.recorder import Tracking
from memformers.tracking.trackers import TRACK
from memformers.training.config import read_train_config
from tests.builders import small_training
from tests.tracking.test_export import LOSSES, read_back
from tests.training.runs import train_run

pytestmark = pytest.mark.usefixtures("quick_runs")


class Wandb:
    """Stands for the package: keeps what it is called with, and may fail."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.started = []
        self.logged = []
        self.is_finished = False

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_a_training_is_seen_live(wandb, tmp_path):
    folder = train_run(small_training(max_tokens=512), tmp_path / "run", "off", track="wandb")
    records = read_metrics(folder)
    assert [step for step, _ in wandb.logged] == [record["tokens"] for record in records]
    assert wandb.logged[-1][1]["loss.valid"] == records[-1]["loss.valid"]
    assert wandb.is_finished
    assert wandb.started[0]["config"]["max_tokens"] == 512


def test_sessions_of_a_run_have_one_id(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv(TRACK, "wandb")
    for _ in range(2):
        with Tracking(tmp_path, "run", {}, "off") as tracking:
            tracking.record({"tokens": 1, "loss.train": 2.0})
    first, second = wandb.started
    assert first["id"] == second["id"] != ""


def test_values_that_are_not_finite_stay_in_the_folder(wandb, tmp_path):
    with Tracking(tmp_path, "run", {}, "off", "wandb") as tracking:
        tracking.record({"tokens": 1, "a": float("nan"), "b": 3.0})
    assert wandb.logged == [(1, {"b": 3.0})]


def test_a_tracker_that_fails_is_left_out(wandb, tmp_path, capsys):
    wandb.fails_at = 2
    with Tracking(tmp_path, "run", {}, "off", "wandb") as tracking:
        for step in (1, 2, 3):
            tracking.record({"tokens": step, "loss.train": 1.0})
    assert [step for step, _ in wandb.logged] == [1]
    assert len(read_metrics(tmp_path)) == 3
    assert "wandb stopped (the server is gone); the training continues without it" in capsys.readouterr().err


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # without init
    with Tracking(tmp_path, "run", {}, "off", "wandb") as tracking:
        tracking.record({"tokens": 1, "loss.train": 1.0})
    assert "wandb can't start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("track", "message"),
    [("mlflow", "expected track to be of tensorboard, wandb, trackio"), ("wandb", "pip install wandb")],
)
def test_a_tracker_that_is_not_there_is_one_line(track, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=message):
        train_run(small_training(max_tokens=64), tmp_path / "run", "off", track=track)
    assert not (tmp_path / "run").exists()


def test_a_wrong_tracker_in_the_environment_costs_no_result(tmp_path, monkeypatch):
    folder = train_run(small_training(max_tokens=512), tmp_path / "run", "off")
    monkeypatch.setenv(TRACK, "mlflow")
    with pytest.raises(ValueError, match="expected track to be of tensorboard"):
        train_run(small_training(max_tokens=1024), folder, "off", resume=True)
    assert (folder / "result.json").exists()
    assert read_train_config(folder).max_tokens == 512


def test_a_wrong_tracker_ends_an_experiment_before_its_trainings(tmp_path, monkeypatch):
    monkeypatch.setenv(TRACK, "mlflow")
    config = CompareConfig(small_training(model="compressive", max_tokens=512))
    with pytest.raises(ValueError, match="expected track to be of tensorboard"):
        compare(config, tmp_path / "experiment", "off")
    assert not (tmp_path / "experiment").exists()


def test_tensorboard_reads_a_live_run_back(tmp_path):
    pytest.importorskip("tensorboard")
    with Tracking(tmp_path, "run", {}, "off", "tensorboard") as tracking:
        for step, loss in LOSSES.items():
            tracking.record({"tokens": step, "loss.train": loss})
    values = read_back(tmp_path / "tensorboard", "loss.train")
    assert values == {step: pytest.approx(loss) for step, loss in LOSSES.items()}
