import csv
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import read_json, write_json
from memformers.comparison.arms import changed_settings
from memformers.comparison.experiment import run_experiment
from memformers.comparison.recall import task
from memformers.comparison.recall.setup import SETTINGS, RecallConfig, paper_ablation
from memformers.comparison.recall.task import RECALL, layer_reach
from memformers.models.facts import memory_facts
from memformers.models.language_model import MemoryLM
from memformers.report.document import write_report
from memformers.report.recall import slots_of
from memformers.runs.folder import alone_in
from memformers.runs.metrics import read_metrics
from memformers.training.job import build_model
from tests.builders import tiny_recall
from tests.processes import run_module

ARMS = ["no-memory", "transformer-xl", "compressive", "frozen", "mean", "ceiling"]
TWO = ("transformer-xl", "compressive")
NEAR = SETTINGS["near"]
MEMORY = ("model", "mem_len", "c_mem_len", "compression_rate", "compression", "compression_start")


def run_in(folder):
    return RECALL.read_config(read_json(folder / "config.json"), str(folder))


def unchanged_weights(folder):
    """The names of the weights that the run in ``folder`` has left as they were drawn, and of all weights."""
    drawn = build_model(run_in(folder)).state_dict()
    learned = MemoryLM.from_pretrained(folder / "model").state_dict()
    unchanged = {name for name, weight in drawn.items() if torch.equal(weight, learned[name])}
    return unchanged, drawn.keys()


def results_by_arm(folder):
    """What ``results.json`` says of each arm."""
    return {arm["name"]: arm for arm in read_json(folder / "results.json")["arms"]}


def test_every_arm_is_trained_from_every_seed_and_reported(done):
    finished = {path.parent.name for path in done.glob("*/result.json")}
    assert finished == {*ARMS, *(f"{arm}-seed1" for arm in ARMS)}
    by_name = results_by_arm(done)
    assert list(by_name) == ARMS
    assert by_name["compressive"]["keys"] == by_name["transformer-xl"]["keys"] == 64
    assert by_name["compressive"]["parameters"] > by_name["mean"]["parameters"]
    assert set(by_name["compressive"]["right"]) == {
        "untouched", "slots zeroed", "slots swapped", "memory zeroed", "memory swapped"
    }  # fmt: skip
    with open(done / "results.csv", newline="") as file:
        # Six arms untouched, four controls of three with slots, and two of two with positions alone.
        controls = 6 + 4 * 3 + 2 * 2
        n_bins = len(read_json(done / "results.json")["edges"]) - 1
        # From two seeds.
        assert len(list(csv.DictReader(file))) == 2 * n_bins * controls
    for figure in ("recall_accuracy", "recall_controls"):
        assert (done / "figures" / f"{figure}.svg").is_file()
        assert f"figures/{figure}.svg" in (done / "report.md").read_text()


@pytest.mark.usefixtures("quick_runs")
def test_an_arm_trains_in_a_process_from_its_config_alone(tmp_path):
    run = tiny_recall().run("mean")
    write_json(tmp_path / "config.json", asdict(run))
    ended = run_module("memformers.comparison.recall", tmp_path)
    assert ended.code == 0, ended.err
    assert f"{tmp_path.name}: 100%, " in ended.out
    assert read_json(tmp_path / "result.json")["tokens"] == 256
    write_json(tmp_path / "config.json", {"max_tokens": 5, "recall": 7})
    assert run_module("memformers.comparison.recall", tmp_path).says("expected recall to be")


def test_a_run_has_curves_and_its_setting(done):
    records = read_metrics(done / "compressive")
    assert [record["tokens"] for record in records if "loss.train" in record] == [128, 256]
    [evaluated] = [record for record in records if "accuracy.valid" in record]
    assert "recall.from_00000" in evaluated
    setup = replace(tiny_recall(), base=replace_nested(tiny_recall().base, device="auto"))
    assert run_in(done / "compressive") == setup.run("compressive")


def test_a_frozen_compression_stays(done):
    unchanged, names = unchanged_weights(done / "frozen-seed1")
    compressions = {name for name in names if ".f_c." in name}
    assert compressions
    assert unchanged == compressions
    unchanged_if_trained, _ = unchanged_weights(done / "compressive-seed1")
    assert not unchanged_if_trained & compressions


