"""The ablation at a size of moments, in this process."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.ablation import __main__ as program
from experiments.ablation import report
from experiments.ablation.__main__ import Ablation
from experiments.ablation.report import BASE_ROW, ROWS, arms_of_rows
from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.comparison import experiment
from memformers.comparison.recall import SETTINGS
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.evaluation.recall_by_distance import distance_edges
from memformers.report import document
from memformers.report.recall import right_between
from tests.builders import small_training
from tests.report.fake_runs import FACTS

DRAW = report.rows_figure
THREE = ("transformer-xl", "mean", "conv")
TEXT = small_training(tokens=128, evaluations=1)
BITS = {"transformer-xl": (2.6, 2.3), "mean": (2.5, 2.6), "conv": (2.4, 2.4998), "max": (2.0, 2.1)}
RIGHT = {"transformer-xl": (0.5, 0.5), "mean": (0.8, 0.8), "conv": (0.7, 0.71), "max": (0.3, 0.3)}
"""What pretended trainings come to, from each seed."""


@pytest.fixture
def small(monkeypatch, quick_runs):
    """Settings of a moment; and no reports but ours, which take longer."""
    monkeypatch.setattr(program, "TEXT", replace(TEXT, model=replace(TEXT.model, c_mem_len=8)))
    monkeypatch.setattr(document, "write_report", lambda folder: folder / "report.html")


@pytest.fixture
def pretended(monkeypatch, small):
    """Nothing is trained, and no figure drawn."""
    monkeypatch.setattr(experiment, "run_modules", pretended_trainings)
    monkeypatch.setattr(report, "rows_figure", lambda *_, **__: "")


def pretend(folder, result):
    corpus = {**FACTS["corpus"], "name": "recall stream" if "recall" in str(folder.parent) else "a text"}
    corpus["sha256"] = dataset_of(CorpusSpec("builtin")).info.sha256
    write_json(folder / "run.json", {**FACTS, "corpus": corpus})
    (folder / "metrics.jsonl").write_text("")
    usual = {"tokens": 128, "seconds": 3.0, "evaluation_seconds": 1.0, "peak_memory_bytes": None}
    write_json(folder / "result.json", usual | result)


def pretended_trainings(commands, jobs, **options):
    edges = distance_edges(SETTINGS["near"].run("conv").recall.reach)
    n = len(edges) - 1
    for number, (_, folder) in enumerate(commands):
        name, seed = Path(folder).name.removesuffix("-seed1"), read_json(Path(folder) / "config.json")["seed"]
        right = {"edges": edges, "asks": [10] * n, "accuracy": [RIGHT[name][seed]] * n}
        right |= {"by_place": {}, "asks_by_place": {}}
        text = {"loss": 1.0, "bits_per_character": BITS[name][seed], "accuracy": 0.5, "evaluated_tokens": 9,
                "loss_by_position": [1.0], "prompt": ""}  # fmt: skip
        recall = {"recall": right, "within_reach": None, "controls": {}}
        pretend(Path(folder), recall if "recall" in Path(folder).parts else text)
        yield number, 0


def tiny_ablation(folder, **changes):
    """An ablation of three rows and two seeds in ``folder``."""
    usual = {"arms": THREE, "data": "builtin", "recall_tokens": 256, "device": "cpu", "out": folder}
    config = Ablation(**(usual | changes))
    return config.experiment(config.out)


def test_rows_are_in_the_papers_order_and_each_is_an_arm_of_both_tasks():
    paper = [row.paper for row in ROWS if row.paper]
    assert paper == sorted(paper, reverse=True)
    assert paper[-1] == BASE_ROW.paper == 0.973
    assert [arm.name for arm in arms_of_rows((), TEXT.model)] == [row.name for row in ROWS]


def test_a_row_has_the_same_memory_on_both_tasks_but_for_its_lengths():
    text, recall = (
        {arm.name: arm.settings for arm in arms_of_rows((), model)}
        for model in (program.TEXT.model, SETTINGS["near"].train.model)
    )
    for row in ROWS:
        assert text[row.name].keys() == recall[row.name].keys()
        different = {name for name, value in text[row.name].items() if value != recall[row.name][name]}
        assert different <= {"model.mem_len", "model.c_mem_len"}, row.name


@pytest.mark.usefixtures("small")
def test_a_row_is_trained_on_both_tasks_and_reported_beside_the_paper(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    assert tiny_ablation(folder, arms=("mean",), seeds=1) == folder / "report.html"
    (row,) = read_json(folder / "results.json")["rows"]
    assert set(row["measures"]) == {"bits_per_character", "right_beyond", "right_within"}
    assert all(value["mean"] > 0 for name, value in row["measures"].items() if name != "right_beyond")
    markdown = (folder / "report.md").read_text()
    assert "| mean pooling | 0.982 |" in markdown
    assert "**Each training run on built-in play (seed 0) has only 128 tokens**" in markdown
    assert "Nothing is compared" in markdown
    assert not (folder / "text/probe.json").exists()


@pytest.mark.drawn
@pytest.mark.usefixtures("pretended")
def test_the_figures_have_a_mark_for_each_row_and_its_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "rows_figure", DRAW)
    tiny_ablation(tmp_path)
    for name in ("ablation", "differences"):
        assert (tmp_path / "figures" / f"{name}.svg").stat().st_size > 10_000


@pytest.mark.usefixtures("pretended")
def test_only_a_difference_whose_interval_leaves_out_zero_is_claimed(tmp_path):
    tiny_ablation(tmp_path / "a")
    markdown = (tmp_path / "a/report.md").read_text()
    assert "- **mean pooling is worse by 0.100 ± 0.001**" in markdown
    assert "- Transformer-XL, equal keys: **no difference was seen**" in markdown
    assert "- **mean pooling is better by 9.5 ± 6.4 points**" in markdown
    assert "- **Transformer-XL, equal keys is worse by 20.5 ± 6.4 points**" in markdown
    assert "| mean pooling | +0.100 ± 0.001 | +9.5 ± 6.4 points | +9.5 ± 6.4 points |" in markdown
    assert "| Transformer-XL, equal keys | – | 2.450 ± 1.906 | 50.0 ± 0.0 % |" in markdown
    row = read_json(tmp_path / "a/results.json")["rows"][1]
    assert row["differences"]["bits_per_character"]["mean"] == pytest.approx(0.1001)
    assert row["measures"]["right_beyond"] == {"mean": 0.8, "half_width": 0.0, "n": 2}
    with open(tmp_path / "a/results.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 3 * 2 * 3


@pytest.mark.usefixtures("pretended")
def test_rows_and_seeds_are_added_and_what_is_finished_is_kept(tmp_path):
    folder = tmp_path / "a"
    tiny_ablation(folder, arms=("conv",), seeds=1, only="text")
    before = (folder / "text/conv/result.json").stat().st_mtime_ns
    tiny_ablation(folder, arms=("max", "conv"), seeds=1, resume=True)
    assert (folder / "text/conv/result.json").stat().st_mtime_ns == before
    markdown = (folder / "report.md").read_text()
    assert "only one seed, so nothing is claimed" in markdown
    assert "±" not in markdown.partition("## How it was made")[0]
    tiny_ablation(folder, arms=("conv",), seeds=2, only="recall", resume=True)
    assert {path.parent.name for path in folder.glob("*/*/result.json")} == {
        "conv", "max", "max-seed1", "conv-seed1"
    }  # fmt: skip
    assert "max pooling is worse by 40.5 ± 6.4 points" in (folder / "report.md").read_text()


@pytest.mark.usefixtures("pretended")
def test_a_training_that_fails_is_said_to_be_missing_and_the_rest_is_reported(tmp_path, monkeypatch):
    def fail_mean(commands, jobs, **options):
        for number, command in enumerate(commands):
            if command[1].endswith("text/mean"):
                yield number, 1
            else:
                yield from ((number, code) for _, code in pretended_trainings([command], 1))

    monkeypatch.setattr(experiment, "run_modules", fail_mean)
    failed = r"text: the training of mean failed; .*--resume trains the rest"
    with pytest.raises(UserError, match=failed) as error:
        tiny_ablation(tmp_path / "a", seeds=1)
    assert "\n" not in str(error.value)
    said = "> **mean**: no step was made"
    assert said in (tmp_path / "a/report.md").read_text()
    assert (tmp_path / "a/recall/mean/result.json").exists()
    monkeypatch.setattr(experiment, "run_modules", lambda commands, *_, **__: enumerate([1] * len(commands)))
    with pytest.raises(UserError, match="no training ended well, so there is nothing to report"):
        tiny_ablation(tmp_path / "b", seeds=1, only="text")


@pytest.mark.usefixtures("pretended")
def test_a_folder_of_other_settings_or_of_something_else_is_left_alone(tmp_path):
    folder = tmp_path / "a"
    tiny_ablation(folder)
    before = (folder / "report.md").read_bytes()
    with pytest.raises(UserError, match="already holds experiments; name a new folder, or resume this one"):
        tiny_ablation(folder)
    with pytest.raises(UserError, match="with other settings: tokens 128 → 64"):
        tiny_ablation(folder, text_tokens=64, resume=True)
    with pytest.raises(UserError, match="with other settings: tokens 256 → 64"):
        tiny_ablation(folder, recall_tokens=64, resume=True)
    assert (folder / "report.md").read_bytes() == before
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(UserError, match=r"has a report\.md that no run wrote"):
        tiny_ablation(tmp_path)
    assert (tmp_path / "report.md").read_text() == "mine"


def test_right_answers_count_in_the_bins_that_lie_between_two_distances():
    recall = {"edges": [0, 64, 128, 192], "asks": [10, 30, 0], "accuracy": [1.0, 0.5, None]}
    assert right_between(0, 128)({"recall": recall}) == pytest.approx(25 / 40)
    assert right_between(64, 190)({"recall": recall}) == 0.5
    assert right_between(128, 192)({"recall": recall}) is None
