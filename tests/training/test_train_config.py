"""Settings of a training that can't be, and the presets of papers."""

from dataclasses import replace

import pytest
import torch

from memformers.commands.train import Train, parse_train
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig, preset_names, read_preset

OUT_OF_RANGE = {
    "parallel": ("many",), "precision": ("float16",), "optimizer": ("sgd",), "compile": (1,), "data": (3,),
    "gradient_accumulation_steps": (0,), "max_tokens": (0, 1.5), "batch_size": (0,), "evaluations": (0,),
    "log_every": (0,),
    "evaluation_tokens": (-1,), "keep_checkpoints": (0,), "checkpoint_every": (-1,),
    "checkpoint_minutes": (-1.0,), "learning_rate": (0.0, float("nan")), "muon_learning_rate": (0.0,),
    "max_grad_norm": (-1.0,), "weight_decay": (-0.1,), "warmup_fraction": (1.0,), "memory_warmup": (1.5,),
    "seed": (-1, 2**64), "beta2": (1.0,), "chunk_len": (-1,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [*(({name: value}, f"got {name}={value!r}") for name, values in OUT_OF_RANGE.items() for value in values),
     ({"gradient_accumulation_steps": 3}, "batch_size=64 .* gradient_accumulation_steps=3"),
     ({"optimizer": "adamw", "muon_learning_rate": 0.02}, "muon_learning_rate=0.02 .* optimizer='adamw'"),
     ({"chunk_len": 63}, "chunk_len=63 .* 64")],
)  # fmt: skip
def test_wrong_settings_are_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        replace_nested(TrainConfig(), **changes)


@pytest.mark.parametrize(
    ("tokens", "read"), [(2_700_000, 32_768), (1_572_864, 32_768), (96_000, 2_000), (1_000, 512)]
)
def test_evaluations_read_at_most_an_eighth(tokens, read):
    config = TrainConfig(max_tokens=tokens)
    assert config.evaluation_tokens == read
    assert replace_nested(config, evaluation_tokens=0).evaluation_tokens == 0


# Millions of parameters of the published script and weights, where the paper's table has another number.
COUNTED = {"wt103-large": 285}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_papers_parameters(name):
    preset = read_preset(name)
    assert preset["source"]
    assert preset["config"].optim.schedule == "cosine", "as in the papers"
    with torch.device("meta"):
        model = MemoryLM(replace(preset["config"].model, vocab_size=preset["vocab_size"]))
    millions = round(sum(p.numel() for p in model.parameters()) / 1e6)
    assert preset["parameters"] is None or millions == COUNTED.get(name, preset["parameters"])


def test_options_change_a_preset():
    train = parse_train(["--preset", "enwik8-12l", "--n-layers", "3"], Train())
    assert train.config == replace_nested(read_preset("enwik8-12l")["config"], n_layers=3)


def test_an_unknown_preset_gets_the_list_of_all():
    with pytest.raises(UserError, match=r"enwik8-12l, .*wt103-large"):
        parse_train(["--preset", "enwik9"], Train())
