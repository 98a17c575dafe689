"""Reading with kept keys against the forward pass, which reads every segment with its whole memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memformers import CoreConfig, MemoryCore, MemoryLayer, Stepper, TransformerXL
from tests.builders import MODELS, fill_zeros, layer_parts, small_lm
from tests.texts import EXACT, documents, kept, read, read_on, same, tokens

WITH_MEMORY = [model for model in MODELS if model != "transformer"]
exact = pytest.mark.usefixtures("float64")


def same_memory(memory, expected):
    same([x for x in kept(memory) if len(x)], [x for x in kept(expected) if len(x)])
    assert (memory.n_valid is None) == (expected.n_valid is None)
    if memory.n_valid is not None:
        assert torch.equal(memory.n_valid, expected.n_valid)


@exact
@settings(max_examples=40)
@given(
    model=st.sampled_from(WITH_MEMORY),
    positions=st.sampled_from(["learned", "sinusoidal"]),
    norm=st.sampled_from(["pre", "post"]),
    shape=st.fixed_dictionaries({
        "segment_len": st.integers(1, 9), "mem_len": st.integers(0, 12), "c_mem_len": st.integers(0, 5),
        "compression_rate": st.integers(1, 5),
    }),
    same_length=st.booleans(),
    portions=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    begins=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=5),
    done=st.lists(st.booleans(), min_size=3, max_size=3),
)  # fmt: skip
def test_any_documents_in_any_portions_after_any_memory(
    model, positions, norm, shape, same_length, portions, begins, done
):
    """Logits, the memory, its ``n_valid``, and the running segment."""
    same_length = same_length and model == "transformer-xl" and shape["mem_len"] > 0
    lm = small_lm(model, **shape, positions=positions, norm=norm, same_length=same_length, n_layers=1).eval()
    S = lm.config.segment_len

    # A memory of two segments, of which streams may have been reset.
    _, _, memory = read(lm, tokens(2 * S, 3), documents(2 * S, 3))
    if any(done):
        memory = replace(memory, n_valid=None).reset(torch.tensor(done))

    # What the forward pass computes; it updates the memory after each whole segment.
    T = sum(portions)
    text = tokens(T, 3)
    doc_starts = documents(T, 3, *((position, stream) for position, stream in begins if position < T))
    wanted, *_ = read(lm, text, doc_starts, memory)
    n_whole = T // S * S
    wanted_memory = memory
    if n_whole:
        _, _, wanted_memory = read(lm, text[:n_whole], doc_starts, memory)

    decoder = Stepper(lm, 3, memory)
    end = 0
    for portion in portions:
        begin = end
        end += portion
        starts = doc_starts[begin:end]
        logits = decoder.read(text[begin:end], starts if starts.any() else None)
        torch.testing.assert_close(logits[-1], wanted[end - 1], **EXACT)
    if decoder.memory().n_valid is None:  # nothing began, nothing was reset
        wanted_memory = replace(wanted_memory, n_valid=None)
    same_memory(decoder.memory(), wanted_memory)
    assert torch.equal(decoder.running, text[n_whole:])


@exact
def test_a_model_without_memory_reads_its_newest_segment_again():
    lm = small_lm("transformer")
    text = tokens(20)
    wanted = [lm(text[max(end - 7, 0) : end]).logits[-1] for end in range(1, 21)]
    same(read_on(Stepper(lm, 2), text), wanted)
    of_one_portion = Stepper(lm, 2).read(text)[-1]
    same([of_one_portion], wanted[-1:])


class HalfLayer(MemoryLayer):
    """A user's layer, whose feed-forward network reads half of its input."""

    def joined(self, x, y, gate):
        return super().joined(x / 2, y, gate)


@exact
def test_a_users_layer_and_network_decode_as_the_forward_pass():
    lm = small_lm("transformer-xl")
    text = tokens(40)
    network = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 12))
    layer = HalfLayer(**layer_parts(positions="sinusoidal") | {"feed_forward": network})
    lm.transformer = fill_zeros(TransformerXL(layer, 2, mem_len=5)).eval()
    wanted, *_ = read(lm, text)
    torch.testing.assert_close(read_on(Stepper(lm, 2), text), wanted, **EXACT)


@torch.no_grad()
def test_sliced_weights_and_hooked_heads_are_as_in_a_forward_pass(monkeypatch):
    """A few rows of a large weight are read in slices."""
    monkeypatch.setattr("memformers.models.fast_linear.MIN_SLICED_WEIGHT", 1)
    lm = small_lm("compressive").eval()
    text = tokens(60, 1)
    lm.head.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    wanted, *_ = read(lm, text)
    torch.testing.assert_close(read_on(Stepper(lm, 1), text), wanted)


