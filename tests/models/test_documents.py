"""Streams in which documents begin: each document is read as if nothing had been before it."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers.models.memory import Memory
from tests.builders import MODELS, small_compressive, small_lm, small_xl
from tests.texts import EXACT, documents, gradients, read, same, tokens

pytestmark = pytest.mark.usefixtures("float64")

WAYS = list(product(("learned", "sinusoidal"), ("auto", "naive", "blocked")))
SHAPES = {
    "segment_len": st.integers(1, 6),
    "mem_len": st.integers(0, 7),
    "c_mem_len": st.integers(0, 3),
    "compression_rate": st.integers(1, 3),
}


def visible(memory, rate):
    """What each stream's queries can see of a memory: lists of tensors ``[·, D]``."""
    M, C, parts = memory.mem_len, memory.c_mem_len, []
    for b in range(memory.mem[0].shape[1]):
        valid = M + C * rate if memory.valid is None else int(memory.valid[b])
        slots = min(max((valid - M) // rate, 0), C)
        parts += [mem[M - min(valid, M) :, b] for mem in memory.mem]
        parts += [c_mem[C - slots :, b] for c_mem in memory.c_mem]
    return parts


@settings(max_examples=20)
@given(
    model=st.sampled_from(MODELS),
    way=st.sampled_from(WAYS),
    shape=st.fixed_dictionaries(SHAPES | {"compression": st.sampled_from(("conv", "most-used"))}),
    data=st.data(),
)
def test_a_document_is_read_as_in_a_fresh_stream(model, way, shape, data):
    """Outputs, both losses, every gradient, and what is remembered; with compression, from the edge of a slot
    on."""
    (positions, kernel), c = way, shape["compression_rate"]
    lm = small_lm(model, **shape, positions=positions, kernel=kernel, n_layers=1)
    begin = data.draw(st.integers(0, 9))
    begin = begin - begin % c if model == "compressive" else begin
    text, S = tokens(begin + 11, 1), shape["segment_len"]
    logits, losses, memory = read(lm, text, documents(len(text), 1, (begin, 0)))
    fresh, fresh_losses, fresh_memory = read(lm, text[begin:], begin=begin % S)

    same([logits[begin:]], [fresh])
    weight = torch.randn_like(fresh)
    same(*(gradients(lm, (found * weight).sum()) for found in (logits[begin:], fresh)))
    same(visible(memory, c), visible(fresh_memory, c))
    # In the segment of a start, some queries belong to another document; its slots train nothing.
    later = 0 if begin % S == 0 else 1
    later_losses = losses[begin // S + later :], fresh_losses[later:]
    same(*later_losses)
    assert not later or losses[begin // S] == 0
    if any(loss.requires_grad for loss in losses[begin // S + later :]):
        same(*(gradients(lm, torch.stack(found).sum()) for found in later_losses))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kernel", ["naive", "blocked", "auto"])
def test_documents_of_several_streams_are_read_as_each_alone(model, kernel):
    lm = small_lm(model, kernel=kernel, mem_len=6, segment_len=4)
    begins = [(0, 1), (3, 1), (6, 2), (12, 0), (18, 2), (21, 1), (21, 3)]
    text = tokens(30, 4)
    logits, _, _ = read(lm, text, documents(30, 4, *begins))
    for position, stream in begins:
        end = min([p for p, b in begins if b == stream and p > position], default=30)
        alone, _, _ = read(lm, text[position:end, stream, None], begin=position % 4)
        torch.testing.assert_close(logits[position:end, stream, None], alone, **EXACT)


@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("begin", [8, 9, 10])
def test_nothing_of_an_old_document_reaches_a_new_one(kernel, model, begin):
    """Nor where a slot straddles the start, as c = 3 divides only one of the three."""
    lm, text, doc_starts = small_lm(model, kernel=kernel), tokens(40, 2), documents(40, 2, (begin, 0))
    other = text.clone()
    other[:begin, 0] = (other[:begin, 0] + 1) % 11
    (logits, losses, memory), (others, other_losses, other_memory) = (
        read(lm, t, doc_starts) for t in (text, other)
    )
    assert not torch.equal(logits[:begin, 0], others[:begin, 0])
    assert torch.equal(logits[begin:], others[begin:])
    assert all(map(torch.equal, visible(memory, 3), visible(other_memory, 3)))
    # Stream 1 alone counts in the loss until slots of the new document are made.
    assert all(map(torch.equal, losses[begin // 7 :], other_losses[begin // 7 :]))


@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked"])
@pytest.mark.parametrize("compressive", [False, True])
def test_a_gradient_ends_at_the_start_of_a_document(kernel, compressive):
    stack = (small_compressive if compressive else small_xl)(positions="sinusoidal", kernel=kernel)
    x = torch.randn(5, 2, 12, requires_grad=True)
    past = [[torch.randn(n, 2, 12, requires_grad=True) for _ in range(2)] for n in (4, 3)[: 1 + compressive]]
    output, _ = stack(x, *past, doc_starts=documents(5, 2, (2, 0)), valid=torch.tensor([9, 5]))
    inputs = [x, *(tensor for tensors in past for tensor in tensors)]
    after = torch.autograd.grad(output[2:, 0].square().sum(), inputs, retain_graph=True)
    assert not after[0][:2, 0].any()
    assert after[0][2:, 0].all()
    assert not any(grad.any() for grad in after[1:])
    # Stream 1 sees its 4 positions of memory and no slot: of the newest one, only 1 position of 3 is its own.
    grads = torch.autograd.grad(output[:, 1].square().sum(), inputs)
    assert all(grad[:, 1].all() for grad in grads[:3])
    assert not any(grad.any() for grad in grads[3:])
    assert not any(grad[:, 0].any() for grad in grads)


@settings(max_examples=15)
@given(
    model=st.sampled_from(MODELS),
    way=st.sampled_from(WAYS),
    shape=st.fixed_dictionaries(SHAPES | {"compression_rate": st.integers(1, 4)}),
)
def test_a_model_reads_after_an_empty_memory_as_after_none(model, way, shape):
    """Also where c doesn't divide M."""
    (positions, kernel), c = way, shape["compression_rate"]
    lm = small_lm(model, **shape, positions=positions, kernel=kernel, n_layers=1)
    text, empty = tokens(17, 2), Memory.empty(lm.config, 2)
    results = []
    for memory in (empty, None):
        logits, losses, after = read(lm, text, memory=memory)
        loss = logits.square().sum() + torch.stack(losses).sum()
        results.append([logits, *losses, *gradients(lm, loss), *visible(after, c)])
    same(*results)


@pytest.mark.parametrize("kernel", ["naive", "blocked"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("S", [4, 7, 11])
def test_a_stream_that_is_reset_begins_a_document_with_its_next_token(kernel, model, S):
    """To the bit; also in the loss of slots that are all of that segment, as with S > M."""
    lm = small_lm(model, kernel=kernel, segment_len=S)
    *_, memory = read(lm, tokens(21, 3))
    text, done = tokens(3 * S, 3), torch.tensor([True, False, True])
    doc_starts = documents(3 * S, 3, (0, 0), (0, 2))
    logits, losses, after = read(lm, text, memory=memory.reset(done))
    started, started_losses, started_after = read(lm, text, doc_starts, memory)
    assert torch.equal(logits, started)
    assert losses == started_losses
    assert torch.equal(after.valid, started_after.valid)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked"])
def test_where_no_document_begins_nothing_changes(model, kernel):
    lm, text = small_lm(model, kernel=kernel), tokens(28, 2)
    results = []
    for doc_starts in (None, documents(28, 2)):
        logits, losses, memory = read(lm, text, doc_starts)
        loss = logits.square().sum() + torch.stack(losses).sum()
        results.append([logits, *losses, *gradients(lm, loss), *memory.mem, *memory.c_mem])
        assert (memory.valid is None) == (doc_starts is None)
    same(*results)
    everything = 5 if model == "transformer-xl" else 0 if model == "transformer" else 3 * 4 + memory.mem_len
    assert memory.valid.tolist() == [everything] * 2


def test_the_reconstruction_loss_is_the_mean_over_the_streams_that_have_slots_of_their_document():
    lm = small_lm("compressive", mem_len=6, segment_len=6, n_layers=1)
    *_, memory = read(lm, tokens(24, 5))
    text = tokens(6, 5)
    doc_starts = documents(6, 5, (0, 1), (4, 2))
    valid = torch.tensor([99, 99, 99, 4, 3])

    def loss(stream, valid):
        parts = [tuple(t[:, stream, None] for t in tensors) for tensors in (memory.mem, memory.c_mem)]
        return lm(text[:, stream, None], Memory(*parts, valid)).auxiliary_loss

    together = lm(text, Memory(memory.mem, memory.c_mem, valid), doc_starts=doc_starts).auxiliary_loss
    # Stream 1 has just begun and stream 2 does within; of the 6 positions of memory that become two slots,
    # streams 3 and 4 have 4 and 3, and so one whole slot each.
    alone = [loss(0, None), loss(3, torch.tensor([4])), loss(4, torch.tensor([3]))]
    torch.testing.assert_close(together, torch.stack(alone).mean(), **EXACT)
    torch.testing.assert_close(alone[1], loss(3, torch.tensor([3])), **EXACT)
    assert loss(3, torch.tensor([4])) != loss(3, None)
    assert loss(3, torch.tensor([2])) == 0
    all_start = documents(6, 5, *((3, b) for b in range(5)))
    assert lm(text, memory, doc_starts=all_start).auxiliary_loss == 0


@pytest.mark.parametrize("kernel", ["auto", "blocked"])
def test_every_kernel_gives_each_query_the_same_length(kernel):
    text, results = tokens(30, 2), []
    for name in ("naive", kernel):
        torch.manual_seed(1)
        lm = small_lm("transformer-xl", kernel=name, same_length=True)
        logits, _, _ = read(lm, text, documents(30, 2, (9, 1), (11, 1)))
        results.append([logits, *gradients(lm, logits.square().sum())])
    same(*results)


@pytest.mark.parametrize(("window", "masked"), [(3, False), (None, True), (3, True)])
def test_a_window_and_a_mask_hide_beside_what_a_document_does(window, masked):
    stack, x, past = small_xl(), torch.randn(4, 2, 12), [torch.randn(3, 2, 12)] * 2
    documents_of_both = {"doc_starts": documents(4, 2, (2, 0)), "valid": torch.tensor([3, 1])}
    mask = torch.ones(4, 7, dtype=torch.bool).tril(3)[..., None].repeat(1, 1, 2)
    mask[3, 5] = not masked
    wanted = mask.clone()
    wanted[2:, :5, 0] = False
    wanted[:, :2, 1] = False
    if window is not None:  # 3 keys each
        wanted &= torch.ones(4, 7, dtype=torch.bool).triu(1)[..., None]
    output, _ = stack(x, past, mask if masked else None, window=window, **documents_of_both)
    torch.testing.assert_close(output, stack(x, past, wanted)[0], **EXACT)
    mask[3] = False
    mask[3, 0] = True
    with pytest.raises(ValueError, match="the mask hides every key from query 3 of stream 0; show it one"):
        stack(x, past, mask, **documents_of_both)
