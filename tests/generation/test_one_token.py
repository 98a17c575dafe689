"""Single tokens take their own way through layers of the usual kind: beside the forward pass, in several
precisions, for one and several streams."""

import copy
from dataclasses import replace

import pytest
import torch

from memformers import CoreConfig, Memory, MemoryCore, MemoryLM, MemorySizes, Stepper
from memformers.generation.cache import KeyCache
from memformers.models.rules.no_memory import NoMemory
from tests.builders import SMALL, fill_zeros
from tests.texts import documents, read, read_on, tokens

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""The largest error of logits, which are in the order of 1."""


def usual_lm(model, dtype=torch.float32, **settings):
    lm = MemoryLM(replace(SMALL, model=model, **settings))
    return fill_zeros(lm).eval().to(dtype)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "transformer-xl", "positions": "learned"},
        {"model": "transformer-xl", "token_shift": True},
        {"model": "transformer-xl", "same_length": True},
        {"model": "compressive", "token_shift": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_single_tokens_equal_the_forward_pass(settings, dtype, streams):
    lm = usual_lm(dtype=dtype, **settings)
    text = tokens(45, streams)
    doc_starts = documents(45, streams, (0, 0), (17, 0), (23, streams - 1))
    for starts in (None, doc_starts):
        wanted, *_ = read(lm, text, starts)
        stepper = Stepper(lm, streams)
        logits = [stepper.step(x, None if starts is None else starts[i]) for i, x in enumerate(text)]
        torch.testing.assert_close(torch.stack(logits), wanted, rtol=0, atol=TOLERANCE[dtype])


@torch.no_grad()
def test_a_token_shift_begins_without_the_state_of_one_layer():
    """A layer that remembers no position may come without its newest input."""
    lm = usual_lm("transformer-xl", token_shift=True, mem_len=(0, 5))
    _, _, memory = read(lm, tokens(14))
    memory = Memory((replace(memory.layers[0], shift_state=None), memory.layers[1]))
    text = tokens(9)
    wanted, *_ = read(lm, text, None, memory)
    torch.testing.assert_close(read_on(Stepper(lm, 2, memory), text), wanted)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("part", ["shift", "rule"])
@torch.no_grad()
def test_one_of_two_layers_has_no_token_shift_or_no_memory(part, changed, streams):
    lm = usual_lm("transformer-xl", token_shift=True)
    if part == "shift":
        lm.transformer.layers[changed].shift = None
    else:
        lm.transformer.rules[changed] = NoMemory(MemorySizes(0))
    lm.transformer.sizes = lm.transformer._sizes_of_rules()
    text = tokens(30, streams)
    wanted, *_ = read(lm, text)
    torch.testing.assert_close(read_on(Stepper(lm, streams), text), wanted)


@torch.no_grad()
def test_large_weights_of_single_tokens_are_read_in_slices(monkeypatch):
    monkeypatch.setattr("memformers.models.fast_linear.MIN_SLICED_WEIGHT", 1)
    lm = usual_lm("compressive", token_shift=True)
    text = tokens(30, 2)
    wanted, *_ = read(lm, text)
    torch.testing.assert_close(read_on(Stepper(lm, 2), text), wanted)


def test_results_of_a_step_stay_as_they_are():
    """The next step writes to the same buffers."""
    stepper = Stepper(usual_lm("transformer-xl"), 1)
    logits = stepper.step(torch.tensor([3]))
    copied = logits.clone()
    stepper.step(torch.tensor([5]))
    assert torch.equal(logits, copied)


@pytest.mark.parametrize("streams", [1, 2])
@torch.no_grad()
def test_single_tokens_are_read_under_autocast(streams):
    lm = usual_lm("transformer-xl")
    text = tokens(30, streams)
    wanted, *_ = read(lm, text)
    with torch.autocast("cpu", torch.bfloat16):
        logits = read_on(Stepper(lm, streams), text)
    torch.testing.assert_close(logits.float(), wanted, rtol=0, atol=0.1)


@torch.no_grad()
def test_autocast_is_switched_on_and_off_within_a_segment():
    """Cached keys have its dtype."""
    lm = usual_lm("transformer-xl")
    text = tokens(30)
    wanted, *_ = read(lm, text)
    stepper = Stepper(lm, 2)
    for i, x in enumerate(text):
        is_on = i % 4 < 2
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            logits = stepper.step(x)
        within_first_segment = i < lm.config.segment_len
        tolerance = 1e-5 if within_first_segment and not is_on else 0.1
        torch.testing.assert_close(logits.float(), wanted[i], rtol=0, atol=tolerance)


def test_single_steps_have_shapes_on_the_meta_device():
    lm = usual_lm("transformer-xl").to("meta")
    assert Stepper(lm, 2).step(torch.zeros(2, dtype=torch.int64, device="meta")).shape == (2, 11)
    core = MemoryCore(CoreConfig(d_input=3, d_model=12, n_heads=3)).to("meta")
    assert Stepper(core, 2).step(torch.zeros(2, 3, device="meta")).shape == (2, 12)


@torch.no_grad()
def test_a_shallow_copy_of_a_stepper_reads_on_alone():
    """Both have the same cache, which holds tokens of one of them."""
    lm = usual_lm("transformer-xl")
    text = tokens(20)
    wanted, *_ = read(lm, text)
    stepper = Stepper(lm, 2)
    stepper.read(text[:9])
    copied = copy.copy(stepper)
    stepper.read(tokens(2))
    torch.testing.assert_close(read_on(copied, text[9:]), wanted[9:])


def is_taken(lm):
    """Whether single tokens take their own way."""
    cache = KeyCache.build(lm, Memory.empty(lm.config, 1), 1)
    return cache.token_path is not None


@pytest.mark.parametrize("model", ["transformer", "transformer-xl", "compressive", "selective"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_every_model_takes_the_way_of_single_tokens(model, token_shift):
    assert is_taken(usual_lm(model, token_shift=token_shift))


def test_a_hooked_map_is_called():
    lm = usual_lm("transformer-xl")
    lm.transformer.layers[1].feed_forward.layer2.register_forward_hook(lambda _, __, output: 2 * output)
    assert not is_taken(lm)


@pytest.mark.parametrize("settings", [{"norm": "post"}, {"gate": "gru"}], ids=str)
def test_other_layers_take_the_usual_way(settings):
    assert not is_taken(usual_lm("transformer-xl", **settings))
