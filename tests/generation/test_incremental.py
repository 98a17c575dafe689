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


def same_memory(got, wanted):
    same([x for x in kept(got) if len(x)], [x for x in kept(wanted) if len(x)])
    assert (got.n_valid is None) == (wanted.n_valid is None)
    assert got.n_valid is None or torch.equal(got.n_valid, wanted.n_valid)


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
    before = 2 * shape["segment_len"]
    *_, memory = read(lm, tokens(before, 3), documents(before, 3))
    memory = replace(memory, n_valid=None).reset(torch.tensor(done)) if any(done) else memory
    T = sum(portions)
    text, doc_starts = tokens(T, 3), documents(T, 3, *(pair for pair in begins if pair[0] < T))
    wanted, *_ = read(lm, text, doc_starts, memory)
    whole = T // lm.config.segment_len * lm.config.segment_len
    after = read(lm, text[:whole], doc_starts, memory)[2] if whole else memory
    decoder, end = Stepper(lm, 3, memory), 0
    for portion in portions:
        part = slice(end, end + portion)
        starts = doc_starts[part] if doc_starts[part].any() else None
        logits, end = decoder.read(text[part], starts)[-1], end + portion
        torch.testing.assert_close(logits, wanted[end - 1], **EXACT)
    if after.n_valid is not None and decoder.memory().n_valid is None:  # nothing began, nothing was reset
        after = replace(after, n_valid=None)
    same_memory(decoder.memory(), after)
    assert torch.equal(decoder.running, text[whole:])


@exact
def test_a_model_without_memory_reads_its_newest_segment_again():
    lm, text = small_lm("transformer"), tokens(20)
    wanted = [lm(text[max(end - 7, 0) : end]).logits[-1] for end in range(1, 21)]
    same([*read_on(Stepper(lm, 2), text), Stepper(lm, 2).read(text)[-1]], [*wanted, wanted[-1]])


class HalfLayer(MemoryLayer):
    """A user's layer, whose feed-forward network reads half of its input."""

    def joined(self, x, y, gate):
        return super().joined(x / 2, y, gate)


@exact
def test_a_users_layer_and_feed_forward_network_decode_as_the_forward_pass():
    lm, text = small_lm("transformer-xl"), tokens(40)
    network = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 12))
    layer = HalfLayer(**layer_parts(positions="sinusoidal") | {"feed_forward": network})
    lm.transformer = fill_zeros(TransformerXL(layer, 2, mem_len=5)).eval()
    torch.testing.assert_close(read_on(Stepper(lm, 2), text), read(lm, text)[0], **EXACT)


@torch.no_grad()
def test_few_rows_of_a_large_weight_and_a_hooked_head_are_as_in_the_forward_pass(monkeypatch):
    monkeypatch.setattr("memformers.models.fast_linear.MIN_SLICED_WEIGHT", 1)
    lm, text = small_lm("compressive").eval(), tokens(60, 1)
    lm.head.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    torch.testing.assert_close(read_on(Stepper(lm, 1), text), read(lm, text)[0])


@exact
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("change", ["an optimizer", "a loaded state", "other tensors"])
def test_weights_that_change_between_two_steps_are_those_of_the_next_one(model, change):
    """The cache is computed again from the memory and the running segment."""
    lm, other, text = small_lm(model).eval(), small_lm(model), tokens(40)
    stepper = Stepper(lm, 2)
    stepper.read(text[:17])
    memory = stepper.memory()
    if change == "an optimizer":
        lm(text).logits.square().sum().backward()
        torch.optim.SGD(lm.parameters(), 0.01).step()
    elif change == "a loaded state":
        lm.load_state_dict(other.state_dict())
    else:
        lm.load_state_dict({name: x.clone() for name, x in other.state_dict().items()}, assign=True)
    wanted = Stepper(lm, 2, memory)
    wanted.read(text[14:17] if model != "transformer" else text[:17])
    same(*(read_on(reader, text[17:], portion=3) for reader in (stepper, wanted)))


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("layer", [0, 1])
def test_ctrl_c_between_two_layers_leaves_no_half_of_a_step(model, layer):
    lm, text = small_lm(model).eval(), tokens(60, 1)
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


def test_a_stepper_reads_in_eval_mode_keeps_each_modules_mode_and_gives_copies():
    core = MemoryCore(CoreConfig(d_input=3, d_model=8, n_heads=2, dropout=0.5, segment_len=4, mem_len=4))
    attention, x = core.transformer.layers[0].eval().self_attn, torch.randn(8, 2, 3)
    attention.key = nn.Sequential(attention.key, nn.Dropout(0.5))
    modes, random = [module.training for module in core.modules()], torch.get_rng_state()
    stepper = Stepper(core, 2)
    first = stepper.read(x)
    assert [module.training for module in core.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not first.requires_grad
    memory = stepper.memory()
    stepper.memory().layers[0].mem.zero_()
    again = Stepper(core, 2)
    assert torch.equal(again.read(x), first)
    output = stepper.step(x[0])
    assert torch.equal(again.step(x[0]), output)
    torch.testing.assert_close(Stepper(core, 2, memory).step(x[0]), output)


def test_what_cannot_be_decoded_is_an_error():
    for batch in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"batch={batch}"):
            Stepper(small_lm("transformer"), batch)
    lm = small_lm("transformer-xl")
    texts = {"2 streams": tokens(3, 1), "vocab_size=11": torch.full((1, 2), 11), "at least one": tokens(0)}
    starts = torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 2)
    for text, message in (*((x, word) for word, x in texts.items()), *((x, "doc_starts") for x in starts)):
        arguments = (tokens(3), text) if message == "doc_starts" else (text,)
        with pytest.raises(ValueError, match=message):
            Stepper(lm, 2).read(*arguments)
    *_, memory = read(lm, tokens(14))
    *_, longer = read(small_lm("transformer-xl", mem_len=9), tokens(14))
    for model, batch, other in ((lm, 3, memory), (lm, 2, longer), (small_lm("transformer"), 2, memory)):
        with pytest.raises(ValueError, match="mem"):
            Stepper(model, batch, other)
    lm.transformer = TransformerXL(MemoryLayer(**layer_parts(max_positions=11)), 2, mem_len=5)
    with pytest.raises(ValueError, match=r"at most max_positions=11.* got 12 positions"):
        Stepper(lm, 2)