@exact
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("change", ["an optimizer", "a loaded state", "other tensors"])
def test_weights_that_change_are_those_of_the_next_step(model, change):
    """The cache is computed again from the memory and the running segment."""
    lm = small_lm(model).eval()
    new_state = small_lm(model).state_dict()
    text = tokens(40)
    stepper = Stepper(lm, 2)
    stepper.read(text[:17])
    memory = stepper.memory()
    if change == "an optimizer":
        lm(text).logits.square().sum().backward()
        torch.optim.SGD(lm.parameters(), 0.01).step()
    elif change == "a loaded state":
        lm.load_state_dict(new_state)
    else:
        lm.load_state_dict({name: x.clone() for name, x in new_state.items()}, assign=True)
    fresh = Stepper(lm, 2, memory)
    fresh.read(text[14:17] if model != "transformer" else text[:17])
    same(read_on(stepper, text[17:], portion=3), read_on(fresh, text[17:], portion=3))


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("layer", [0, 1])
def test_ctrl_c_between_two_layers_leaves_no_half_of_a_step(model, layer):
    lm = small_lm(model).eval()
    text = tokens(60, 1)
    wanted = read_on(Stepper(lm, 1), text)

    def interrupt(*_):
        raise KeyboardInterrupt

    decoder = Stepper(lm, 1)
    for token, logits in zip(text, wanted, strict=True):
        handle = lm.transformer.layers[layer].feed_forward.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.read(token[None])
        handle.remove()
        assert torch.equal(decoder.step(token), logits)


def core_with_dropout():
    """A core in training mode, but for a part of it, whose keys have separate dropout."""
    core = MemoryCore(CoreConfig(d_input=3, d_model=8, n_heads=2, dropout=0.5, segment_len=4, mem_len=4))
    attention = core.transformer.layers[0].eval().self_attn
    attention.key = nn.Sequential(attention.key, nn.Dropout(0.5))
    return core


def test_a_stepper_reads_in_eval_mode_and_keeps_each_modules_mode():
    core = core_with_dropout()
    x = torch.randn(8, 2, 3)
    modes = [module.training for module in core.modules()]
    random_state = torch.get_rng_state()
    output = Stepper(core, 2).read(x)
    assert [module.training for module in core.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not output.requires_grad
    assert torch.equal(Stepper(core, 2).read(x), output)


def test_the_memory_of_a_stepper_is_a_copy():
    core = core_with_dropout()
    x = torch.randn(8, 2, 3)
    stepper = Stepper(core, 2)
    stepper.read(x)
    memory = stepper.memory()
    stepper.memory().layers[0].mem.zero_()
    untouched = Stepper(core, 2)
    untouched.read(x)
    output = stepper.step(x[0])
    assert torch.equal(untouched.step(x[0]), output)
    torch.testing.assert_close(Stepper(core, 2, memory).step(x[0]), output)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_a_stepper_has_a_number_of_streams(batch):
    with pytest.raises(ValueError, match=f"batch={batch}"):
        Stepper(small_lm("transformer"), batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((tokens(3, 1),), "2 streams"), ((torch.full((1, 2), 11),), "vocab_size=11"),
     ((tokens(0),), "at least one"),
     ((tokens(3), torch.zeros(3, 1, dtype=torch.bool)), "doc_starts"),
     ((tokens(3), torch.zeros(3, 2)), "doc_starts")],
)  # fmt: skip
def test_a_stepper_refuses_a_text_that_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stepper(small_lm("transformer-xl"), 2).read(*arguments)


@pytest.mark.parametrize(
    ("model", "batch", "mem_len"), [("transformer-xl", 3, 5), ("transformer-xl", 2, 9), ("transformer", 2, 5)]
)
def test_a_stepper_refuses_a_memory_that_does_not_fit(model, batch, mem_len):
    _, _, memory = read(small_lm("transformer-xl", mem_len=mem_len), tokens(14))
    with pytest.raises(ValueError, match="mem"):
        Stepper(small_lm(model), batch, memory)


def test_a_stepper_refuses_a_model_with_too_few_positions():
    lm = small_lm("transformer-xl")
    lm.transformer = TransformerXL(MemoryLayer(**layer_parts(max_positions=11)), 2, mem_len=5)
    with pytest.raises(ValueError, match=r"at most max_positions=11.* got 12 positions"):
        Stepper(lm, 2)
