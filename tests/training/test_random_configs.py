"""Any small config trains, stops and continues with the same bits, or is refused before the first step."""

import os
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memformers.common.fields import Range, annotations_of
from memformers.common.files import numbered
from memformers.common.text import UserError
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training.loop import NotFiniteError
from tests.builders import small_training
from tests.training.runs import find_short_text, stop, train_run, without_times

EXAMPLES = max(int(os.environ.get("MEMFORMERS_FUZZ", "160")) // 40, 1)
BASE = small_training(device="cpu", log_every=1, final_tokens=500)
LEFT_OUT = {
    "compile",  # takes half a minute for each
    "device", "data", "document_separator", "tokens",  # decided by the test
}  # fmt: skip
OF = {int: [0, 1, 2, 3, 4, 6, 8, 16], float: [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0, 2.0], bool: [False, True],
      str: ["", "x"], NoneType: [None]}  # fmt: skip


def values(kind, default):
    """Small values of an annotation, and the ends of its range."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        ranges = [r for r in args if isinstance(r, Range)]
        ends = [args[0](r.most) for r in ranges if r.most in r and r.most < 2**64]
        inside = st.one_of(values(args[0], default), st.sampled_from([default, *ends]))
        return inside.filter(lambda value: value is None or all(value in r for r in ranges))
    if origin in (Union, UnionType):
        return st.one_of([values(each, default) for each in args])
    if origin is Literal:
        return st.sampled_from(args)
    if kind is Any:  # of a memory of one's own, of which there is none
        return st.just(default)
    if origin is tuple:
        return st.lists(values(args[0], 1), max_size=2).map(tuple)
    return altered(default) if is_dataclass(kind) else st.sampled_from(OF[kind])


@st.composite
def altered(draw, config):
    """``config`` with a few other fields; None for one that it refuses."""
    names = [each.name for each in fields(config) if each.name not in LEFT_OUT]
    kinds = annotations_of(type(config))
    chosen = draw(st.lists(st.sampled_from(names), max_size=5, unique=True))
    changes = {name: draw(values(kinds[name], getattr(config, name))) for name in chosen}
    # As many layers as are allowed would take minutes a step.
    refused = (changes.get(name, "") is None and is_dataclass(getattr(config, name)) for name in chosen)
    if any(refused) or changes.get("n_layers", 0) > 100:
        return None
    try:
        return replace(config, **changes)
    except UserError:
        return None


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain})
@pytest.mark.filterwarnings("ignore")
@given(config=altered(BASE).filter(bool), step=st.integers(1, 3))
def test_any_config_continues_with_the_same_bits_or_is_refused_before_the_first_step(
    config, step, tmp_path_factory
):
    config, folder = replace(config, tokens=3 * config.tokens_a_step), tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "find_text", find_short_text)
        try:
            whole = train_run(config, folder / "whole", "off")
        except NotFiniteError:
            return
        except UserError:
            assert not list(folder.glob("whole/*"))
            return
        stop(config, folder / "run", step)
        train_run(config, folder / "run", "off", resume=True)
    assert without_times(read_metrics(folder / "run")) == without_times(read_metrics(whole))
    newest = [numbered(run / "checkpoints")[0] for run in (whole, folder / "run")]
    for file in ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json"):
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes(), file
