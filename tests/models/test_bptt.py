"""Compressions that learn from the language model's loss, through slots that are made anew."""

import pytest
import torch
import torch.nn.functional as F

from memformers import CompressiveTransformer, Conv1dCompression
from memformers.models.memory import Memory, memory_tensors
from tests.builders import small_lm
from tests.texts import gradients, read, same, tokens

SIZES = {"segment_len": 6, "mem_len": 6, "c_mem_len": 8, "compression_rate": 3}
"""Each segment but the first becomes two slots."""
COMPRESSIONS = ["conv", "dilated"]


def lm_of(bptt=1, **changes):
    return small_lm("compressive", **(SIZES | {"bptt": bptt} | changes))


def segments(n):
    return list(tokens(n * 6).split(6))


def past_of(lm, texts, doc_starts=None):
    """The memory after ``texts``, as a training leaves it."""
    return read(lm, torch.cat(list(texts)), None if doc_starts is None else torch.cat(doc_starts))[2]


def kept_of(memory):
    """The most positions that a layer keeps beside its slots."""
    return max(map(len, memory.slot_inputs), default=0)


def of_compressions(lm):
    return [p for f_c in lm.transformer.compressions for p in f_c.parameters()]


def loss_of(lm, text, memory, targets, **given):
    return F.cross_entropy(lm(text, memory, **given).logits.flatten(0, 1), targets.flatten())


def gradient(loss, parameters):
    return gradients(list(parameters), loss)


def agree(found, wanted):
    assert any(x.any() for x in wanted)
    same(found, wanted)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("bptt", [1, 2, 4])
