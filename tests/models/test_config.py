"""Settings that no model can be built from, and what a model can't be called with."""

import inspect
import re
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch

from memformers import AdaptiveConfig, ModelConfig
from memformers.models.config import OF_MODELS, ModelName
from memformers.training.config import TrainConfig
from tests.builders import small_lm
from tests.texts import tokens

NOT_LEARNED = "which has nothing to learn"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({name: value}, f"expected {name} to be .*got {name}=")
            for name, values in {
                "model": ("lstm", None),
                "d_model": ("128", 1.5, 0),
                "heads": (np.int64(4), 0),
                "n_layers": (0, 10_001),
                "d_ff": (0,),
                "vocab_size": (0,),
                "segment_len": (0,),
                "bptt": (-1,),
                "dropout": (-0.1, 1.0, float("nan")),
                "norm": ("both",),
                "kernel": ("fast",),
                "positions": ("rotary",),
                "position_features": (0,),
                "clamp_len": (0,),
                "embedding": ("wide",),
                "compression": ("min",),
                "compression_start": ("zero",),
                "compression_loss": ("l2",),
                "mem_len": (-1, True, (1, 2.0, 3, 4), [1, 2, 3, 4], 10**99),
                "c_mem_len": (-1, (1, -1, 0, 1)),
                "compression_rate": (0, (1, 1, 0, 1)),
            }.items()
            for value in values
        ),
        ({"d_model": 100, "heads": 8}, "d_model=100 is not divisible by heads=8; .* 96 or 104"),
        ({"mem_len": (3, 4)}, r"mem_len=\(3, 4\) is for 2 layers, but n_layers=4; give one number for each"),
        ({"c_mem_len": (3,)}, r"c_mem_len=\(3,\) is for 1 layers, but n_layers=4"),
        ({"same_length": True, "mem_len": 0}, "same_length=True needs a memory, got mem_len=0"),
        ({"same_length": True, "mem_len": (1, 2, 0, 4)}, "same_length=True needs a memory"),
        *(
            ({"model": "compressive"} | settings, message)
            for settings, message in (
                ({"compression": "mean", "compression_start": "mean"}, f"'mean', {NOT_LEARNED}"),
                ({"compression": "max", "compression_loss": "auto-encoding"}, f"'max', {NOT_LEARNED}"),
                ({"compression": "most-used", "bptt": 1}, f"bptt=1 .*'most-used', {NOT_LEARNED}"),
                ({"compression_loss": "none"}, "would leave compression='conv' untrained; .* bptt=1 or more"),
                ({"compression": "dilated", "compression_loss": "none"}, "compression='dilated' untrained"),
                (
                    {"compression": "dilated", "bptt": 1, "compression_rate": (4, 4, 4, 7)},
                    "segment_len=64 .*compression_rate=7",
                ),
            )
        ),
        *(
            ({"model": model, name: value}, f"{name}={value!r} is for model=.*, got model='{model}'")
            for name, value in {
                "same_length": True,
                "compression": "mean",
                "compression_start": "mean",
                "compression_loss": "auto-encoding",
                "bptt": 1,
            }.items()
            for model in get_args(ModelName)
            if model not in OF_MODELS[name]
        ),
    ],
)
def test_settings_that_no_model_can_be_built_from_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize("config", [ModelConfig, TrainConfig])
def test_the_help_of_a_setting_names_the_models_that_use_it(config):
    source = "\n".join(inspect.getsource(kind) for kind in config.__mro__[:-1])
    for name in (field.name for field in fields(config)):
        (said,) = re.findall(
            rf'^    {name}: [^"]*?=[^\n]*\n    """(.*?)"""', source, re.DOTALL | re.MULTILINE
        )
        models = re.findall(r"\(((?:transformer-xl|compressive)[^()]*)\)", " ".join(said.split()))
        assert models == ([", ".join(OF_MODELS[name])] if name in OF_MODELS else []), name


@pytest.mark.parametrize(
    ("embedding", "settings", "message"),
    [("plain", {"cutoffs": (3,)}, r"cutoffs=\(3,\) is for an adaptive embedding"),
     ("plain", {"tie_weights": True}, "tie_weights=True is for an adaptive embedding"),
     ("adaptive", {"cutoffs": (7, 3)}, r"ascending order, each once, got cutoffs=\(7, 3\)"),
     ("adaptive", {"cutoffs": (0,)}, r"at least 1, got cutoffs=\(0,\)"),
     ("adaptive", {"div_val": 0}, "div_val=0"),
     ("adaptive", {"d_embed": 0}, "d_embed=0"),
     ("adaptive", {"cutoffs": (3, 7), "div_val": 4, "d_embed": 8}, "cluster 3, .* use d_embed=16 or more")],
)  # fmt: skip
def test_an_embedding_that_cannot_be_is_an_error(embedding, settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(embedding=embedding, adaptive=AdaptiveConfig(**settings))


SHAPE = r"integers \[segment, batch\]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*(((bad,), SHAPE) for bad in (torch.zeros(3), torch.zeros(3, 2), tokens(0), tokens(3, 0))),
     ((torch.tensor([[3], [11]]),), "from 0 to 10, of vocab_size=11, got tokens from 3 to 11"),
     ((tokens(7).to("meta"),), "tokens are on meta, but the model is on cpu; move them"),
     ((tokens(7), ((torch.zeros(5, 2, 12),) * 2,)), "a Memory or None, got a tuple"),
     ((tokens(7), None, tokens(6)), r"targets.* \[7, 2\] on cpu, got .* \[6, 2\] on cpu"),
     ((tokens(7), None, None, torch.zeros(6, 2).bool()), r"doc_starts, .* \[7, 2\] on cpu")],
)  # fmt: skip
def test_what_a_model_can_not_be_called_with_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        small_lm("transformer-xl")(*arguments)
