import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from memformers.common.errors import UserError
from memformers.common.fields import changed
from memformers.comparison.arms import parse_arm, read_arms, settings_of
from memformers.comparison.text import TEXT, CompareConfig
from tests.builders import small_training

TRAIN = small_training(model="compressive")
SHARED = asdict(TRAIN)


def test_an_arm_is_a_name_and_the_settings_that_differ():
    arm = parse_arm("long: model=transformer-xl mem-len=320 model.d_ff=1e3 learning_rate=1", SHARED)
    assert arm.name == "long"
    assert arm.settings == {
        "model.model": "transformer-xl", "model.mem_len": 320, "model.d_ff": 1000,
        "optim.learning_rate": 1.0,
    }  # fmt: skip
    training = TEXT.parse(settings_of(arm, SHARED), arm.name)
    assert (training.model.mem_len, training.model.d_model) == (320, TRAIN.model.d_model)
    assert (training.optim.learning_rate, training.tokens) == (1.0, TRAIN.tokens)


def test_values_are_as_in_json_or_words_and_a_file_has_an_arm_a_line(tmp_path):
    path = tmp_path / "arms.txt"
    path.write_text(
        "# longer\na: compile=true clamp_len=9  # positions\n\nb: compile=False clamp_len=none\n"
        "c: clamp_len=null cutoffs=[5,9] compression=mean\n", encoding="utf-8"
    )  # fmt: skip
    assert {arm.name: arm.settings for arm in read_arms([str(path), "deep: n_layers=9"], SHARED)} == {
        "a": {"step.compile": True, "model.clamp_len": 9},
        "b": {"step.compile": False, "model.clamp_len": "none"},
        "c": {"model.clamp_len": None, "model.adaptive.cutoffs": [5, 9], "model.compression": "mean"},
        "deep": {"model.n_layers": 9},
    }


@pytest.mark.parametrize(
    ("arms", "message"),
    [(("long: mem_lem=320",), "arm 'long': there is no setting 'mem_lem'; did you mean 'mem_len'?"),
     (("long: mem_len=-1",), "got mem_len=-1"),
     (("long: mem_len=x",), "arm 'long': its settings: expected model.mem_len to be"),
     (("long: model=lstm",), "arm 'long': expected model to be one of"),
     (("long: heads=5",), "arm 'long': d_model=16 is not divisible by heads=5"),
     (("a: mem_len=7", "a: mem_len=8"), "models and arms must name each arm once; 'a' came twice."),
     (("Compressive: mem_len=7",), "must name each arm once; 'Compressive' came twice."),
     (("a: mem_len=7", "b: mem_len=7"), "arms 'a' and 'b' are the same; leave one of them out."),
     (("a: seed=7",), "arm 'a': seed is the same for all arms; set it with seed and seeds."),
     (("a: data=x",), "arm 'a': data is the same for all arms; set it with data."),
     (("a: mem_len",), "arm 'a': 'mem_len' is not setting=value; write an arm as NAME: setting=value"),
     (("a: mem_len='7",), "arm 'a': \"mem_len='7\" can't be read: No closing quotation"),
     (("long",), "arms: 'long' has no colon and is not a file; write an arm as NAME: setting=value"),
     (("../a: mem_len=7",), "arm '../a' can't have this name, since its folder has it too"),
     ((": mem_len=7",), "arm '' can't have this name"),
     (("figures: mem_len=7",), "arm 'figures' can't have this name"),
     (("a-seed1: mem_len=7",), "nor an ending such as '-seed1'")],
)  # fmt: skip
def test_an_arm_that_cannot_be_gets_one_line(arms, message):
    with pytest.raises(UserError) as raised:
        CompareConfig(train=TRAIN, arms=arms)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"models": ()}, "needs an arm"), ({"seeds": 0}, "seeds=0"), ({"scale": math.inf}, "scale=inf"),
     ({"train": changed(TRAIN, parallel="ddp")}, "parallel='ddp'"),
     ({"arms": ("a: model=transformer-xl bptt=1",)}, "arm 'a': bptt=1 is for model='compressive'")],
)  # fmt: skip
def test_a_comparison_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        CompareConfig(**{"train": TRAIN, **changes})


def test_arms_share_the_settings_that_their_models_use():
    """And the lengths, from which Transformer-XL's are computed."""
    own = replace(TRAIN.model, compression="mean", c_mem_len=9)
    experiment = CompareConfig(replace(TRAIN, model=own, tbptt=1, memory_warmup=None)).experiment()
    found = {}
    for arm in experiment.arms:
        run = TEXT.parse(settings_of(arm, experiment.shared), arm.name)
        found[arm.name] = (run.model.compression, run.model.c_mem_len, run.tbptt)
    assert found == {"transformer": ("conv", 9, 0), "transformer-xl": ("conv", 9, 1),
                     "compressive": ("mean", 9, 1)}  # fmt: skip


def test_a_memory_of_ones_own_is_found_by_its_place_and_has_its_own_settings():
    place = Path(__file__).parents[2] / "experiments" / "memories" / "averages.py"
    arm = parse_arm(f"mine: decay=1 model={place}:Averages", SHARED)
    assert arm.settings == {"model.own.decay": 1.0, "model.model": "averages.py:Averages"}
    run = TEXT.parse(settings_of(arm, SHARED), arm.name)
    assert (run.model.own.decay, run.model.d_model) == (1.0, TRAIN.model.d_model)
    with pytest.raises(UserError, match="decay"):
        parse_arm("mine: decay=1", SHARED)
