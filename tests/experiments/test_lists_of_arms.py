"""The experiments that are lists of arms, at a size of moments and in this process."""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import ablation, mqar, recipes
from experiments.ablation import ROWS, Ablation
from experiments.memories import __main__ as memories
from experiments.position_features import PositionFeatures
from experiments.recall_grid import STREAMS, RecallGrid, beyond_chance, bits_of
from experiments.slots import VARIANTS as SLOTS
from experiments.slots import Slots
from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.comparison import experiment
from memformers.comparison.recall import setup
from memformers.comparison.recall.measurement import distance_edges
from memformers.comparison.recall.setup import SETTINGS
from memformers.data.builtin import write_play
from memformers.data.recall_stream import RecallStream
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.report import document
from memformers.report.recall import right_between
from memformers.runs.reader import read_runs
from tests import processes
from tests.builders import small_training
from tests.report.fake_runs import FACTS

TEXT = small_training(max_tokens=128, evaluations=1, model="compressive")
THREE = ("transformer-xl", "mean", "conv")

# What pretended trainings come to, from each seed.
BITS = {
    "transformer-xl": (2.6, 2.3, 2.45), "mean": (2.5, 2.6, 2.55), "conv": (2.4, 2.4998, 2.45),
    "max": (2.0, 2.1),
}  # fmt: skip
CORRECT = {
    "transformer-xl": (0.5, 0.5, 0.5), "mean": (0.8, 0.8, 0.8), "conv": (0.7, 0.71, 0.7), "max": (0.3, 0.3),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch, quick_runs):
    """Settings of a moment; and no reports but ours, which take longer."""
    for module in (setup, mqar):
        monkeypatch.setattr(module, "QUICK_TOKENS", 128)
    for module in (ablation, memories):
        monkeypatch.setattr(module, "TEXT", replace(TEXT, model=replace(TEXT.model, c_mem_len=8)))
        monkeypatch.setattr(module, "QUICK_TOKENS", 128)
    monkeypatch.setattr(recipes, "DEFAULT", small_training(evaluations=1, model="transformer-xl"))
    monkeypatch.setattr(processes, "OTHER_TASKS", [mqar.MQARTask()])
    monkeypatch.setattr(recipes, "TIMED_STEPS", 2)
    monkeypatch.setattr(recipes, "FINAL_TOKENS", 512)
    monkeypatch.setattr(document, "write_report", lambda folder: folder / "report.html")


@pytest.fixture
def pretended(monkeypatch, small):
    """Nothing is trained."""
    monkeypatch.setattr(experiment, "run_modules", pretend_trainings)


def pretend_trainings(commands, jobs, **options):
    """Write what each training would leave in its folder."""
    for number, (_, folder) in enumerate(commands):
        pretend_training(Path(folder))
        yield number, 0


def pretend_training(folder):
    name, _, _ = folder.name.partition("-seed")
    seed = read_json(folder / "config.json")["seed"]
    is_recall = "recall" in folder.parts
    corpus = FACTS["corpus"] | {
        "name": "recall stream" if is_recall else "a text",
        "sha256": dataset_of(CorpusSpec("builtin")).info.sha256,
    }
    write_json(folder / "run.json", FACTS | {"corpus": corpus})
    (folder / "metrics.jsonl").write_text("")
    result = {"tokens": 128, "seconds": 3.0, "evaluation_seconds": 1.0, "peak_memory_bytes": None}
    if is_recall:
        edges = distance_edges(SETTINGS["near"].run("conv").recall.reach)
        n_bands = len(edges) - 1
        recall = {"edges": edges, "asks": [10] * n_bands, "accuracy": [CORRECT[name][seed]] * n_bands}
        recall |= {"by_place": {}, "asks_by_place": {}}
        result |= {"recall": recall, "within_reach": None, "controls": {}}
    else:
        result |= {"loss": 1.0, "bits_per_character": BITS[name][seed], "accuracy": 0.5}
        result |= {"evaluated_tokens": 9, "loss_by_position": [1.0], "prompt": ""}
    write_json(folder / "result.json", result)


def tiny_ablation(folder, **changes):
    settings = {"arms": THREE, "data": "builtin", "recall_tokens": 256, "out": folder} | changes
    return Ablation(**settings).experiment(folder)


def rows_of(folder):
    """The rows of results.json, by the arm and its rival."""
    return {(row["arm"], row.get("minus")): row for row in read_json(folder / "results.json")["results"]}


def runs_of(folder):
    """The runs of all tasks of an experiment."""
    runs = []
    for plan in folder.glob("*/experiment.json"):
        task_folder = plan.parent
        runs += read_runs(task_folder, "recall" if task_folder.name == "recall" else "text")
    return runs


