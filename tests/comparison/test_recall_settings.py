from dataclasses import replace

import pytest

from memformers.comparison import recall
from memformers.comparison.recall import SETTINGS, RecallConfig, paper_ablation, sees_back
from memformers.models.base import memory_facts
from memformers.models.language_model import MemoryLM
from tests.builders import tiny_recall

NEAR = SETTINGS["near"]
MEMORY = ("model", "mem_len", "c_mem_len", "compression_rate", "compression", "compression_start")


@pytest.mark.parametrize(
    ("reach", "keys", "farthest"), [("near", 128, (192, 384)), ("far", 256, (320, 2112))]
)
def test_both_memories_have_equal_keys_and_the_compressive_one_looks_farther(reach, keys, farthest):
    setting = SETTINGS[reach]
    models = [setting.run(name).train.model for name in ("transformer-xl", "compressive")]
    assert [memory_facts(model)["keys"] for model in models] == [keys, keys]
    assert tuple(map(sees_back, models)) == farthest
    assert setting.run("no-memory").recall.reach == farthest[1]
    assert setting.ceiling == (reach == "near")
    if setting.ceiling:
        assert sees_back(setting.run("ceiling").train.model) == farthest[1]


@pytest.mark.parametrize("arm", NEAR.arms, ids=lambda arm: arm.name)
def test_only_the_memory_differs_between_arms(arm):
    runs = [NEAR.run(name, 3).train for name in ("no-memory", arm.name)]
    memory = {name: getattr(runs[0].model, name) for name in MEMORY}
    assert replace(runs[1], model=replace(runs[1].model, **memory)) == runs[0]
    assert runs[1].model.vocab_size == NEAR.recall.stream.vocab_size


def test_another_compression_differs_from_the_convolution_in_that_alone():
    conv = NEAR.run("conv").train
    assert conv.model.compression_start == "random"
    for name, settings in (
        ("max", {"compression": "max"}), ("dilated", {"compression": "dilated"}),
        ("upper-half", {"c_mem_len": (0, 64)}),
    ):  # fmt: skip
        assert NEAR.run(name).train == replace(conv, model=replace(conv.model, **settings))


def test_what_is_claimed_is_measured_on_streams_on_which_nothing_is_chosen(monkeypatch):
    measured = []
    monkeypatch.setattr(recall, "recall_segments", lambda *args: measured.append(args[-1]) or iter(()))
    monkeypatch.setattr(recall, "recall_by_distance", lambda *args, **_: {})
    for seed in (0, 1):
        run = NEAR.run("compressive", seed)
        for each in (run, replace(run, recall=replace(run.recall, measured_for="choosing"))):
            recall.measure(MemoryLM(NEAR.train.model), each, 64)
    assert len(set(measured)) == 4
    assert all(seed < 2**63 for seed in measured)


def test_arms_are_the_usual_ones_or_those_that_are_named_or_described(tmp_path):
    usual = RecallConfig().experiment
    assert list(usual.arms) == NEAR.arms
    assert not {arm.name for arm in usual.arms} & {arm.name for arm in paper_ablation(NEAR.train.model)}
    named, own = RecallConfig(arms=("max", "c2: compression_rate=2 growing=0.25")).experiment.arms
    assert named.settings["model.compression"] == "max"
    assert own.settings == {"model.compression_rate": 2, "recall.growing": 0.25}
    (tmp_path / "arms").write_text("# none\n")
    with pytest.raises(ValueError, match="needs an arm"):
        RecallConfig(arms=(str(tmp_path / "arms"),))
    quick = RecallConfig(quick=True, seeds=5).experiment
    assert (quick.seeds, list(quick.arms)) == (1, NEAR.arms)
    assert quick.train.tokens < usual.train.tokens / 10
    assert (quick.scale, usual.scale) == (quick.train.tokens / usual.train.tokens, 1.0)


def test_distances_grow_by_equal_factors_from_a_segment_to_twice_the_reach():
    run = tiny_recall().run("compressive")
    S, half = run.train.model.segment_len, run.train.tokens // run.train.batch_size // 2
    middle = round((S * 2 * run.recall.reach) ** 0.5)
    assert [run.longest()(step) for step in (0, half // 2)] == [S, middle]
    assert run.longest()(half) > 10**9
    assert replace(run, recall=replace(run.recall, growing=0.0)).longest() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"arms": ("mean", "min")}, "'min' is unknown.* no-memory"), ({"arms": ("mean", "mean")}, "twice"),
     ({"arms": ("mine: reach=5",)}, "'mine': reach is the same"),
     ({"arms": ("mine: growing=2",)}, "'mine': .*growing"),
     ({"reach": "farther"}, "reach='farther'"), ({"seeds": 0}, "seeds=0"), ({"tokens": 0}, "tokens=0")],
)  # fmt: skip
def test_an_experiment_that_can_not_be_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**settings)
