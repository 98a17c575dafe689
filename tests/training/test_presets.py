from dataclasses import replace

import pytest
import torch

from memformers.commands.train import Train, parse_train
from memformers.common.text import UserError
from memformers.models.language_model import MemoryLM
from memformers.training.config import preset_names, read_preset

COUNTED = {"wt103-large": 285}
"""Millions of parameters of the published script and weights, where the paper's table has another number."""


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_training_with_the_papers_number_of_parameters(name):
    preset = read_preset(name)
    assert preset.source
    assert preset.config.optim.schedule == "cosine", "as in the papers"
    with torch.device("meta"):
        model = MemoryLM(replace(preset.config.model, vocab_size=preset.vocab_size))
    millions = round(sum(p.numel() for p in model.parameters()) / 1e6)
    assert preset.parameters is None or millions == COUNTED.get(name, preset.parameters)


def test_options_change_a_preset():
    train = parse_train(["--preset", "enwik8-12l", "--n-layers", "3"], Train())
    assert train.config == replace(
        read_preset("enwik8-12l").config, model=replace(read_preset("enwik8-12l").config.model, n_layers=3)
    )


def test_an_unknown_preset_gets_the_list_of_all():
    with pytest.raises(UserError, match=r"enwik8-12l, .*wt103-large"):
        parse_train(["--preset", "enwik9"], Train())
