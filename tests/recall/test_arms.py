from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memformers.models.costs import attention_operations
from memformers.models.language_model import MemoryLM
from memformers.recall.arms import SETTINGS
from memformers.recall.config import RecallConfig, run_of
from tests.builders import tiny_recall


@pytest.mark.parametrize(
    ("reach", "keys", "sees_back"), [("near", 128, (192, 384)), ("far", 256, (320, 2112))]
)
def test_both_memories_have_equal_keys_and_the_compressive_one_looks_farther(reach, keys, sees_back):
    setting = SETTINGS[reach]
    arms = [setting.arm(name) for name in ("transformer-xl", "compressive")]
    assert [arm.keys for arm in arms] == [keys, keys]
    assert tuple(map(setting.sees_back, arms)) == sees_back
    assert setting.reach == sees_back[1]


@pytest.mark.parametrize("arm", SETTINGS["near"].arms, ids=lambda arm: arm.name)
def test_only_the_memory_differs_between_arms(arm):
    setting = SETTINGS["near"]
    runs = [run_of(setting, one, 3, 2).train for one in (setting.arms[0], arm)]
    names = ("model", "mem_len", "c_mem_len", "compression_rate", "compression", "compression_start")
    memory = {name: getattr(runs[0].model, name) for name in names}
    assert replace(runs[1], model=replace(runs[1].model, **memory)) == runs[0]
    assert runs[1].model.vocab_size == setting.stream.vocab_size


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max", {"compression": "max"}),
        ("dilated", {"compression": "dilated"}),
        ("auto-encoding", {"compression_loss": "auto-encoding"}),
        ("conv", {}),
    ],
)
def test_another_compression_differs_from_the_convolution_in_that_alone(name, settings):
    setting = SETTINGS["near"]
    conv, other = (run_of(setting, setting.arm(arm), 3, 2).train for arm in ("conv", name))
    assert conv.model.compression_start == "random"
    assert other == replace(conv, model=replace(conv.model, **settings))


def test_other_compressions_are_trained_only_where_they_are_named():
    assert not {arm.name for arm in RecallConfig().chosen} & {"max", "conv"}
    assert [arm.name for arm in RecallConfig(arms=("max", "mean")).chosen] == ["mean", "max"]
    assert max(map(SETTINGS["near"].sees_back, SETTINGS["near"].all_arms)) == SETTINGS["near"].reach


def test_the_ceiling_looks_as_far_as_the_slots_do():
    setting = SETTINGS["near"]
    assert setting.sees_back(setting.arm("ceiling")) == setting.sees_back(setting.arm("compressive"))


@pytest.mark.parametrize("name", ["no-memory", "transformer-xl", "compressive"])
def test_attention_operations_are_those_that_are_counted(name):
    """Those of a second stream: position vectors are shared by all."""
    setting = tiny_recall()
    config = replace(run_of(setting, setting.arm(name), 0, 1).train.model, kernel="naive", n_layers=2)
    layer = MemoryLM(config).transformer.layers[0].self_attn
    K = setting.arm(name).keys + config.segment_len
    counted = []
    for streams in (1, 2):
        x = torch.zeros(K, streams, config.d_model)
        with FlopCounterMode(display=False) as counter:
            layer(query=x[-config.segment_len :], key=x, value=x)
        counted.append(counter.get_total_flops())
    assert attention_operations(config) == 2 * (counted[1] - counted[0]) / config.segment_len


def test_distances_grow_by_equal_factors_from_a_segment_to_twice_the_reach():
    setting = replace(tiny_recall(), growing=0.5)
    run = run_of(setting, setting.arm("compressive"), 0, 1)
    longest, half = run.longest(), setting.train.tokens // setting.train.batch_size // 2
    top = 2 * setting.reach
    assert longest(0) == setting.train.model.segment_len
    assert longest(half // 2) == round((setting.train.model.segment_len * top) ** 0.5)
    assert longest(half) > 10**9
    assert run_of(replace(tiny_recall(), growing=0.0), setting.arms[0], 0, 1).longest() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ("mean", "min")}, "arm 'min' is unknown; this reach has no-memory, transformer-xl, "),
        ({"arms": ("mean", "mean")}, "must name each arm once"),
        ({"reach": "farther"}, "reach='farther' is unknown; use near or far"),
        ({"seeds": 0}, "seeds=0 is too small"),
        ({"tokens": 0}, "tokens=0 is too small"),
    ],
)
def test_an_experiment_that_can_not_be_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**settings)


def test_quick_is_one_seed_of_few_tokens_of_every_arm():
    quick = RecallConfig(quick=True, seeds=5)
    assert quick.n_seeds == 1
    assert quick.setting.train.tokens < RecallConfig().setting.train.tokens / 10
    assert quick.chosen == SETTINGS["near"].arms
