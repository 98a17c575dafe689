import csv
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from memformers.common.files import read_json, write_json
from memformers.models.language_model import MemoryLM
from memformers.recall import experiment
from memformers.recall.config import RecallConfig, read_run, run_of
from memformers.recall.experiment import recall
from memformers.recall.summary import mean_of
from memformers.runs.folder import read_metrics
from memformers.training.run import build_model
from tests.builders import tiny_recall
from tests.processes import recall_here, run_module

ARMS = ["no-memory", "transformer-xl", "compressive", "frozen", "mean", "ceiling"]
TWO = ("transformer-xl", "compressive")


def finished(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}


def test_every_arm_is_trained_from_every_seed_and_reported(done):
    assert set(finished(done)) == {f"{arm}-{seed}" for arm in ARMS for seed in (0, 1)}
    results = read_json(done / "results.json")
    assert [arm["name"] for arm in results["arms"]] == ARMS
    assert results["missing"] == []
    by_name = {arm["name"]: arm for arm in results["arms"]}
    assert by_name["compressive"]["keys"] == by_name["transformer-xl"]["keys"] == 64
    assert by_name["compressive"]["parameters"] > by_name["mean"]["parameters"]
    assert set(by_name["compressive"]["controls"]) == {
        "slots zeroed", "slots swapped", "memory zeroed", "memory swapped"
    }  # fmt: skip
    with open(done / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    bins, controls = len(results["edges"]) - 1, 6 + 4 * 3 + 2 * 2
    assert len(rows) == 2 * bins * controls
    markdown = (done / "report.md").read_text()
    for figure in ("recall_accuracy", "recall_controls"):
        assert f"figures/{figure}.png" in markdown
        assert (done / "figures" / f"{figure}.svg").stat().st_size > 10_000
    assert "The paired difference over 2 seeds is" in markdown
    assert "Student's t" in markdown
    assert (done / "report.html").read_text().count('src="data:image/svg+xml;base64,') == 2


def test_a_run_has_its_curves_its_model_and_its_facts(done):
    records = read_metrics(done / "compressive-0")
    assert [r["tokens"] for r in records if "loss.train" in r] == [128, 256]
    assert all(0 <= r["accuracy.train"] <= 1 for r in records if "loss.train" in r)
    (evaluated,) = [r for r in records if "accuracy.valid" in r]
    assert "recall.from_00000" in evaluated
    run = read_run(done / "compressive-0")
    setting = replace(tiny_recall(), train=replace(tiny_recall().train, device="auto"))
    assert run == run_of(setting, setting.arm("compressive"), 0, RecallConfig().jobs)
    assert MemoryLM.from_pretrained(done / "compressive-0" / "model").config == run.train.model
    cards = [read_json(done / f"{arm}-0" / "labml.json") for arm in ARMS]
    assert {card["comment"] for card in cards} == {"recall recall"}
    assert {card["compare_with"] for card in cards[1:]} == {cards[0]["run"]}


@pytest.mark.usefixtures("tiny")
def test_an_arm_trains_in_a_process_of_its_own_from_its_config_alone(tmp_path):
    setting = tiny_recall()
    run = run_of(setting, setting.arm("mean"), 0, 1)
    run.save(tmp_path)
    ended = run_module("memformers.recall", tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("mean, seed 0: 100%, ")
    assert read_json(tmp_path / "result.json")["tokens"] == 256
    write_json(tmp_path / "config.json", {"tokens": 5})
    assert run_module("memformers.recall", tmp_path).said("is not the config of a recall experiment")


def test_a_frozen_compression_stays_as_it_was_drawn_and_all_else_learns(done):
    trained = MemoryLM.from_pretrained(done / "frozen-1" / "model").state_dict()
    drawn = build_model(read_run(done / "frozen-1").train).state_dict()
    assert any(".compress." in name for name in drawn)
    for name, tensor in drawn.items():
        assert torch.equal(tensor, trained[name]) == (".compress." in name), name
    learned = MemoryLM.from_pretrained(done / "compressive-1" / "model").state_dict()
    start = build_model(read_run(done / "compressive-1").train).state_dict()
    assert not any(torch.equal(start[name], learned[name]) for name in start if ".compress." in name)


@pytest.mark.usefixtures("tiny", "unreported")
def test_more_seeds_and_arms_are_added_and_finished_ones_kept(tmp_path):
    recall(RecallConfig(seeds=1, arms=TWO), tmp_path / "r")
    before = finished(tmp_path / "r")
    recall(RecallConfig(seeds=2, arms=("compressive",)), tmp_path / "r", resume=True)
    after = finished(tmp_path / "r")
    assert set(after) == {f"{arm}-{seed}" for arm in TWO for seed in (0, 1)}
    assert {name: after[name] for name in before} == before
    recall(RecallConfig(seeds=1, arms=("mean",)), tmp_path / "r", resume=True)
    assert set(finished(tmp_path / "r")) == set(after) | {"mean-0", "mean-1"}


@pytest.mark.usefixtures("tiny", "unreported")
def test_an_experiment_of_an_earlier_version_is_gone_on_with(tmp_path):
    recall(RecallConfig(seeds=1, arms=("mean",)), tmp_path / "r")
    before, plan = finished(tmp_path / "r"), read_json(tmp_path / "r" / "recall.json")
    for arm in plan["arms"]:
        del arm["settings"]
    del plan["setting"]["train"]["model"]["compression_loss"]
    write_json(tmp_path / "r" / "recall.json", plan)
    recall(RecallConfig(seeds=1, arms=("max",)), tmp_path / "r", resume=True)
    after = finished(tmp_path / "r")
    assert set(after) == {"mean-0", "max-0"}
    assert after["mean-0"] == before["mean-0"]


@pytest.mark.usefixtures("tiny", "unreported")
def test_a_stopped_experiment_says_that_finished_trainings_are_kept(tmp_path, monkeypatch, capsys):
    def stopped(commands, jobs, *, environment):
        yield from recall_here(commands[:1], jobs, environment=environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run_modules", stopped)
    with pytest.raises(KeyboardInterrupt):
        recall(RecallConfig(seeds=1, arms=TWO), tmp_path / "r")
    assert (
        f"finished trainings are kept in {tmp_path / 'r'}; continue with --resume." in capsys.readouterr().err
    )
    assert set(finished(tmp_path / "r")) == {"compressive-0"}  # the longest begins


@pytest.mark.usefixtures("tiny", "unreported")
def test_a_training_that_was_stopped_begins_again(tmp_path):
    config = RecallConfig(seeds=1, arms=TWO)
    recall(config, tmp_path / "r")
    before = read_json(tmp_path / "r" / "compressive-0" / "result.json")
    (tmp_path / "r" / "compressive-0" / "result.json").unlink()
    recall(config, tmp_path / "r", resume=True)
    again = read_json(tmp_path / "r" / "compressive-0" / "result.json")
    assert again["recall"] == before["recall"]
    assert again["controls"] == before["controls"]
    assert [r["tokens"] for r in read_metrics(tmp_path / "r" / "compressive-0")] == [128, 256, 256]


@pytest.mark.usefixtures("tiny")
def test_a_training_that_fails_is_said_to_be_missing_and_the_others_are_reported(tmp_path, monkeypatch):
    def fail_one(commands, jobs, *, environment):
        good = [command for command in commands if "mean-0" not in command[1]]
        yield from recall_here(good, jobs, environment=environment)
        yield next(i for i, command in enumerate(commands) if "mean-0" in command[1]), 1

    monkeypatch.setattr(experiment, "run_modules", fail_one)
    with pytest.raises(ValueError, match="the training of mean-0 failed; the others are in"):
        recall(RecallConfig(seeds=1), tmp_path / "r")
    markdown = (tmp_path / "r" / "report.md").read_text()
    assert "**Some trainings are missing**, since they failed or did not finish: mean, seed 0." in markdown
    assert "| Compressive, M = 32" in markdown
    monkeypatch.setattr(experiment, "run_modules", lambda *_, **__: iter([(0, 1)]))
    with pytest.raises(ValueError, match="no training ended well, so there is nothing to report"):
        recall(RecallConfig(seeds=1, arms=("mean",)), tmp_path / "other")


@pytest.mark.usefixtures("tiny")
def test_results_of_other_settings_are_refused_in_one_line(done, tmp_path):
    done = shutil.copytree(done, tmp_path / "done")
    with pytest.raises(
        ValueError, match="already holds an experiment; name a new folder, or resume"
    ) as error:
        recall(RecallConfig(), done)
    with pytest.raises(
        ValueError, match=r"with other settings: train.tokens 256 → 64\. Leave them out"
    ) as error:
        recall(RecallConfig(tokens=64), done, resume=True)
    assert "\n" not in str(error.value)
    plan = read_json(done / "recall.json")
    plan["arms"][2]["mem_len"] = 12
    write_json(done / "recall.json", plan)
    with pytest.raises(ValueError, match="has results of compressive with other settings; name a new folder"):
        recall(RecallConfig(), done, resume=True)


@pytest.mark.usefixtures("tiny")
def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mean-0").mkdir()
    with pytest.raises(ValueError, match="has a mean-0 that no run wrote"):
        recall(RecallConfig(), tmp_path)
    write_json(tmp_path / "recall.json", {"mine": 1})
    with pytest.raises(
        ValueError, match=r"recall\.json is not the plan of a recall experiment; name a new folder"
    ):
        recall(RecallConfig(), tmp_path, resume=True)
    assert (tmp_path / "mean-0").is_dir()


@pytest.mark.usefixtures("tiny")
def test_one_seed_claims_nothing(tmp_path):
    recall(RecallConfig(seeds=1, arms=TWO), tmp_path / "r")
    markdown = (tmp_path / "r" / "report.md").read_text()
    assert "There is only one seed, so nothing is claimed; --seeds 5 gives an interval." in markdown
    assert "There is only one seed, so there are no bands." in markdown
    assert "±" not in markdown


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([(0.9, 0.3), (0.8, 0.25)], "is +57.5 points, with a 95 % interval from +25.7 to +89.3"),
        ([(0.5, 0.4), (0.4, 0.5)], "The interval contains zero: no difference was seen"),
    ],
)
def test_the_headline_is_the_paired_difference_over_seeds(shares, said, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "done")
    for seed, pair in enumerate(shares):
        for arm, share in zip(("compressive", "transformer-xl"), pair, strict=True):
            path = folder / f"{arm}-{seed}" / "result.json"
            result = json.loads(path.read_text())
            bins = len(result["recall"]["asks"])
            result["recall"] |= {"accuracy": [share] * bins, "asks": [10] * bins}
            path.write_text(json.dumps(result))
    experiment.write_report(folder)
    assert said in (folder / "report.md").read_text()


def test_an_interval_is_that_of_students_t():
    found = mean_of([0.1, 0.3, None])
    assert found["mean"] == pytest.approx(0.2)
    assert found["half_width"] == pytest.approx(12.706 * math.sqrt(0.02) / math.sqrt(2), rel=1e-6)
    assert mean_of([0.4]) == {"mean": pytest.approx(0.4), "half_width": None}
    assert mean_of([None]) == {"mean": None, "half_width": None}
