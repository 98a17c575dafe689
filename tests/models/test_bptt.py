"""Compressions that learn from the language model's loss, through slots that are made anew."""

import pytest
import torch
import torch.nn.functional as F

from memformers import Memory
from tests.builders import small_lm
from tests.texts import gradients, memory_of, read, same, tokens

# Each segment but the first becomes two slots.
SIZES = {"segment_len": 6, "mem_len": 6, "c_mem_len": 8, "compression_rate": 3}
COMPRESSIONS = ["conv", "dilated"]


def lm_of(bptt=1, **changes):
    return small_lm("compressive", **(SIZES | {"bptt": bptt} | changes))


def mem_of(memory):
    return [layer.mem for layer in memory.layers]


def slots_of(memory):
    return [layer.slots for layer in memory.layers]


def segments(n):
    return list(tokens(n * 6).split(6))


def compression_weights(lm):
    weights = []
    for f_c in lm.transformer.compressions:
        weights += f_c.parameters()
    return weights


def loss_of(lm, text, memory, targets):
    return F.cross_entropy(lm(text, memory).logits.flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("bptt", [1, 2, 4])
def test_a_compressions_gradient_is_that_of_a_graph_built_by_hand(compression, bptt):
    """Of the slots of the newest ``bptt`` compressions; all others are as they were remembered."""
    lm = lm_of(bptt, compression=compression)
    *past_texts, text = segments(6)
    [targets] = segments(1)

    # What each segment has compressed, by layer: the six positions of the memory before it.
    compressed = [[], []]
    memory = Memory()
    for past_text in past_texts:
        past = memory
        memory = lm(past_text, memory).memory
        for layer, layer_past in enumerate(past.layers):
            compressed[layer].append(layer_past.mem)

    # The same slots, of which only the newest have a gradient.
    c_mem = []
    for layer, f_c in enumerate(lm.transformer.compressions):
        slots = [f_c(mem) for mem in compressed[layer]]
        assert torch.allclose(torch.cat(slots), memory.layers[layer].slots, rtol=0, atol=1e-12)
        constant = [x.detach() for x in slots[:-bptt]]
        c_mem.append(torch.cat(constant + slots[-bptt:]))
    wanted = loss_of(lm, text, memory_of(mem_of(memory), c_mem), targets)
    loss = loss_of(lm, text, memory, targets)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)
    same(gradients(lm, loss), gradients(lm, wanted))
    assert any(grad.any() for grad in gradients(compression_weights(lm), loss))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("lengths", [{"mem_len": 7}, {"mem_len": 10}, {"mem_len": 2, "c_mem_len": 3}])
def test_slots_are_made_anew_as_they_were_remembered(lengths, compression):
    """Also where the first compression is a smaller one, or the oldest is remembered in part."""
    lm = lm_of(4, compression=compression, **lengths)
    memory = Memory()
    for text in segments(6):
        memory = lm(text, memory).memory
        for rule, layer in zip(lm.transformer.rules, memory.layers, strict=True):
            same([rule.recall(layer).slots], [layer.slots])


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_only_in_training_with_gradients_are_slots_made_anew(mode):
    lm = lm_of(2)
    *past_texts, text = segments(5)
    _, _, memory = read(lm, torch.cat(past_texts))
    with torch.no_grad():
        for weight in compression_weights(lm):
            weight.mul_(-3.0)  # the slots that are remembered are of f_c as it was
    plain = lm_of(0)
    plain.load_state_dict(lm.state_dict())
    wanted = plain(text, memory_of(mem_of(memory), slots_of(memory))).logits
    assert not torch.allclose(lm(text, memory).logits, wanted, rtol=0, atol=1e-4)
    lm.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        torch.testing.assert_close(lm(text, memory).logits, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("bptt", "change", "word"),
    [(0, lambda x: x, "at most 0"), (2, lambda x: x[:-1], "some of 6 slots"),
     (2, lambda x: torch.cat((x, x)), "at most 12"), (2, lambda x: x[:, :1], "bptt_inputs of layer 0")],
)  # fmt: skip
def test_a_memory_with_sources_is_refused_where_it_does_not_fit(bptt, change, word):
    _, _, memory = read(lm_of(2), tokens(24))
    inputs = [change(layer.bptt_inputs) for layer in memory.layers]
    wrong = memory_of(mem_of(memory), slots_of(memory), bptt_inputs=inputs)
    with pytest.raises(ValueError, match=word):
        lm_of(bptt)(segments(1)[0], wrong)
    with pytest.raises(ValueError, match="at most 6"):
        lm_of(1)(segments(1)[0], memory)
