"""The gradient that reaches through memory into earlier segments, against one pass over the joined text."""

import pytest
import torch
import torch.nn.functional as F

from memformers.kernels import dispatch
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.memory import Memory
from tests.builders import small_lm
from tests.texts import gradients, kept, same, tokens

pytestmark = pytest.mark.usefixtures("float64")
LENGTHS = (5, 3, 7)
"""Of the segments."""
EVERYTHING = {"segment_len": sum(LENGTHS), "mem_len": sum(LENGTHS)}


def text(length=15):
    return tokens(length), tokens(length)


def loss_of_segments(lm, inputs, targets, lengths, doc_starts=None, through=True):
    """The mean over all positions, read segment by segment with a memory that keeps its gradient."""
    memory, losses = Memory(()), []
    begins = [None] * len(lengths) if doc_starts is None else doc_starts.split(lengths)
    for x, y, start in zip(inputs.split(lengths), targets.split(lengths), begins, strict=True):
        logits, memory, auxiliary_loss = lm(x, memory, doc_starts=start, through_memory=through)
        losses.append(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none"))
        assert auxiliary_loss == 0
    return torch.cat(losses).mean(), memory


def different(found, wanted):
    return any(not torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize(
    ("changes", "worth_blocking"),
    [({"positions": "sinusoidal"}, 1 << 18),
     ({"positions": "learned"}, 1 << 18),
     ({"positions": "sinusoidal"}, 1),
     ({"positions": "learned"}, 1),
     ({"norm": "post"}, 1 << 18)],
)  # fmt: skip
def test_segments_through_memory_have_the_gradient_of_one_pass_over_the_joined_text(
    model, changes, worth_blocking, monkeypatch
):
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", worth_blocking)
    lm, (inputs, targets) = small_lm(model, **EVERYTHING, **changes), text()
    joined, _ = loss_of_segments(lm, inputs, targets, [len(inputs)])
    parts, memory = loss_of_segments(lm, inputs, targets, list(LENGTHS))
    cut, _ = loss_of_segments(lm, inputs, targets, list(LENGTHS), through=False)
    same([parts, cut], [joined, joined])
    wanted = gradients(lm, joined)
    assert different(gradients(lm, cut), wanted)
    same(gradients(lm, parts), wanted)
    assert all(mem.requires_grad for mem in memory.mem)


def test_so_have_short_segments_that_project_queries_instead_of_memory(monkeypatch):
    lm, (inputs, targets) = small_lm("transformer-xl", **EVERYTHING, heads=1), text(14)
    absorbed = []
    plain = RelativeMultiHeadAttention._absorbed
    monkeypatch.setattr(
        RelativeMultiHeadAttention, "_absorbed", lambda *args: absorbed.append(1) or plain(*args)
    )
    parts, _ = loss_of_segments(lm, inputs, targets, [8, 2, 2, 2])
    assert absorbed
    joined, _ = loss_of_segments(lm, inputs, targets, [14])
    same(gradients(lm, parts), gradients(lm, joined))


@pytest.mark.parametrize(("bounded", "recompute"), [(True, False), (False, True)])
def test_so_have_segments_in_which_documents_begin_and_layers_that_are_computed_again(bounded, recompute):
    lm, (inputs, targets) = small_lm("transformer-xl", **EVERYTHING), text()
    doc_starts = torch.rand(len(inputs), 2) < 0.2
    doc_starts[6, 0] = True
    doc_starts = doc_starts if bounded else None
    joined, _ = loss_of_segments(lm, inputs, targets, [len(inputs)], doc_starts)
    lm.transformer.recompute = recompute
    parts, _ = loss_of_segments(lm, inputs, targets, list(LENGTHS), doc_starts)
    same(gradients(lm, parts), gradients(lm, joined))


def test_a_memory_that_is_too_short_has_the_gradient_that_finite_differences_find():
    """Where positions are forgotten and compressed between segments; of the language model's loss alone."""
    lm, (inputs, targets) = small_lm("compressive", segment_len=4, mem_len=5, c_mem_len=3), text(16)

    def loss():
        memory, total = Memory(()), 0.0
        for x, y in zip(inputs.split(4), targets.split(4), strict=True):
            output = lm(x, memory, y, through_memory=True)
            memory = output.memory
            slots = tuple(x.detach() for x in memory.c_mem) if frozen is None else frozen.pop(0)
            kept.append(slots)
            memory = Memory(memory.mem, slots)
            total = total + output.scores.loss
        return total

    kept, frozen = [], None
    parameters = [p for name, p in lm.named_parameters() if ".compress." not in name]
    directions = [torch.randn_like(p) for p in parameters]
    grads = torch.autograd.grad(loss(), parameters)
    slots, step, values = kept[:4], 1e-5, []  # slots carry no gradient, so here they stay as they were
    for sign in (1, -1):
        frozen = list(slots)
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += sign * step * d
            values.append(loss())
            for p, d in zip(parameters, directions, strict=True):
                p -= sign * step * d
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    assert slope.item() == pytest.approx((values[0] - values[1]).item() / (2 * step), rel=1e-6)


def test_slots_and_their_loss_carry_no_gradient_into_what_was_compressed():
    """The auxiliary loss reaches the compressions alone, as without a gradient through memory."""
    lm, memory = small_lm("compressive"), Memory(())
    for _ in range(3):
        output = lm(tokens(7), memory, through_memory=True)
        memory = output.memory
    assert all(mem.requires_grad for mem in memory.mem)
    assert not any(c_mem.requires_grad for c_mem in memory.c_mem)
    assert output.auxiliary_loss > 0
    for (name, _), grad in zip(lm.named_parameters(), gradients(lm, output.auxiliary_loss), strict=True):
        assert bool(grad.any()) == (".compress." in name), name


def test_a_detached_memory_is_the_same_without_gradient():
    lm = small_lm("compressive")
    doc_starts = torch.rand(7, 2) < 0.3
    memory = lm(tokens(7), doc_starts=doc_starts, through_memory=True).memory
    detached = memory.detach()
    assert not any(x.requires_grad for x in kept(detached))
    assert all(map(torch.equal, kept(detached), kept(memory)))
    assert torch.equal(detached.valid, memory.valid)
