"""Settings that no model can be built from, and what a model can't be called with."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from memformers import AdaptiveConfig, CoreConfig, MemoryCore, MemoryLM, ModelConfig, Stepper, train
from memformers.models.config import SETTING_MODELS, ModelName
from memformers.models.facts import memory_facts, operations
from tests.builders import SMALL, small_lm
from tests.texts import tokens

NUMBERS = ("n_layers", "d_ff", "vocab_size", "segment_len", "position_features", "clamp_len")
NAMES = ("norm", "kernel", "positions", "embedding", "gate")
NAMES += ("compression", "compression_start", "compression_loss")
BAD = {
    **dict.fromkeys(NUMBERS, (0,)), **dict.fromkeys(NAMES, ("both", None)), "model": ("lstm", None),
    "d_model": ("128", 1.5, 0), "n_heads": (np.int64(4), 0), "dropout": (-0.1, 1.0, float("nan")),
    "mem_len": (-1, True, (1, 2.0, 3, 4), [1, 2, 3, 4], 10**99), "c_mem_len": (-1, (1, -1, 0, 1)),
    "compression_rate": (0, (1, 1, 0, 1)), "bptt": (-1,),
}  # fmt: skip
UNUSED = {"same_length": True, "compression": "mean", "compression_start": "mean", "bptt": 1,
          "compression_loss": "none"}  # fmt: skip
COMPRESSIVE = [
    ({"compression": "mean", "compression_start": "mean"}, "no parameters"),
    ({"compression": "max", "bptt": 1}, "no parameters"),
    ({"compression_loss": "none"}, "bptt=1"),
    ({"compression": "dilated", "compression_loss": "none"}, "untrained"),
    ({"compression": "dilated", "bptt": 1, "compression_rate": (4, 4, 4, 7)}, "rate=7"),
]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"d_model": 100, "n_heads": 8}, "96 or 104"), ({"mem_len": (3, 4)}, "2 lengths"),
     ({"c_mem_len": (3,)}, "1 lengths"), ({"same_length": True, "mem_len": (1, 2, 0, 4)}, "needs a memory"),
     ({"gate": "gru", "norm": "post"}, "norm='pre'"), ({"memory_config": 3}, "memory_config.*3"),
     ({"n_layers": 10_001}, "n_layers"),
     *(({"model": "compressive"} | settings, word) for settings, word in COMPRESSIVE),
     *(({name: value}, f"expected {name}") for name, values in BAD.items() for value in values),
     *(({"model": model, name: value}, f"{name}={value!r} needs model=") for name, value in UNUSED.items()
       for model in get_args(ModelName) if model not in SETTING_MODELS[name])],
)  # fmt: skip
def test_settings_that_no_model_can_be_built_from_are_an_error(settings, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("embedding", "settings", "word"),
    [("plain", {"cutoffs": (3,)}, "adaptive"), ("plain", {"tie_weights": True}, "adaptive"),
     ("adaptive", {"cutoffs": (7, 3)}, "ascending"), ("adaptive", {"cutoffs": (0,)}, "at least 1"),
     ("adaptive", {"cutoffs": (300,)}, "vocab_size=256"), ("adaptive", {"div_val": 0}, "div_val"),
     ("adaptive", {"d_embed": 0}, "d_embed"),
     ("adaptive", {"cutoffs": (3, 7), "div_val": 4, "d_embed": 8}, "d_embed=16")],
)  # fmt: skip
def test_an_embedding_that_cannot_be_is_an_error(embedding, settings, word):
    with pytest.raises(ValueError, match=word):
        MemoryLM(ModelConfig(embedding=embedding, adaptive=AdaptiveConfig(**settings)))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [*(((bad,), "integers") for bad in (torch.zeros(3), torch.zeros(3, 2), tokens(0), tokens(3, 0))),
     ((np.zeros((3, 2), dtype=int),), "ndarray"), ((torch.tensor([[3], [11]]),), "from 3 to 11"),
     ((torch.tensor([[3], [-1]]),), "from -1 to 3"), ((tokens(7).to("meta"),), "meta"),
     ((tokens(7), None, tokens(6)), "targets"), ((tokens(7), None, np.zeros((7, 2))), "ndarray"),
     *(((tokens(7), None, None, starts), "doc_starts") for starts in (
         torch.zeros(6, 2).bool(), torch.zeros(7).bool(), torch.zeros(7, 2), [True])),
     ((tokens(7), None, torch.full((7, 2), -1)), "targets below vocab_size=11.* -1 to"),
     ((tokens(7), None, torch.full((7, 2), 11)), "targets below vocab_size=11.* to 11")],
)  # fmt: skip
def test_what_a_model_can_not_be_called_with_is_an_error(arguments, word):
    with pytest.raises(ValueError, match=word):
        small_lm("transformer-xl")(*arguments)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"x": torch.zeros(5, 2, 2)}, r"\[5, 2, 2\]"), ({"x": torch.zeros(5, 3)}, r"\[5, 3\]"),
     ({"x": torch.zeros(0, 2, 3)}, r"\[0, 2, 3\]"), ({"x": torch.zeros(5, 2, 3).double()}, "float64"),
     ({"x": np.zeros((5, 2, 3))}, "ndarray"), ({"memory": 5}, "int"),
     ({"doc_starts": torch.zeros(5, 1, dtype=torch.bool)}, "doc_starts")],
)  # fmt: skip
def test_what_a_core_can_not_read_is_an_error(arguments, word):
    core = MemoryCore(CoreConfig(d_input=3, d_model=8))
    with pytest.raises(ValueError, match=word):
        core(**({"x": torch.zeros(5, 2, 3)} | arguments))
    with pytest.raises(ValueError, match="steps"):
        Stepper(core, 2).read(torch.zeros(5, 3, 3))


def test_a_core_is_built_from_widths_settings_or_a_config():
    config = CoreConfig("compressive", d_input=3, d_model=8, mem_len=5)
    by_position = MemoryCore(3, 8, model="compressive", mem_len=5)
    by_name = MemoryCore(d_input=3, d_model=8, model="compressive", mem_len=5)
    for core in (by_position, by_name, MemoryCore(config), MemoryCore(config=config)):
        assert core.config == config


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [((3, 8), {"mem_lens": 5}, "mem_lens is not a setting of a MemoryCore; did you mean 'mem_len'"),
     ((3, 8), {"d_input": 4}, "d_input is 3 and 4"),
     ((3.0, 8), {}, "expected config to be of type CoreConfig"),
     ((3, 7), {}, "d_model=7 is not divisible"),
     ((CoreConfig(),), {"mem_len": 5}, "mem_len beside the config")],
)  # fmt: skip
def test_settings_of_a_core_that_do_not_fit_are_an_error(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        MemoryCore(*arguments, **settings)


@pytest.mark.parametrize("build", [MemoryLM, MemoryCore, train])
def test_settings_of_another_kind_are_an_error(build):
    with pytest.raises(ValueError, match="expected config to be of type"):
        build({"model": "compressive"})


def test_what_is_measured_of_a_model_knows_each_layers_lengths():
    lengths = {"mem_len": (2, 9, 0), "c_mem_len": (5, 0, 3), "compression_rate": (3, 2, 4)}
    config = replace(SMALL, model="compressive", n_layers=3, **lengths)
    assert config.positions_of_layers == [2 + 15, 9, 12]
    assert config.longest_attention == 7 + 9  # the second layer's
    facts = memory_facts(config)
    # After 7, 14, … tokens: 1, 2, 0 positions in the first layer, 9, 8 in the second; 3, 2, 1, 0 wait in the
    # third, which has M = 0. So 7 tokens mod 12 are 11 once, with 2 + 9 + 3 positions beside 5 + 3 slots.
    assert facts["memory"] == {"one_layer": 17, "all_layers": 17 + 9 + 15}
    assert facts["keys"] == pytest.approx((2 + 9 + 3 + 8) / 3)
    assert facts["mean_keys"] == pytest.approx((1 + 8.5 + 1.5 + 8) / 3)
    assert facts["configured_keys"] == pytest.approx((7 + 9 + 3) / 3)
    assert facts["attention_operations"] == sum(operations(12, 7, 7 + keys) // 7 for keys in (6, 8.5, 4.5))
    assert operations(5, 2, 3) == 6 * 2 * 3 * 5 + 4 * (2 + 3) * 25