@pytest.mark.usefixtures("quick_runs")
def test_a_stopped_training_begins_again_after_its_process(tmp_path):
    config = RecallConfig(seeds=1, arms=TWO)
    run_experiment(config.experiment(), tmp_path / "r")
    first = read_json(tmp_path / "r" / "compressive" / "result.json")
    (tmp_path / "r" / "compressive" / "result.json").unlink()
    with alone_in(tmp_path / "r" / "compressive"):
        with pytest.raises(UserError, match="is being trained by another process"):
            run_experiment(config.experiment(), tmp_path / "r", resume=True, ending_seconds=0.0)
        with pytest.raises(UserError, match="is being trained by another process"):
            RECALL.train(tmp_path / "r" / "compressive")
    run_experiment(config.experiment(), tmp_path / "r", resume=True)
    second = read_json(tmp_path / "r" / "compressive" / "result.json")
    assert second["recall"] == first["recall"]
    assert second["controls"] == first["controls"]
    records = read_metrics(tmp_path / "r" / "compressive")
    assert [record["tokens"] for record in records] == [128, 256, 256]


@pytest.mark.parametrize(
    ("shares", "claimed"),
    [([(0.9, 0.3), (0.8, 0.25), (0.85, 0.25)], "is better by 58.3 ± 7.2 points** (3 seeds)"),
     ([(0.5, 0.4), (0.4, 0.5), (0.4, 0.4)], "**no significant difference**"),
     ([(0.9, 0.3), (0.8, 0.25)], "**Two seeds are too few")],
)  # fmt: skip
def test_the_headline_is_the_paired_difference_over_seeds(shares, claimed, done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "done")
    plan = read_json(folder / "experiment.json")
    for seed, pair in enumerate(shares):
        for arm, share in zip(("compressive", "transformer-xl"), pair, strict=True):
            run = folder / (f"{arm}-seed{seed}" if seed else arm)
            if not run.exists():
                shutil.copytree(folder / arm, run)
                plan["runs"][run.name] = {"arm": arm, "seed": seed}
            result = read_json(run / "result.json")
            bins = len(result["recall"]["asks"])
            result["recall"] |= {"accuracy": [share] * bins, "asks": [10] * bins}
            write_json(run / "result.json", result)
    write_json(folder / "experiment.json", plan)
    report = write_report(folder)
    markdown = (folder / "report.md").read_text()
    assert claimed in markdown
    assert "bits per character" not in markdown
    assert " ".join(claimed.replace("*", "").split()) in " ".join(report.answer.split())
    mean_share = sum(share for share, _ in shares) / len(shares)
    for correct in results_by_arm(folder)["compressive"]["right"]["untouched"]["by_distance"]:
        assert correct["mean"] == pytest.approx(mean_share)


@pytest.mark.parametrize(
    ("models", "found"),
    [({"xl": "transformer-xl", "slots": "compressive"}, "slots"),
     ({"mean": "compressive", "compressive": "compressive"}, "compressive"),
     ({"c2": "compressive", "c4": "compressive"}, None),
     ({"xl": "transformer-xl"}, None)],
)  # fmt: skip
def test_the_arm_with_slots_is_found_under_any_name(models, found):
    arms = []
    for name, model in models.items():
        run = SimpleNamespace(config={"model": {"model": model}})
        arms.append(SimpleNamespace(name=name, first=run))
    arm = slots_of(arms)
    assert (arm and arm.name) == found


def test_runs_without_a_mean_number_of_keys_are_reported(done, tmp_path):
    """As those of earlier versions."""
    folder = shutil.copytree(done, tmp_path / "done")
    for path in folder.glob("*/run.json"):
        facts = read_json(path)
        del facts["mean_keys"], facts["configured_keys"]
        write_json(path, facts)
    write_report(folder)
    assert results_by_arm(folder)["transformer-xl"]["mean_keys"] == 64


def test_a_recall_experiment_with_nothing_to_report_is_one_line(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "r")
    for result in folder.glob("*/result.json"):
        result.unlink()
    with pytest.raises(UserError, match="has finished, so there is nothing"):
        write_report(folder)
    (folder / "experiment.json").unlink()
    with pytest.raises(UserError, match=r"name the folder with its experiment\.json"):
        write_report(folder)


