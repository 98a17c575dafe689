import os
import shutil
import signal
import subprocess

import pytest

from memformers import comparison as module
from memformers.common.files import read_json
from memformers.comparison import CompareConfig, compare, pin_corpus
from memformers.data import corpora
from memformers.data.corpora import Corpus, builtin_corpus, load_corpus
from memformers.runs.metrics import read_metrics
from memformers.runs.sealed import numbered
from tests.builders import MODELS, small_training
from tests.processes import program, start, train_here, wait_for


def small_comparison(**changes):
    return CompareConfig(train=small_training(tokens=1_024, **changes))


def test_a_comparison_trains_each_model_and_ends_with_a_report(compared):
    for model in MODELS:
        assert read_json(compared / model / "result.json")["tokens"] == 1_024
    assert "Compressive Transformer is at" in (compared / "report.md").read_text()
    assert (compared / "report.html").is_file()


def test_only_the_memory_differs(compared):
    configs = [read_json(compared / model / "config.json") for model in MODELS]
    for config in configs:
        config["model"].pop("model")
    assert configs[0] == configs[1] == configs[2]
    steps = [[r["tokens"] for r in read_metrics(compared / model)] for model in MODELS]
    assert steps[0] == steps[1] == steps[2]


def test_the_scale_multiplies_every_budget():
    config = CompareConfig(scale=0.25)
    assert config.run_config("compressive").tokens == config.train.tokens / 4


def test_a_folder_with_runs_is_an_error(compared):
    with pytest.raises(ValueError, match="already holds runs"):
        compare(small_comparison(), compared)


@pytest.mark.usefixtures("quick_runs")
def test_a_model_that_fails_does_not_take_the_others_down(tmp_path, monkeypatch):
    def fail_one(name, folder, *, environment):
        return 1 if folder.endswith("transformer-xl") else train_here(name, folder, environment=environment)

    monkeypatch.setattr(module, "run_module", fail_one)
    with pytest.raises(ValueError, match="training of transformer-xl failed; the others are in"):
        compare(small_comparison(), tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert "**transformer-xl failed before its first step**" in markdown
    assert "Compressive Transformer is at" in markdown


@pytest.mark.usefixtures("quick_runs")
def test_a_comparison_goes_on_where_a_training_of_it_stopped(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_module", train_here)
    monkeypatch.setattr(corpora, "builtin_corpus", builtin_corpus)  # as long as in the runs that go on
    folder = shutil.copytree(compared, tmp_path / "again", symlinks=True)
    (folder / "compressive" / "result.json").unlink()
    (folder / "report.html").unlink()
    finished = (folder / "transformer" / "result.json").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"transformer can't be resumed with other settings: seed 0 → 1"):
        compare(small_comparison(seed=1), folder, resume=True)
    report = compare(small_comparison(), folder, resume=True)
    assert report.exists()
    losses = [read_json(f / "compressive" / "result.json")["loss"] for f in (compared, folder)]
    assert losses[0] == losses[1]
    assert (folder / "transformer" / "result.json").stat().st_mtime_ns == finished


def test_all_models_get_the_very_same_corpus(tmp_path):
    assert pin_corpus(builtin_corpus(100), tmp_path) == "builtin"
    assert pin_corpus(builtin_corpus(100, is_stand_in=True), tmp_path) == "stand-in"
    assert load_corpus("stand-in").is_stand_in
    downloaded = Corpus("Tiny Shakespeare", "http://example.org/input.txt", "naïve\r\n")
    assert load_corpus(pin_corpus(downloaded, tmp_path)).text == downloaded.text


@pytest.fixture
def started(tmp_path):
    """A comparison in a session of its own, which trains its first model already."""
    command = program("compare", "--data", "builtin", "--out", tmp_path)
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(lambda: read_metrics(tmp_path / "transformer"))
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_a_signal_to_the_comparison_alone_ends_its_training_with_a_checkpoint(
    number, code, started, tmp_path
):
    started.send_signal(number)
    _, errors = started.communicate(timeout=30)
    assert started.returncode == code
    assert "Traceback" not in errors
    assert "at token" in errors
    assert numbered(tmp_path / "transformer" / "checkpoints")


@pytest.mark.long
def test_ctrl_c_ends_a_comparison_within_seconds(started, tmp_path):
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, errors = started.communicate(timeout=20)
    assert started.returncode == 130
    assert "Traceback" not in errors
    assert read_metrics(tmp_path / "transformer")
    status = next((tmp_path / "transformer" / "labml").glob("*/*/run_log.jsonl")).read_text()
    assert "KeyboardInterrupt" in status or "crashed" in status


def test_several_processes_are_for_one_training():
    with pytest.raises(ValueError, match="parallel='ddp' can't be used in a comparison"):
        small_comparison(parallel="ddp")
