"""Saved configs, of this version and of older ones."""

import hashlib
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from memformers import AdaptiveConfig, MemoryLM, ModelConfig
from memformers.generation.memory_file import fingerprint
from memformers.models.config import upgraded
from tests.builders import small_lm

VERSION_0_1 = {
    "model": "transformer-xl", "vocab_size": 11, "d_model": 12, "heads": 3, "n_layers": 2, "d_ff": 16,
    "dropout": 0.0, "norm": "post", "positions": "sinusoidal", "kernel": "auto", "position_features": None,
    "clamp_len": None, "segment_len": 7, "mem_len": 5, "equal_spans": True, "c_mem_len": 4,
    "compression_rate": 3, "embedding": "adaptive", "cutoffs": [3, 7], "div_val": 2, "d_embed": None,
    "tie_weights": True, "tie_projections": False,
}  # fmt: skip
"""A config.json as version 0.1 wrote it."""


def test_a_config_of_version_0_1_still_loads(tmp_path):
    lm = small_lm(
        "transformer-xl",
        norm="post",
        same_length=True,
        embedding="adaptive",
        adaptive=AdaptiveConfig(cutoffs=(3, 7), div_val=2, tie_weights=True),
    )
    lm.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(VERSION_0_1))
    loaded = MemoryLM.from_pretrained(tmp_path)
    assert loaded.config == lm.config
    tokens = torch.randint(11, (9, 2))
    assert torch.equal(loaded(tokens).logits, lm.eval()(tokens).logits)


def test_todays_config_is_read_as_it_is():
    config = ModelConfig(embedding="adaptive", adaptive=AdaptiveConfig((3,)), same_length=True)
    assert upgraded(asdict(config)) == asdict(config)


def test_a_memory_that_version_0_1_saved_is_known_by_the_same_fingerprint():
    lm = small_lm("transformer-xl")
    plain = VERSION_0_1 | {"norm": "pre", "equal_spans": False, "embedding": "plain", "cutoffs": [],
                           "div_val": 1, "tie_weights": False}  # fmt: skip
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name, tensor in lm.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    assert fingerprint(lm) == digest.hexdigest()


@pytest.mark.parametrize(
    "changes", [{"d_model": "128"}, {"d_model": 1.5}, {"mem_len": True}, {"heads": np.int64(4)}]
)
def test_a_setting_that_is_no_int_is_an_error(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}=.*; give a whole number, an int"):
        ModelConfig(**changes)


def test_what_a_model_is_called_with_must_be_a_memory_and_be_where_it_is():
    lm, tokens = small_lm("transformer-xl"), torch.zeros(7, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="memory is a tuple; a Memory or None was expected"):
        lm(tokens, lm(tokens).memory.mem)
    with pytest.raises(ValueError, match="tokens are on meta, but the model is on cpu; move them"):
        lm(tokens.to("meta"))


def test_logits_that_are_nan_draw_no_token():
    lm = small_lm("transformer-xl")
    torch.nn.init.constant_(lm.head.bias, float("nan"))
    with pytest.raises(ValueError, match="the model's logits are NaN, so nothing can be drawn"):
        next(lm.generate(torch.zeros(3, 1, dtype=torch.long), 5, temperature=0.0))