@pytest.mark.parametrize(
    ("reach", "keys", "farthest"), [("near", 128, (192, 384)), ("far", 256, (320, 2112))]
)
def test_keys_are_equal_and_compressive_looks_farther(reach, keys, farthest):
    models = [SETTINGS[reach].run(name).model for name in TWO]
    for model in models:
        assert memory_facts(model)["keys"] == keys
    assert tuple(map(layer_reach, models)) == farthest
    assert SETTINGS[reach].run("no-memory").recall.reach == farthest[1]


def test_only_the_memory_differs_between_arms():
    assert layer_reach(NEAR.run("ceiling").model) == NEAR.run("no-memory").recall.reach
    base = NEAR.run("no-memory", 3)
    memory = {name: getattr(base.model, name) for name in MEMORY}
    for arm in NEAR.arms:
        # With the memory of the base, each arm is the base.
        run = NEAR.run(arm.name, 3)
        run = replace(run, model=replace(run.model, **memory), recall=base.recall)
        assert run == base, arm.name
    assert base.model.vocab_size == NEAR.base.recall.stream.vocab_size
    conv = NEAR.run("conv")
    assert conv.model.compression_start == "random"
    for name, settings in (
        ("max", {"compression": "max"}), ("dilated", {"compression": "dilated"}),
        ("upper-half", {"c_mem_len": (0, 64)}),
    ):  # fmt: skip
        assert NEAR.run(name) == replace(conv, model=replace(conv.model, **settings))


def test_claims_are_measured_on_streams_of_their_own(monkeypatch):
    measured = []
    monkeypatch.setattr(task, "recall_segments", lambda *args: measured.append(args[-1]) or iter(()))
    monkeypatch.setattr(task, "recall_by_distance", lambda *args, **_: {})
    for seed in (0, 1):
        run = NEAR.run("compressive", seed)
        for setup in (run, replace(run, recall=replace(run.recall, measured_for="choosing"))):
            task.measure(MemoryLM(NEAR.base.model), setup, 64)
    assert len(set(measured)) == 4
    # Seeds of generators are 64-bit integers with a sign.
    assert max(measured) < 2**63


def test_arms_are_usual_named_or_described(tmp_path):
    usual = RecallConfig().experiment()
    assert list(usual.arms) == NEAR.arms
    usual_names = [arm.name for arm in usual.arms]
    for arm in paper_ablation(NEAR.base):
        assert arm.name not in usual_names
    named, described = RecallConfig(arms=("max", "c2: compression_rate=2 growing=0.25")).experiment().arms
    assert changed_settings(named.config, NEAR.base) == {"model.compression": "max"}
    changed = changed_settings(described.config, NEAR.base)
    assert changed == {"model.compression_rate": 2, "recall.growing": 0.25}
    (tmp_path / "arms").write_text("# none\n")
    with pytest.raises(ValueError, match="needs an arm"):
        RecallConfig(arms=(str(tmp_path / "arms"),)).experiment()
    quick = RecallConfig(quick=True, seeds=5).experiment()
    assert quick.seeds == 1
    assert [arm.name for arm in quick.arms] == usual_names
    assert quick.base.max_tokens < usual.base.max_tokens / 10
    assert (quick.scale, usual.scale) == (quick.base.max_tokens / usual.base.max_tokens, 1.0)


def test_distances_grow_from_a_segment_to_twice_the_reach():
    run = tiny_recall().run("compressive")
    S = run.model.segment_len
    half = run.max_tokens // run.batch_size // 2
    middle = round((S * 2 * run.recall.reach) ** 0.5)
    longest = run.longest()
    assert longest(0) == S
    assert longest(half // 2) == middle
    # From the middle of the training on, any distance.
    assert longest(half) > 10**9
    assert replace(run, recall=replace(run.recall, growing=0.0)).longest() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"arms": ("mean", "min")}, "'min' is unknown.* no-memory"), ({"arms": ("mean", "mean")}, "twice"),
     ({"arms": ("mine: reach=5",)}, "'mine': reach is the same"),
     ({"arms": ("mine: growing=2",)}, "'mine': .*growing"),
     ({"reach": "farther"}, "reach='farther'"), ({"seeds": 0}, "seeds=0"), ({"tokens": 0}, "tokens=0")],
)  # fmt: skip
def test_wrong_settings_of_an_experiment_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**settings).experiment()
