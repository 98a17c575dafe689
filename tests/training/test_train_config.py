import json
from dataclasses import asdict

import pytest

from memformers.common.files import config_from_dict
from memformers.training.config import TrainConfig, saved_config
from tests.builders import small_training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "many"}, "parallel='many' is unknown"),
        ({"parallel": "fsdp", "compile": True}, "compile=True can't be used with parallel='fsdp'"),
        ({"accumulate": 0}, "accumulate=0 is too small"),
        ({"accumulate": 3}, "batch_size=.* streams can't be divided into accumulate=3 equal parts"),
        ({"tokens": 0}, "tokens=0 is too small"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"evaluation_share": 1.5}, "evaluation_share=1.5"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0 is too small"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 is negative; use 0 for none"),
        ({"skip_bad_steps": -1}, "skip_bad_steps=-1 is negative"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is negative"),
        ({"warmup": 1.0}, "warmup=1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"precision": "float16"}, "precision='float16' is unknown; use 'auto', 'float32' or 'bfloat16'"),
        ({"seed": 2**64}, "seed=18446744073709551616 is outside"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown; use 'muon' or 'adamw'"),
        (
            {"optimizer": "adamw", "muon_learning_rate": 0.02},
            "muon_learning_rate=0.02 was given to optimizer='adamw', .* leave it out, or use",
        ),
        ({"muon_learning_rate": 0.0}, "muon_learning_rate=0.0 must be above 0"),
        ({"beta2": 1.0}, r"beta2=1.0 is outside \[0, 1\)"),
        ({"chunk_len": 63}, "chunk_len=63 is shorter than a segment of 64; use at least 64, or 0 to read"),
        ({"chunk_len": -1}, "chunk_len=-1 is negative"),
    ],
)
def test_a_config_that_cannot_work_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_a_config_survives_json():
    config = small_training(model="compressive", learning_rate=1)
    assert config_from_dict(TrainConfig, json.loads(json.dumps(asdict(config))), "here") == config


def test_unknown_keys_are_errors_with_the_nearest_known_one():
    data = asdict(TrainConfig())
    with pytest.raises(ValueError, match="here: unknown key 'learning_rat'; did you mean 'learning_rate'"):
        config_from_dict(TrainConfig, data | {"learning_rat": 1.0}, "here")
    data["model"]["deep"] = 3
    with pytest.raises(ValueError, match="unknown key 'deep'"):
        config_from_dict(TrainConfig, data, "here")


def test_a_config_of_the_version_without_muon_is_read_as_what_it_did():
    saved = asdict(small_training())
    for name in ("optimizer", "muon_learning_rate", "beta2", "chunk_len"):
        del saved[name]
    config = saved_config(saved, "here")
    assert (config.optimizer, config.beta2, config.chunk_len) == ("adamw", 0.99, 0)
