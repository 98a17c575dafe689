"""The experiments that are lists of arms, at a size of moments and in this process."""

import csv
import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments import ablation, mqar, recipes
from experiments.ablation import ROWS, Ablation
from experiments.arms import Column
from experiments.memories import __main__ as memories
from experiments.position_features import PositionFeatures
from experiments.recall_grid import STREAMS, RecallGrid, beyond_chance, bits_of
from experiments.slots import ARMS as SLOTS
from experiments.slots import Slots
from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.common.intervals import mean_of
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
BITS = {"transformer-xl": (2.6, 2.3, 2.45), "mean": (2.5, 2.6, 2.55), "conv": (2.4, 2.4998, 2.45),
        "max": (2.0, 2.1)}  # fmt: skip
RIGHT = {"transformer-xl": (0.5, 0.5, 0.5), "mean": (0.8, 0.8, 0.8), "conv": (0.7, 0.71, 0.7),
         "max": (0.3, 0.3)}  # fmt: skip
"""What pretended trainings come to, from each seed."""


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
    monkeypatch.setattr(recipes, "FEW", 512)
    monkeypatch.setattr(document, "write_report", lambda folder: folder / "report.html")


@pytest.fixture
def pretended(monkeypatch, small):
    """Nothing is trained."""
    monkeypatch.setattr(experiment, "run_modules", pretended_trainings)


def pretended_trainings(commands, jobs, **options):
    edges = distance_edges(SETTINGS["near"].run("conv").recall.reach)
    n = len(edges) - 1
    for number, (_, folder) in enumerate(commands):
        folder = Path(folder)
        name, seed = folder.name.partition("-seed")[0], read_json(folder / "config.json")["seed"]
        is_recall = "recall" in folder.parts
        corpus = {**FACTS["corpus"], "name": "recall stream" if is_recall else "a text"}
        corpus["sha256"] = dataset_of(CorpusSpec("builtin")).info.sha256
        write_json(folder / "run.json", {**FACTS, "corpus": corpus})
        (folder / "metrics.jsonl").write_text("")
        right = {"edges": edges, "asks": [10] * n, "accuracy": [RIGHT[name][seed]] * n}
        right |= {"by_place": {}, "asks_by_place": {}}
        text = {"loss": 1.0, "bits_per_character": BITS[name][seed], "accuracy": 0.5, "evaluated_tokens": 9,
                "loss_by_position": [1.0], "prompt": ""}  # fmt: skip
        usual = {"tokens": 128, "seconds": 3.0, "evaluation_seconds": 1.0, "peak_memory_bytes": None}
        of_recall = {"recall": right, "within_reach": None, "controls": {}}
        write_json(folder / "result.json", usual | (of_recall if is_recall else text))
        yield number, 0


def tiny_ablation(folder, **changes):
    usual = {"arms": THREE, "data": "builtin", "recall_tokens": 256, "out": folder}
    return Ablation(**(usual | changes)).experiment(folder)


def rows_of(folder):
    """The rows of results.json, by the arm and its rival."""
    return {(row["arm"], row.get("minus")): row for row in read_json(folder / "results.json")["results"]}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "command",
    [Ablation(quick=True, data="builtin", arms=("conv", "mine: model=transformer")),
     Slots(quick=True, arms=("usual", "c8", "heads-1"), memory="transformer-xl"),
     RecallGrid(quick=True, arms=("transformer-xl-1", "compressive-1", "both-losses-2"), growing=0.75),
     recipes.Recipes(quick=True, data="builtin", arms=("default", "dropout")),
     PositionFeatures(quick=True, characters="builtin", tasks=("characters",), arms=("all", "p8-1k")),
     memories.Memories(quick=True, arms=("transformer-xl", "averages")),
     mqar.MQAR(quick=True, length=256, arms=("xl-32", "xl-32-slow", "selective-32-shift"))],
)  # fmt: skip
def test_a_quick_trial_has_a_line_for_each_arm_and_difference(command, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(write_play(60_000), encoding="utf-8")
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "text.txt"))
    out = tmp_path / "run"
    replace(command, out=out).run()
    rows, places = rows_of(out), [plan.parent for plan in out.glob("*/experiment.json")]
    runs = [
        run for place in places for run in read_runs(place, "recall" if place.name == "recall" else "text")
    ]
    trained = {run.arm: run for run in runs}
    assert {arm for arm, rival in rows if not rival} == set(trained)
    with open(out / "results.csv", newline="") as file:
        values = {(row["measure"], row["arm"]): float(row["value"]) for row in csv.DictReader(file)}
    for (name, rival), row in rows.items():
        for measure, mean in row.items():
            if isinstance(mean, dict):
                other = values[measure, rival] if rival else 0.0
                assert mean["mean"] == pytest.approx(values[measure, name] - other), (name, measure)
    page = (out / "report.md").read_text()
    assert all(f"| {run.label}" in page for run in runs if run.label)
    assert "\n\n\n" not in page
    assert [path.stem for path in (out / "figures").iterdir()] == [command.name]
    if command.name == "slots":
        assert {run.config["recall"]["measured_for"] for run in trained.values()} == {"choosing"}
        assert trained.keys() == {"usual", "heads-1"}
    elif command.name == "recall-grid":
        for name, run in trained.items():
            assert run.config["recall"]["stream"] == asdict(STREAMS[int(name[-1])])
            assert run.config["recall"]["growing"] == 0.75
            assert run.config["model"]["bptt"] == (name == "both-losses-2")
        assert [pair for pair in rows if pair[1]] == [("compressive-1", "transformer-xl-1")]
    elif command.name == "recipes":
        speeds = [run for run in read_runs(out / "speeds" / "text") if run.arm == "dropout"]
        assert [run.last("tokens") for run in speeds] == [2 * 64] * 3
        _, median, _ = sorted(run.last("tokens_per_second") for run in speeds)
        assert trained["dropout"].config["max_tokens"] == round(median)
        assert trained["dropout"].config["model"]["dropout"] == 0.05
    elif command.name == "position-features":
        model = trained["p8-1k"].config["model"]
        assert (model["position_features"], model["position_base"]) == (8, 1000.0)
    replace(command, out=out, resume=True).run()
    assert (out / "report.md").read_text() == page


