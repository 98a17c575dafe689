import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.comparison.arms import parse_arm, read_arms, settings_of
from memformers.comparison.text import TEXT, CompareConfig
from tests.builders import small_training

TRAIN = small_training(model="compressive")
SHARED = asdict(TRAIN)


def test_arms_are_names_and_settings_that_differ_of_an_option_or_a_line_of_a_file(tmp_path):
    path = tmp_path / "arms.txt"
    path.write_text(
        "# longer\na: compile=true clamp_len=9  # positions\n\nb: compile=False clamp_len=none\n"
        "c: clamp_len=null cutoffs=[5,9] compression=mean\n", encoding="utf-8"
    )  # fmt: skip
    deep = "deep: model=transformer-xl mem-len=320 model.d_ff=1e3 learning_rate=1"
    arms = {arm.name: arm for arm in read_arms([str(path), deep], SHARED)}
    assert {name: arm.settings for name, arm in arms.items()} == {
        "a": {"step.compile": True, "model.clamp_len": 9},
        "b": {"step.compile": False, "model.clamp_len": "none"},
        "c": {"model.clamp_len": None, "model.adaptive.cutoffs": [5, 9], "model.compression": "mean"},
        "deep": {"model.model": "transformer-xl", "model.mem_len": 320, "model.d_ff": 1000,
                 "optim.learning_rate": 1.0},
    }  # fmt: skip
    training = TEXT.parse(settings_of(arms["deep"], SHARED), "deep")
    assert (training.model.mem_len, training.optim.learning_rate) == (320, 1.0)
    assert (training.model.d_model, training.max_tokens) == (TRAIN.model.d_model, TRAIN.max_tokens)


@pytest.mark.parametrize(
    ("arms", "word"),
    [(["long: mem_lem=320"], "'long'.*'mem_len'"), (["long: mem_len=-1"], "mem_len=-1"),
     (["long: mem_len=x"], "'long'.*model.mem_len"), (["long: model=lstm"], "'long'.*expected model"),
     (["long: n_heads=5"], "'long'.*n_heads=5"), (["a: mem_len=7", "a: mem_len=8"], "'a' is there twice"),
     (["a: mem_len=7", "b: mem_len=7"], "'a' and 'b' have the same settings"),
     (["a: seed=7"], "'a': seed is the same.*seeds"),
     (["a: mem_len"], "'a': 'mem_len' is not setting=value"), (["a: mem_len='7"], "closing quotation"),
     (["a: model=transformer-xl bptt=1"], "'a': bptt=1 needs model='compressive'"),
     (["long"], "'long' has no colon"), (["../a: mem_len=7"], "'../a' can't have this name"),
     (["figures: mem_len=7"], "'figures' can't have this name"), (["a-seed1: mem_len=7"], "'-seed1'"),
     ({"models": ()}, "needs an arm"),
     ({"scale": math.inf}, "scale=inf"),
     ({"train": replace_nested(TRAIN, parallel="ddp")}, "parallel='ddp'")],
)  # fmt: skip
def test_arms_and_comparisons_that_cannot_be_get_one_line(arms, word):
    changes = arms if isinstance(arms, dict) else {"arms": tuple(arms)}
    with pytest.raises(UserError, match=f"^[^\n]*{word}[^\n]*$"):
        CompareConfig(**{"train": TRAIN, **changes})


def test_arms_share_the_settings_that_their_models_use():
    """And the lengths, from which Transformer-XL's are computed."""
    model = replace(TRAIN.model, compression="mean", c_mem_len=9)
    experiment = CompareConfig(replace(TRAIN, model=model)).experiment()
    settings = {}
    for arm in experiment.arms:
        run = TEXT.parse(settings_of(arm, experiment.shared), arm.name)
        settings[arm.name] = (run.model.compression, run.model.c_mem_len)
    assert settings == {"transformer": ("conv", 9), "transformer-xl": ("conv", 9), "compressive": ("mean", 9)}


def test_a_memory_of_ones_own_is_found_by_its_place_and_has_its_own_settings():
    place = Path(__file__).parents[2] / "experiments" / "memories" / "averages.py"
    arm = parse_arm(f"mine: decay=1 model={place}:Averages", SHARED)
    assert arm.settings == {"model.memory_config.decay": 1.0, "model.model": "averages.py:Averages"}
    run = TEXT.parse(settings_of(arm, SHARED), arm.name)
    assert (run.model.memory_config.decay, run.model.d_model) == (1.0, TRAIN.model.d_model)
    with pytest.raises(UserError, match="decay"):
        parse_arm("mine: decay=1", SHARED)
