"""Any small config trains, stops and continues with the same bits, or is refused before the first step."""

import random
from dataclasses import fields, is_dataclass
from typing import Literal, get_args, get_origin

import pytest

from memformers.common.errors import UserError
from memformers.common.fields import annotations_of, replace_nested
from memformers.training.state import NotFiniteError
from tests.builders import small_training
from tests.training.faults import outcome
from tests.training.runs import stop, train_run

BASE = small_training(device="cpu", log_every=1, final_tokens=500)
NUMBERS = {
    "mem_len": (0, 3, 16), "c_mem_len": (0, 4), "compression_rate": (1, 2, 8), "segment_len": (1, 8, 16),
    "n_layers": (1, 3), "dropout": (0.0, 0.5), "bptt": (0, 2), "clamp_len": (None, 4),
    "warmup_fraction": (0.0, 0.9), "memory_warmup": (0, 1.0), "chunk_len": (0, 16, 100),
    "gradient_accumulation_steps": (1, 2, 4), "evaluations": (1, 3),
    "weight_decay": (0.0, 0.5), "checkpoint_every": (0, 64), "keep_checkpoints": (1, 2),
}  # fmt: skip


def choices(config):
    """The values of each setting that is a choice, or on or off."""
    for field in fields(config):
        kind = annotations_of(type(config))[field.name]
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from choices(value) if value is not BASE.model.adaptive else ()
        # Not compile, which takes minutes.
        elif get_origin(kind) is Literal or (kind is bool and field.name != "compile"):
            yield field.name, get_args(kind) or (False, True)


CHOICES = dict(choices(BASE)) | NUMBERS


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 60))]
)
@pytest.mark.filterwarnings("ignore")
def test_any_config_resumes_bit_for_bit_or_is_refused(seed, tmp_path):
    draws = random.Random(seed)
    while True:
        try:
            names = draws.sample([*CHOICES], 6)
            config = replace_nested(BASE, **{name: draws.choice(CHOICES[name]) for name in names})
            config = replace_nested(config, max_tokens=3 * config.tokens_per_step)
            break
        except UserError:
            pass
    try:
        whole = train_run(config, tmp_path / "whole", "off")
    except NotFiniteError:
        return
    except UserError:
        assert not list(tmp_path.glob("whole/*"))
        return
    stop(config, tmp_path / "run", draws.randint(1, 3))
    train_run(config, tmp_path / "run", "off", resume=True)
    assert outcome(tmp_path / "run") == outcome(whole)