def test_more_seeds_of_position_features_begin_where_they_are_to(tmp_path):
    command = PositionFeatures(seed=3, characters="builtin", tasks=("characters", "recall"))
    assert [task.base.seed for task in command.experiments(tmp_path).values()] == [3, 3]


def test_each_key_of_an_episode_asks_once_for_its_value():
    for inputs, targets, distances, pairs in episodes_of(256, n=64):
        (asked,) = np.nonzero(targets >= 0)
        places = asked - distances[asked]
        assert np.array_equal(inputs[places], inputs[asked])
        assert np.array_equal(inputs[places + 1], targets[asked])
        assert len(set(places.tolist())) == len(asked) == pairs == 16


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_no_value_of_an_episode_is_the_answer_to_two_questions(length):
    episodes = episodes_of(length, n=64)
    # The best answer without association: the most common value of each episode, whatever is asked.
    shares = [
        max(Counter(targets[targets >= 0].tolist()).values()) / pairs for _, targets, _, pairs in episodes
    ]
    assert set(shares) == {mqar.level_without_association(length)} == {16 / length}


@pytest.mark.parametrize("length", [256, 2048])
def test_keys_values_and_fillers_are_of_three_kinds(length):
    keys, values, fillers = set(), set(), set()
    for inputs, targets, _, pairs in episodes_of(length, n=320):
        asked = targets >= 0
        assert set(inputs[asked].tolist()) == set(inputs[: 2 * pairs : 2].tolist())
        keys |= set(inputs[: 2 * pairs : 2].tolist())
        values |= set(inputs[1 : 2 * pairs : 2].tolist())
        fillers |= set(inputs[2 * pairs :][~asked[2 * pairs :]].tolist())
    assert (len(keys), len(values), len(fillers)) == (length // 4, length // 4, 64)
    assert keys | values | fillers == set(range(mqar_run(length).model.vocab_size))


def test_the_place_of_a_question_says_nothing_about_its_answer():
    pair_of_first = [
        (np.flatnonzero(targets >= 0)[0] - distances[targets >= 0][0]) // 2
        for _, targets, distances, _ in episodes_of(256, n=3200)
    ]
    # The mean of 3,200 numbers from 0 to 15 is 7.5, with a standard error of 0.08.
    assert np.mean(pair_of_first) == pytest.approx(7.5, abs=0.32)


def mqar_run(length):
    (experiment,) = mqar.MQAR(length=length).experiments(Path()).values()
    return experiment.base


def episodes_of(length, n):
    """Inputs, targets and distances of ``n`` episodes, ``[N]`` each, and their number of pairs."""
    run = mqar_run(length)
    per_episode = length // run.model.segment_len
    read = list(islice(mqar.MQARTask().segments(run, 0), per_episode * n // run.batch_size))
    assert [s.starts_over for s, _ in read] == [i % per_episode == 0 for i in range(len(read))]
    episodes = []
    for i in range(0, len(read), per_episode):
        segments = read[i : i + per_episode]
        parts = zip(*((s.inputs, s.targets, distances) for s, distances in segments), strict=True)
        tensors = [torch.cat(part).numpy() for part in parts]  # [N, B]
        episodes += [(*(x[:, b] for x in tensors), length // 16) for b in range(run.batch_size)]
    return episodes


def test_a_figure_has_a_line_for_each_memory_and_shift(monkeypatch):
    drawn, shares = [], {"xl-32": (0.1, 0.3), "xl-128": (0.5, 0.5), "xl-32-shift": (0.8, 1.0)}
    arms = [
        SimpleNamespace(name=name, first=SimpleNamespace(facts={"state_bytes": 32 * int(name.split("-")[1])}),
                        mean=lambda _, values=values: mean_of(values))
        for name, values in shares.items()
    ]  # fmt: skip
    monkeypatch.setattr(mqar.plotting, "draw_marks", lambda axes, lines: drawn.extend(lines))
    mqar.MQAR().figure([Column("correct", mqar.MQAR().measures("recall")[0], arms)], (), {})
    assert [(s.label, [(at, mean.mean) for at, mean in s.points]) for s in drawn] == [
        ("Transformer-XL", [(1.0, 0.2), (4.0, 0.5)]), ("Transformer-XL, shift", [(1.0, 0.9)])
    ]  # fmt: skip


def test_arms_of_a_list_differ_and_are_the_same_in_both_tasks():
    for listed in (SLOTS, recipes.ARMS):
        assert len({repr(sorted(arm.settings.items())) for arm in listed}) == len(listed)
    near, text = (
        {arm.name: arm.settings for arm in ablation.arms_of(model)}
        for model in (SETTINGS["near"].base.model, TEXT.model)
    )
    assert near.keys() == text.keys() == ROWS.keys()
    for name, settings in near.items():
        different = {key for key, value in settings.items() if value != text[name][key]}
        assert different <= {"mem_len", "c_mem_len"}, name


@pytest.mark.drawn
@pytest.mark.usefixtures("pretended")
def test_differences_whose_interval_contains_zero_are_grey(tmp_path):
    tiny_ablation(tmp_path, seeds=3)
    markdown, rows = (tmp_path / "report.md").read_text(), rows_of(tmp_path)
    assert "| mean pooling, minus conv., attention | +0.100 ± 0.000 | +9.7 ± 1.4 points |" in markdown
    assert "| Transformer-XL, equal keys, minus conv., attention | *" in markdown
    assert "| Transformer-XL, equal keys | 2.450 ± 0.373 | 50.0 ± 0.0 % |" in markdown
    assert rows["mean", "conv"]["bits per character"]["mean"] == pytest.approx(0.3002 / 3)
    assert rows["mean", None]["bits per character"]["n"] == 3
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 3 * 3 * 3
    assert (tmp_path / "figures" / "ablation.svg").stat().st_size > 10_000


@pytest.mark.usefixtures("pretended")
def test_a_failed_training_is_missing_until_it_is_resumed(tmp_path, monkeypatch):
    def fail_mean(commands, jobs, **options):
        for number, command in enumerate(commands):
            if command[1].endswith("text/mean"):
                yield number, 1
            else:
                yield from ((number, code) for _, code in pretended_trainings([command], 1))

    with monkeypatch.context() as patched:
        patched.setattr(experiment, "run_modules", fail_mean)
        with pytest.raises(UserError, match=r"text: the training of mean failed; .* The results so far"):
            tiny_ablation(tmp_path, seeds=1)
    assert "> **mean**: no step was made" in (tmp_path / "report.md").read_text()
    before = (tmp_path / "recall/mean/result.json").stat().st_mtime_ns
    tiny_ablation(tmp_path, arms=("max", *THREE), seeds=2, resume=True)
    assert (tmp_path / "recall/mean/result.json").stat().st_mtime_ns == before
    assert ("max", "conv") in rows_of(tmp_path)
    assert rows_of(tmp_path)["mean", None]["bits per character"]["n"] == 2


@pytest.mark.usefixtures("pretended")
def test_a_folder_of_other_settings_is_left_alone(tmp_path):
    folder = tmp_path / "a"
    tiny_ablation(folder)
    before = (folder / "report.md").read_bytes()
    for how, message in (
        ({}, "already holds experiments"),
        ({"text_tokens": 64, "resume": True}, "other settings: max_tokens 128 → 64"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_ablation(folder, **how)
    assert (folder / "report.md").read_bytes() == before
    for path in folder.glob("*/experiment.json"):  # of a program that had fewer settings
        plan = json.loads(path.read_text())
        del plan["settings"]["model"]["bptt"]
        path.write_text(json.dumps(plan))
    tiny_ablation(folder, resume=True)


def test_right_answers_count_between_two_distances():
    recall = {"edges": [0, 64, 128, 192], "asks": [10, 30, 0], "accuracy": [1.0, 0.5, None]}
    assert right_between(0, 128)({"recall": recall}) == pytest.approx(25 / 40)
    assert right_between(64, 190)({"recall": recall}) == 0.5
    assert right_between(128, 192)({"recall": recall}) is None
    for right, share in ((0.25, 0), (1, 1), (0.625, 0.5)):
        result = {"recall": {"edges": [64, 96, 128], "asks": [3, 1], "accuracy": [right, right]}}
        assert beyond_chance(64, 128).of(result | {"chance": 0.25}) == pytest.approx(share)


def test_a_slot_holds_bits_for_keys_and_values():
    assert bits_of(RecallStream(keys=16, values=4, set_probability=1 / 8), rate=4) == 4 / 8 * 6


def test_rivals_lead_to_the_base():
    assert [*RecallGrid().rivals_of("both-losses-2")] == ["compressive-2", "transformer-xl-2", ""]
    assert [[*Slots().rivals_of(name)] for name in ("c2", "mine", "usual")] == [["usual"], ["usual"], []]