# All experiments.


def long(command):
    return pytest.param(command, marks=pytest.mark.long)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "command",
    [Ablation(quick=True, data="builtin", arms=("conv", "mine: model=transformer")),
     Slots(quick=True, arms=("usual", "c8", "heads-1"), memory="transformer-xl"),
     RecallGrid(quick=True, arms=("transformer-xl-1", "compressive-1", "both-losses-2"), growing=0.75),
     memories.Memories(quick=True, arms=("transformer-xl", "averages")),
     long(recipes.Recipes(quick=True, data="builtin", arms=("default", "dropout"))),
     long(PositionFeatures(quick=True, tasks=("characters",), arms=("all", "p8-1k"))),
     long(mqar.MQAR(quick=True, length=256, arms=("xl-32", "xl-32-slow", "selective-32-shift")))],
    ids=lambda command: command.name,
)  # fmt: skip
def test_a_quick_trial_has_a_line_for_each_arm_and_difference(command, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(write_play(6_000), encoding="utf-8")
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "text.txt"))
    out = tmp_path / "run"
    replace(command, out=out).run()

    runs = runs_of(out)
    rows = rows_of(out)
    run_by_arm = {run.arm: run for run in runs}
    # Rows without a rival are those of the arms.
    assert {arm for arm, rival in rows if not rival} == set(run_by_arm)
    check_numbers(rows, out / "results.csv")
    CHECKS.get(command.name, check_nothing_more)(out, run_by_arm, rows)

    page = (out / "report.md").read_text()
    for run in runs:
        assert f"| {run.label}" in page
    assert "\n\n\n" not in page
    assert [path.stem for path in (out / "figures").iterdir()] == [command.name]

    replace(command, out=out, resume=True).run()
    assert (out / "report.md").read_text() == page


def check_numbers(rows, path):
    """The means and differences are those of the values, of which each arm has one."""
    values = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values[row["measure"], row["arm"]] = float(row["value"])
    for (name, rival), row in rows.items():
        for measure, mean in row.items():
            if isinstance(mean, dict):
                rival_value = values[measure, rival] if rival else 0.0
                assert mean["mean"] == pytest.approx(values[measure, name] - rival_value), (name, measure)


def check_nothing_more(out, runs, rows):
    pass


def check_slots(out, runs, rows):
    """Claims are made on other streams; Transformer-XL has no compression rate to change."""
    for run in runs.values():
        assert run.config["recall"]["measured_for"] == "choosing"
    assert runs.keys() == {"usual", "heads-1"}


def check_recall_grid(out, runs, rows):
    for name, run in runs.items():
        assert run.config["recall"]["stream"] == asdict(STREAMS[int(name[-1])])
        assert run.config["recall"]["growing"] == 0.75
        assert run.config["model"]["bptt"] == (name == "both-losses-2")
    assert [pair for pair in rows if pair[1]] == [("compressive-1", "transformer-xl-1")]


def check_recipes(out, runs, rows):
    """A second of quick training has the tokens that the median of three timed runs reads in it."""
    timed = [run for run in read_runs(out / "speeds" / "text") if run.arm == "dropout"]
    assert [run.last("tokens") for run in timed] == [2 * 64] * 3
    _, median, _ = sorted(run.last("tokens_per_second") for run in timed)
    assert runs["dropout"].config["max_tokens"] == round(median)
    assert runs["dropout"].config["model"]["dropout"] == 0.05


def check_position_features(out, runs, rows):
    model = runs["p8-1k"].config["model"]
    assert (model["position_features"], model["position_base"]) == (8, 1000.0)


CHECKS = {
    "slots": check_slots,
    "recall-grid": check_recall_grid,
    "recipes": check_recipes,
    "position-features": check_position_features,
}


def test_rivals_lead_to_the_base():
    assert [*RecallGrid().rivals_of("both-losses-2")] == ["compressive-2", "transformer-xl-2", ""]
    rivals_of = Slots().rivals_of
    assert [*rivals_of("c2")] == [*rivals_of("mine")] == ["usual"]
    assert [*rivals_of("usual")] == []


@pytest.mark.parametrize("variants", [SLOTS, recipes.VARIANTS])
def test_arms_of_a_list_differ(variants):
    assert len({repr(sorted(variant.settings.items())) for variant in variants}) == len(variants)


def test_more_seeds_of_position_features_begin_where_they_are_to(tmp_path):
    command = PositionFeatures(seed=3, characters="builtin", tasks=("characters", "recall"))
    assert [task.base.seed for task in command.plan_experiments(tmp_path).values()] == [3, 3]


