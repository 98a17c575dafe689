import pytest

from memformers.common.fields import replace_nested
from memformers.training.config import TrainConfig

OUT_OF_RANGE = {
    "parallel": ("many",), "precision": ("float16",), "optimizer": ("sgd",), "compile": (1,), "data": (3,),
    "accumulate": (0,), "tokens": (0, 1.5), "batch_size": (0,), "evaluations": (0,), "log_every": (0,),
    "evaluation_tokens": (-1,), "keep_checkpoints": (0,), "checkpoint_every": (-1,),
    "checkpoint_minutes": (-1.0,), "learning_rate": (0.0, float("nan")), "muon_learning_rate": (0.0,),
    "max_grad_norm": (-1.0,), "weight_decay": (-0.1,), "warmup": (1.0,), "memory_warmup": (1.5,),
    "seed": (-1, 2**64), "beta2": (1.0,), "chunk_len": (-1,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_a_setting_of_another_type_or_out_of_its_range_is_an_error(name, value):
    with pytest.raises(ValueError, match=f"got {name}={value!r}"):
        replace_nested(TrainConfig(), **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"accumulate": 3}, "batch_size=64 .* accumulate=3"),
     ({"optimizer": "adamw", "muon_learning_rate": 0.02}, "muon_learning_rate=0.02 .* optimizer='adamw'"),
     ({"chunk_len": 63}, "chunk_len=63 .* 64")],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        replace_nested(TrainConfig(), **changes)