def test_the_gradient_of_a_compression_is_that_of_a_graph_built_by_hand(compression, bptt):
    """Of the slots of the newest ``bptt`` compressions; all others are as they were remembered."""
    lm, texts, targets = lm_of(bptt, compression=compression), segments(6), segments(1)[0]
    memory, kept = Memory(), [[], []]
    for text in texts[:-1]:
        past, (_, inputs) = memory, lm.transformer(lm.embed(text), memory, sizes=lm.config.memory_sizes)
        memory = lm(text, memory).memory
        if past.mem:  # six positions, all of which this segment has compressed
            for layer, old in enumerate(past.mem):
                kept[layer].append(old)
            assert all(map(torch.equal, memory.mem, inputs))
    c_mem = []
    for layer, f_c in enumerate(lm.transformer.compressions):
        slots = [f_c(old) for old in kept[layer]]
        assert torch.allclose(torch.cat(slots), memory.c_mem[layer], rtol=0, atol=1e-12)
        c_mem.append(torch.cat([x.detach() for x in slots[:-bptt]] + slots[-bptt:]))
    wanted = loss_of(lm, texts[-1], Memory(memory.mem, tuple(c_mem)), targets)
    found = loss_of(lm, texts[-1], memory, targets)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    everything = list(lm.parameters())
    agree(gradient(found, everything), gradient(wanted, everything))
    assert any(x.any() for x in gradient(found, of_compressions(lm)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_layer_makes_the_newest_of_its_own_slots_anew_where_lengths_differ(compression):
    """Of each layer's whole past, as far as it is compressed, the newest positions are kept, at most as many
    as it has slots for. The first layer compresses in segments in which the last one doesn't."""
    lengths = {"n_layers": 3, "mem_len": (2, 6, 8), "c_mem_len": (3, 0, 5), "compression_rate": (3, 2, 6)}
    lm, texts, targets = lm_of(2, compression=compression, **lengths), segments(7), segments(1)[0]
    memory, pasts, kept = Memory(), [[], [], []], []
    for text in texts[:-1]:
        for past, inputs in zip(
            pasts, lm.transformer(lm.embed(text), memory, sizes=lm.config.memory_sizes)[1], strict=True
        ):
            past.append(inputs)
        memory = lm(text, memory).memory
        kept.append([len(x) for x in memory.slot_inputs])
    assert kept == [[6, 0, 0], [9, 0, 6], *[[9, 0, 12]] * 4]
    c_mem = []
    for layer, f_c in enumerate(lm.transformer.compressions):
        past, c, n = torch.cat(pasts[layer]), (3, 2, 6)[layer], kept[-1][layer]
        ends = len(past) - len(memory.mem[layer])
        torch.testing.assert_close(memory.slot_inputs[layer], past[ends - n : ends])
        remembered, slot_inputs = memory.c_mem[layer], past[ends - n : ends]
        # As they were made, segment by segment: the first layer two slots at a time, the last one.
        new = [f_c(x) for x in slot_inputs.split([3, 6] if layer == 0 else [c] * (n // c))]
        c_mem.append(torch.cat([remembered[: len(remembered) - n // c], *new]))
        torch.testing.assert_close(c_mem[-1], remembered)
    found = loss_of(lm, texts[-1], memory, targets)
    wanted = loss_of(lm, texts[-1], Memory(memory.mem, tuple(c_mem)), targets)
    agree(gradient(found, list(lm.parameters())), gradient(wanted, list(lm.parameters())))
    reached = [any(g.any() for g in gradient(found, f_c.parameters())) for f_c in lm.transformer.compressions]
    assert reached == [True, False, True]
    full = Memory.empty(lm.config, 2)
    assert [len(x) for x in full.slot_inputs] == [9, 0, 12]


def test_without_it_nothing_is_kept_or_made_anew():
    lm = lm_of(0)
    memory = past_of(lm, segments(4))
    assert memory.slot_inputs == ()
    assert lm.transformer.recompute_slots(memory, lm.config.memory_sizes) is memory
    assert not any("slot_inputs" in name for name in memory_tensors(memory))
    assert Memory.empty(lm.config, 2).slot_inputs == ()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("lengths", [{"mem_len": 7}, {"mem_len": 10}, {"mem_len": 2, "c_mem_len": 3}])
def test_slots_are_made_anew_as_they_were_remembered(lengths, compression):
    """Also where the first compression is a smaller one, or the oldest is remembered in part."""
    lm, memory = lm_of(4, compression=compression, **lengths), Memory()
    for text in segments(6):
        memory = lm(text, memory).memory
        same(lm.transformer.recompute_slots(memory, lm.config.memory_sizes).c_mem, memory.c_mem)


@pytest.mark.parametrize("when", ["eval", "no_grad"])
def test_only_in_training_with_gradients_are_slots_made_anew(when):
    lm, texts = lm_of(2), segments(5)
    memory = past_of(lm, texts[:-1])
    with torch.no_grad():
        for p in of_compressions(lm):
            p += 1.0  # the slots that are remembered are of f_c as it was
    plain = lm_of(0)
    plain.load_state_dict(lm.state_dict())
    wanted = plain(texts[-1], Memory(memory.mem, memory.c_mem)).logits
    assert not torch.equal(lm(texts[-1], memory).logits, wanted)
    lm.train(when != "eval")
    with torch.set_grad_enabled(when != "no_grad"):
        assert torch.equal(lm(texts[-1], memory).logits, wanted)


def test_what_is_kept_is_bounded_and_carries_no_gradient():
    lm, memory = lm_of(3, c_mem_len=5), Memory()
    for text in segments(8):
        memory = lm(text, memory, through_memory=True).memory
        assert kept_of(memory) <= 3 * 5  # of 6 slots of 3 compressions, 5 are remembered
        assert not any(x.requires_grad for x in memory.slot_inputs + memory.c_mem)
    assert kept_of(memory) == 15
    lm = lm_of(1, segment_len=7, mem_len=5)  # compressions of 2 and 3 slots
    assert kept_of(past_of(lm, torch.randint(11, (10, 7, 2)))) == 3 * 3


def test_nothing_else_gets_another_gradient_and_both_losses_add_up():
    """Of a model whose f_c learns from its own loss too, where slots are as they are made anew."""
    with_it, without, texts = lm_of(1), lm_of(0), segments(4)
    without.load_state_dict(with_it.state_dict())
    memory = past_of(with_it, texts[:-1])
    plain = Memory(memory.mem, memory.c_mem)
    found, alone = with_it(texts[-1], memory, texts[-1]), without(texts[-1], plain, texts[-1])
    compressing = {id(p) for p in of_compressions(with_it)}
    both = gradient(found.scores.loss + found.auxiliary_loss, list(with_it.parameters()))
    language = gradient(with_it(texts[-1], memory, texts[-1]).scores.loss, list(with_it.parameters()))
    other = gradient(alone.scores.loss + alone.auxiliary_loss, list(without.parameters()))
    for p, a, b, c in zip(with_it.parameters(), both, language, other, strict=True):
        torch.testing.assert_close(a, b + c if id(p) in compressing else c)
        assert id(p) not in compressing or (b.any() and c.any())


def test_a_slot_of_another_document_is_hidden_and_gives_f_c_no_gradient():
    lm, texts = lm_of(2), segments(5)
    doc_starts = [torch.zeros(6, 2, dtype=torch.bool) for _ in texts]
    memory = past_of(lm, texts[:-1], doc_starts[:-1])
    doc_starts[-1][0] = True
    learning = of_compressions(lm)
    seen = loss_of(lm, texts[-1], memory, texts[0], doc_starts=torch.zeros_like(doc_starts[-1]))
    hidden = loss_of(lm, texts[-1], memory, texts[0], doc_starts=doc_starts[-1])
    after = loss_of(lm, texts[-1], memory.reset(torch.tensor([True, True])), texts[0])
    assert any(g.any() for g in gradient(seen, learning))
    assert not any(g.any() for g in gradient(hidden, learning))
    assert not any(g.any() for g in gradient(after, learning))
    torch.testing.assert_close(hidden, after)


@pytest.mark.parametrize(
    ("bptt", "change", "word"),
    [(0, lambda x: x, "at most 0"), (2, lambda x: x[:-1], "some of 6 slots"),
     (2, lambda x: torch.cat((x, x)), "some of 6 slots"), (2, lambda x: x[:, :1], "slot_inputs of layer 0")],
)  # fmt: skip
def test_a_memory_with_sources_is_refused_where_it_does_not_fit(bptt, change, word):
    memory = past_of(lm_of(2), segments(4))
    wrong = Memory(memory.mem, memory.c_mem, slot_inputs=tuple(map(change, memory.slot_inputs)))
    with pytest.raises(ValueError, match=word):
        lm_of(bptt)(segments(1)[0], wrong)
    with pytest.raises(ValueError, match="slot_inputs has 12 .* at most 6"):
        lm_of(1).check_memory(memory, 2)


def test_without_a_loss_of_its_own_a_compression_needs_it():
    lm = lm_of(1, compression_loss="none")
    memory = past_of(lm, segments(3))
    output = lm(segments(1)[0], memory)
    assert output.auxiliary_loss == 0
    assert any(g.any() for g in gradient(output.logits.square().sum(), of_compressions(lm)))
    layer = lm.transformer.layers[0]
    with pytest.raises(ValueError, match="bptt=1"):
        CompressiveTransformer(layer, 1, "none")
    assert isinstance(layer.compress, Conv1dCompression)