# The ablation.


def test_arms_of_the_ablation_are_the_same_in_both_tasks():
    in_text = ablation.list_compressions(TEXT.model)
    in_recall = ablation.list_compressions(SETTINGS["near"].base.model)
    for text_arm, recall_arm, name in zip(in_text, in_recall, ROWS, strict=True):
        assert text_arm.name == recall_arm.name == name
        # Only the memory's lengths are those of the task.
        for setting, value in recall_arm.settings.items():
            if setting not in ("mem_len", "c_mem_len"):
                assert value == text_arm.settings[setting], (name, setting)


@pytest.mark.drawn
@pytest.mark.usefixtures("pretended")
def test_differences_whose_interval_contains_zero_are_grey(tmp_path):
    tiny_ablation(tmp_path, seeds=3)
    markdown = (tmp_path / "report.md").read_text()
    assert "| mean pooling, minus conv., attention | +0.100 ± 0.000 | +9.7 ± 1.4 points |" in markdown
    assert "| Transformer-XL, equal keys, minus conv., attention | *" in markdown
    assert "| Transformer-XL, equal keys | 2.450 ± 0.373 | 50.0 ± 0.0 % |" in markdown
    rows = rows_of(tmp_path)
    assert rows["mean", "conv"]["bits per character"]["mean"] == pytest.approx(0.3002 / 3)
    assert rows["mean", None]["bits per character"]["n"] == 3
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 3 * 3 * 3
    assert (tmp_path / "figures" / "ablation.svg").stat().st_size > 10_000


@pytest.mark.usefixtures("pretended")
def test_a_failed_training_is_missing_until_it_is_resumed(tmp_path, monkeypatch):
    def fail_mean(commands, jobs, **options):
        for number, (_, folder) in enumerate(commands):
            if folder.endswith("text/mean"):
                yield number, 1
            else:
                pretend_training(Path(folder))
                yield number, 0

    with monkeypatch.context() as patched:
        patched.setattr(experiment, "run_modules", fail_mean)
        with pytest.raises(UserError, match=r"text: the training of mean failed; .* The results so far"):
            tiny_ablation(tmp_path, seeds=1)
    assert "> **mean**: no step was made" in (tmp_path / "report.md").read_text()
    finished = tmp_path / "recall/mean/result.json"
    modified = finished.stat().st_mtime_ns
    tiny_ablation(tmp_path, arms=("max", *THREE), seeds=2, resume=True)
    assert finished.stat().st_mtime_ns == modified
    assert ("max", "conv") in rows_of(tmp_path)
    assert rows_of(tmp_path)["mean", None]["bits per character"]["n"] == 2


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, "already holds experiments"),
     ({"text_tokens": 64, "resume": True}, "other settings: max_tokens 128 → 64")],
)  # fmt: skip
def test_a_folder_of_other_settings_is_left_alone(changes, message, tmp_path):
    folder = tmp_path / "a"
    tiny_ablation(folder)
    report = (folder / "report.md").read_bytes()
    with pytest.raises(UserError, match=message):
        tiny_ablation(folder, **changes)
    assert (folder / "report.md").read_bytes() == report


@pytest.mark.usefixtures("pretended")
def test_a_folder_of_a_program_with_fewer_settings_is_resumed(tmp_path):
    folder = tmp_path / "a"
    tiny_ablation(folder)
    for path in folder.glob("*/experiment.json"):
        plan = json.loads(path.read_text())
        del plan["settings"]["model"]["bptt"]
        path.write_text(json.dumps(plan))
    tiny_ablation(folder, resume=True)


# Recall.


def test_right_answers_count_between_two_distances():
    recall = {"edges": [0, 64, 128, 192], "asks": [10, 30, 0], "accuracy": [1.0, 0.5, None]}
    assert right_between(0, 128)({"recall": recall}) == pytest.approx(25 / 40)
    assert right_between(64, 190)({"recall": recall}) == 0.5
    assert right_between(128, 192)({"recall": recall}) is None


@pytest.mark.parametrize(("correct", "share"), [(0.25, 0), (1, 1), (0.625, 0.5)])
def test_right_answers_beyond_chance_are_a_share_of_all_others(correct, share):
    recall = {"edges": [64, 96, 128], "asks": [3, 1], "accuracy": [correct, correct]}
    assert beyond_chance(64, 128).of({"recall": recall, "chance": 0.25}) == pytest.approx(share)


def test_a_slot_holds_bits_for_keys_and_values():
    assert bits_of(RecallStream(keys=16, values=4, set_probability=1 / 8), rate=4) == 4 / 8 * 6
