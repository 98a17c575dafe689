import math
from dataclasses import replace
from pathlib import Path

import pytest

from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.comparison.arms import Arm, changed_settings, check_arms, parse_arm, read_arms, with_settings
from memformers.comparison.text import CompareConfig
from tests.builders import small_training

BASE = small_training(model="compressive")
AVERAGES = Path(__file__).parents[2] / "experiments" / "memories" / "averages.py"


def changed(text, base=BASE):
    return changed_settings(parse_arm(text, base).config, base)


def test_a_file_has_an_arm_in_each_line(tmp_path):
    path = tmp_path / "arms.txt"
    path.write_text("# longer\na: compile=true d_ff=9  # positions\n\nb: n_layers=3\n", encoding="utf-8")
    arms = {arm.name: arm.config for arm in read_arms([str(path), "c: mem_len=7"], BASE)}
    assert arms == {
        "a": replace_nested(BASE, compile=True, d_ff=9),
        "b": replace_nested(BASE, n_layers=3),
        "c": replace_nested(BASE, mem_len=7),
    }


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [("compile=true", "step.compile", True), ("mem-len=320", "model.mem_len", 320),
     ("model.d_ff=1e3", "model.d_ff", 1000), ("learning_rate=1", "optim.learning_rate", 1.0),
     ("c_mem_len=[0,7]", "model.c_mem_len", (0, 7)), ("c_mem_len=0,7", "model.c_mem_len", (0, 7)),
     ("compression=mean", "model.compression", "mean"),
     ("document_separator='a b'", "text.document_separator", "a b")],
)  # fmt: skip
def test_settings_are_those_of_the_command(setting, name, value):
    assert changed(f"arm: {setting}") == {name: value}


def test_null_takes_back_what_all_share():
    assert changed("arm: memory_warmup=null") == {"memory_warmup": None}


def test_another_model_keeps_only_settings_that_it_uses():
    base = replace(BASE, model=replace(BASE.model, compression="mean", c_mem_len=9))
    config = parse_arm("deep: model=transformer-xl mem_len=320", base).config
    assert changed_settings(config, base) == {
        "model.model": "transformer-xl", "model.mem_len": 320, "model.compression": "conv",
    }  # fmt: skip
    assert with_settings(config, model="compressive", compression="mean", mem_len=16) == base


def test_an_arm_without_a_model_may_have_a_usual_one():
    assert parse_arm("a: mem_len=7", BASE, model="transformer-xl").config.model.model == "transformer-xl"


@pytest.mark.parametrize("label", ["Mine", "Transformer-XL"])
def test_arms_have_different_labels(label):
    arms = [
        Arm("transformer-xl", with_settings(BASE, model="transformer-xl")),
        Arm("a", with_settings(BASE, mem_len=7), label),
        Arm("b", with_settings(BASE, mem_len=8), "Mine"),
    ]
    with pytest.raises(UserError, match=f"have the same label '{label}'"):
        check_arms(arms)


@pytest.mark.parametrize(
    ("arms", "words"),
    [(["long: mem_lem=320"], "'long'.*'mem_len'"), (["long: mem_len=-1"], "mem_len=-1"),
     (["long: mem_len=x"], "'long'.*--mem-len.*'x' is not a whole number"),
     (["long: model=lstm"], "'long'.*expected model"),
     (["long: positions=far"], "'long'.*'far'.*'sinusoidal'"),
     (["long: n_heads=5"], "'long'.*n_heads=5"), (["a: mem_len=7", "a: mem_len=8"], "'a' is there twice"),
     (["a: mem_len=7", "b: mem_len=7"], "'a' and 'b' have the same settings"),
     (["a: seed=7"], "'a': seed is the same.*seeds"),
     (["a: mem_len"], "'a': 'mem_len' is not setting=value"), (["a: mem_len='7"], "closing quotation"),
     (["a: model=transformer-xl bptt=1"], "'a': bptt=1 needs model='compressive'"),
     (["long"], "'long' has no colon"), (["../a: mem_len=7"], "'../a' can't have this name"),
     (["figures: mem_len=7"], "'figures' can't have this name"), (["a-seed1: mem_len=7"], "'-seed1'"),
     ({"models": ()}, "needs an arm"),
     ({"scale": math.inf}, "scale=inf"),
     ({"train": replace_nested(BASE, parallel="ddp")}, "parallel='ddp'")],
)  # fmt: skip
def test_arms_that_cannot_be_trained_get_one_line(arms, words):
    changes = arms if isinstance(arms, dict) else {"arms": tuple(arms)}
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        CompareConfig(**{"train": BASE, **changes}).experiment()


def test_arms_share_the_settings_that_their_models_use():
    """And the lengths, from which Transformer-XL's are computed."""
    model = replace(BASE.model, compression="mean", c_mem_len=9)
    settings = {}
    for arm in CompareConfig(replace(BASE, model=model)).experiment().arms:
        settings[arm.name] = (arm.config.model.compression, arm.config.model.c_mem_len)
    assert settings == {"transformer": ("conv", 9), "transformer-xl": ("conv", 9), "compressive": ("mean", 9)}


def test_a_custom_memory_is_found_by_its_path():
    config = parse_arm(f"mine: decay=1 model={AVERAGES}:Averages", BASE).config
    assert config.model.model == "averages.py:Averages"
    assert config.model.memory_config.decay == 1.0
    assert config.model.d_model == BASE.model.d_model
    assert with_settings(BASE, model=f"{AVERAGES}:Averages", decay=1.0) == config


def test_settings_of_a_memory_need_that_memory():
    with pytest.raises(UserError, match="decay"):
        parse_arm("mine: decay=1", BASE)
