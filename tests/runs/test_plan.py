"""The plan of an experiment, as this version and earlier ones have written it."""

from dataclasses import asdict, replace

import pytest

from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.comparison.arms import Arm, with_settings
from memformers.comparison.experiment import Experiment, make_plan, merge_arms
from memformers.comparison.text import TEXT, CompareConfig
from memformers.report.arms import arms_of, measure_of
from memformers.runs.plan import Plan, Planned, PlannedArm, TaskInfo, read_plan, runs_of
from memformers.runs.reader import read_runs
from tests.builders import small_training

BASE = small_training(model="compressive", data="builtin")
EARLIER_ARMS = [
    {"name": "transformer-xl", "settings": {"model.model": "transformer-xl", "model.mem_len": 20},
     "label": "", "rival": ""},
    {"name": "mean", "settings": {"model.compression": "mean", "step.compile": True}, "label": "Means",
     "rival": "transformer-xl"},
]  # fmt: skip


@pytest.fixture
def earlier(tmp_path):
    """The folder of an experiment whose arms are the settings in which they differ."""
    base = replace(BASE, model=replace(BASE.model, compression="max"))
    plan = {"task": "text", "settings": asdict(base), "arms": EARLIER_ARMS, "scale": 0.5,
            "runs": {"transformer-xl": {"arm": "transformer-xl", "seed": 0}},
            "commands": ["a command"]}  # fmt: skip
    write_json(tmp_path / "experiment.json", plan)
    return base, tmp_path


def test_a_plan_is_read_as_it_was_written(tmp_path):
    experiment = CompareConfig(BASE, seeds=2, arms=("mean: model=compressive compression=mean",)).experiment()
    plan = make_plan(experiment, experiment.arms, None, tmp_path)
    write_json(tmp_path / "experiment.json", plan)
    again = read_plan(tmp_path)
    assert merge_arms(experiment, again, tmp_path, resume=True) == list(experiment.arms)
    assert again.runs == plan.runs
    assert again.seeds == 2


def test_a_folder_without_a_plan_has_none(tmp_path):
    assert read_plan(tmp_path) is None


def test_arms_of_an_earlier_plan_are_complete(earlier):
    base, folder = earlier
    plan = read_plan(folder)
    xl = Arm("transformer-xl", with_settings(base, model="transformer-xl", mem_len=20))
    arms = merge_arms(Experiment(TEXT, base, (xl,)), plan, folder, resume=True)
    assert {arm.name: arm.config for arm in arms} == {
        "transformer-xl": xl.config,
        "mean": with_settings(base, compression="mean", compile=True),
    }
    assert [arm.label for arm in arms] == ["", "Means"]
    assert (plan.scale, plan.commands) == (0.5, ("a command",))
    assert plan.runs == {"transformer-xl": Planned("transformer-xl", 0)}


def test_a_broken_plan_is_one_line(tmp_path):
    earlier = {"task": "text", "arms": EARLIER_ARMS}
    for plan in (
        {"mine": 1},
        {"arms": 7},
        {"task": "text", "settings": {}, "arms": [3]},
        {"task": "text", "settings": {}, "arms": [], "commands": {"a": 1}},
        earlier | {"settings": {"model": "compressive"}},
        earlier | {"settings": [1]},
    ):
        write_json(tmp_path / "experiment.json", plan)
        with pytest.raises(UserError, match=r"^[^\n]*experiment\.json[^\n]*$"):
            read_plan(tmp_path)


def test_all_arms_of_a_seed_come_before_those_of_the_next():
    assert list(runs_of(["a", "b"], [3, 4])) == ["a", "b", "a-seed4", "b-seed4"]
    assert runs_of(["a"], [3, 4])["a-seed4"] == Planned("a", 4)


def test_a_task_outside_of_the_package_describes_its_runs(tmp_path):
    """What its results have, and what arms are compared by, in an experiment and in one of its runs alone."""
    info = TaskInfo(results=("wins",), measure={"label": "wins", "of": "wins", "better": 1})
    arm = PlannedArm("a", {"model": {"model": "transformer"}})
    plan = Plan("games", {}, (arm,), {"a": Planned("a", 0)}, task_info=info)
    write_json(tmp_path / "experiment.json", plan)
    progress = {"tokens": 1, "seconds": 1.0, "evaluation_seconds": 0.0, "peak_memory_bytes": None}
    config = {"model": {}, "data": "", "max_tokens": 1, "seed": 0}
    facts = dict.fromkeys(("corpus", "parameters", "memory", "keys", "attention_operations", "environment"))
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "a" / "config.json", config)
    write_json(tmp_path / "a" / "run.json", facts)
    write_json(tmp_path / "a" / "result.json", progress)
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(UserError, match=r"result\.json is broken: expected wins"):
            read_runs(folder, "games")
    write_json(tmp_path / "a" / "result.json", progress | {"wins": 3})
    for folder in (tmp_path, tmp_path / "a"):
        [run] = read_runs(folder, "games")
        assert (run.task, measure_of(arms_of([run])).label) == ("games", "wins")
    with pytest.raises(UserError, match="an experiment on games, not on text"):
        read_runs(tmp_path)
