"""The search for recipes, at a size of moments."""

import pytest

from experiments import recipes as program
from experiments.recipes import CANDIDATES, Recipes, measured_speeds, recipes_table, work_of
from memformers.common.files import read_json, write_json
from memformers.runs.reader import read_runs
from tests.builders import small_training
from tests.report.fake_runs import fake_comparison


def test_the_table_has_each_recipe_beside_the_default_seed_by_seed(tmp_path):
    names = {"default": (1.5, 1.6, 1.7), "β₂ 0.999": (1.51, 1.61, 1.71), "6 layers": (1.4,)}
    bits = {f"recipe-{i}": [loss / 0.7 for loss in losses] for i, losses in enumerate(names.values())}
    fake_comparison(tmp_path, bits)
    plan = read_json(tmp_path / "experiment.json")
    for arm, label in zip(plan["arms"], names, strict=True):
        arm["label"] = label
    write_json(tmp_path / "experiment.json", plan)
    assert recipes_table(read_runs(tmp_path)).splitlines()[2:] == [
        "| 6 layers | 0.00 M | 1.400 | −0.100 | 1 |",
        "| default | 0.00 M | 1.600 ± 0.248 | – | 3 |",
        "| β₂ 0.999 | 0.00 M | 1.610 ± 0.248 | +0.010 ± 0.000 | 3 |",
    ]


def test_only_recipes_whose_steps_have_the_same_work_share_a_speed(monkeypatch):
    work = {name: work_of(name) for name in CANDIDATES}
    default = {name for name, of_name in work.items() if of_name == work["default"]}
    assert {"β₂ 0.999", "no weight decay", "text from front to back"} <= default
    assert not default & {"32 streams", "full memory from the beginning", "float32", "memory of 128"}
    monkeypatch.setattr(program, "speed", lambda name, data: {"float32": 5.0}[name])
    names = ("default", "float32", "β₂ 0.999")
    assert measured_speeds(names, "", {"default": 7.0}) == {"default": 7.0, "float32": 5.0, "β₂ 0.999": 7.0}


@pytest.mark.usefixtures("quick_runs")
def test_every_recipe_gets_the_tokens_of_its_time(tmp_path, monkeypatch):
    small = small_training(evaluations=1, model="transformer-xl")
    monkeypatch.setattr(program, "DEFAULT", small)
    monkeypatch.setattr(program, "TIMED_STEPS", 1)
    Recipes(out=tmp_path, data="builtin", recipes=("default", "dropout 0.05"), seconds=0.01).run()
    speeds = read_json(tmp_path / "speeds.json")
    runs = {run.label: run for run in read_runs(tmp_path)}
    assert set(runs) == {"default", "dropout 0.05"}
    assert all(run.config["tokens"] == max(round(speeds[name] * 0.01), 1) for name, run in runs.items())
    assert runs["dropout 0.05"].config["model"]["dropout"] == 0.05
    assert "| default |" in (tmp_path / "table.md").read_text()
