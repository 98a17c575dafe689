"""What a training step learns from: its segments, through memory, in parts, and on documents."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from memformers import AdaptiveConfig, MemoryLM
from memformers.common.fields import changed
from memformers.data.streams import IGNORED, Segment
from memformers.models.memory import Memory
from memformers.training import run as run_module
from memformers.training.distributed import Distributed
from memformers.training.optimizers import build_optimizers
from memformers.training.state import TrainingState
from memformers.training.train_step import UnrolledSegments, backward, clip
from tests.builders import small_lm, small_training
from tests.training.runs import DOCUMENTS, finding, poisoned, segments_of, train_here, train_run


def gradient_of(lm, parts, forward=None, **changes):
    """What a step's backward pass finds, and the gradient."""
    lm.zero_grad()
    config = small_training(batch_size=4, tbptt=len(parts) - 1, **changes)
    outcome = backward(forward or UnrolledSegments(lm), parts, Memory(()), config, Distributed())
    return outcome, [p.grad for p in lm.parameters()]


def check_same(found, wanted, atol):
    """Each gradient, except those of parameters that none reaches."""
    for a, b in zip(found, wanted, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def segment(length, streams=4):
    return Segment(torch.randint(11, (length, streams)), torch.randint(11, (length, streams)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer", "transformer-xl", "compressive"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_learns_from_the_mean_of_its_segments_in_any_number_of_parts(model, recompute):
    """Each prediction counts alike, in a segment that is shorter or has some without a target too."""
    lm, parts = small_lm(model, n_layers=1), [segment(n) for n in (7, 7, 7, 3)]
    parts[1].targets[2:5] = IGNORED
    memory, losses, auxiliary = Memory(()), [], 0.0
    for part in parts:
        logits, memory, auxiliary_loss = lm(part.inputs, memory, through_memory=True)
        auxiliary = auxiliary + auxiliary_loss
        losses.append(F.cross_entropy(logits[part.targets != IGNORED], part.targets[part.targets != IGNORED],
                                      reduction="sum"))  # fmt: skip
    predictions = sum(part.predictions for part in parts)
    wanted, auxiliary, learning = sum(losses) / predictions, auxiliary / 4, list(lm.parameters())
    grads = torch.autograd.grad(wanted + auxiliary, learning, allow_unused=True)
    lm.transformer.recompute = recompute
    for accumulate in (1, 2):
        outcome, found = gradient_of(lm, parts, accumulate=accumulate)
        assert outcome.loss.item() == pytest.approx(wanted.item(), abs=1e-12)
        assert outcome.auxiliary_loss.item() == pytest.approx(auxiliary.item(), abs=1e-12)
        assert outcome.correct > 0
        check_same(found, grads, 1e-10)
        assert not any(x.requires_grad for x in outcome.memory.mem + outcome.memory.c_mem)
        check_same(outcome.memory.mem + outcome.memory.c_mem, memory.mem + memory.c_mem, 1e-12)


@pytest.mark.usefixtures("float64")
def test_the_gradient_reaches_into_a_steps_earlier_segments_and_no_other():
    """A gradient of the first segment's words that the second doesn't have comes from the second's loss."""
    lm = small_lm("transformer-xl", n_layers=1)
    first, second = segment(7), segment(7)
    first.inputs.fill_(3)
    second.inputs.clamp_(min=4)
    first.targets.fill_(IGNORED)

    def reached():
        return bool(lm.embed.weight.grad[3].any())

    gradient_of(lm, [first, second])
    assert reached()
    past = lm(first.inputs).memory
    lm.zero_grad()
    backward(UnrolledSegments(lm), [second], past, small_training(), Distributed())
    assert not reached()
    gradient_of(lm, [first, replace(second, starts_over=True)])
    assert not reached()


def test_a_training_reads_several_segments_a_step_over_as_many_tokens():
    """TEXT has seven segments of 16 an epoch and one of 13: a step also goes on into the next epoch."""
    lm = small_lm("transformer-xl", segment_len=16, mem_len=16)
    config, seen = small_training(tokens=4 * 125 * 2, log_every=1, tbptt=2), []
    lm.register_forward_pre_hook(
        lambda _, args, named: seen.append((len(args[0]), args[1].mem_len, named["through_memory"])),
        with_kwargs=True,
    )
    state = TrainingState(build_optimizers(lm, config))
    train_here(lm, config, state=state)
    lengths, memories, through = zip(*seen, strict=True)
    assert lengths == ((*[16] * 7, 13) * 3)[: len(seen)]
    assert memories == ((0, *[16] * 7) * 3)[: len(seen)]  # none at the beginning of an epoch
    assert through == (True, True, False) * state.step
    assert (state.step, state.tokens) == (6, 4 * (2 * 125 + 32))
    assert (state.epoch, state.position) == (2, 32)
    assert config.tokens_a_step == 3 * 16 * 4


def skipped_at(calls, documents, **changes):
    """The segments of a training in which these forward passes give no numbers, what is remembered before
    each step, and what is remembered after the last."""
    lm = poisoned(small_lm("transformer-xl", segment_len=16, mem_len=16), "head", calls)
    config, before = small_training(skip_bad_steps=len(calls), **changes), []
    state = TrainingState(build_optimizers(lm, config))
    steps = -(-config.tokens // config.tokens_a_step)
    segments = list(itertools.islice(segments_of(config, documents=documents), steps * (config.tbptt + 1)))
    with pytest.warns(RuntimeWarning, match="the step is skipped"):
        train_here(lm, config, iter(segments), state=state,
                   maybe_checkpoint=lambda state: before.append(state.memory))  # fmt: skip
    return segments, before, state.memory


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_after_a_skipped_step_nothing_of_an_epoch_that_has_ended_is_remembered(documents):
    """With three segments a step, the third step has the end of an epoch in it."""
    segments, before, after = skipped_at({3, 7}, documents, tokens=3 * 3 * 64 - 12, tbptt=2)
    assert [segment.starts_over for segment in segments] == [True] + [False] * 7 + [True]
    assert all(one is other for one, other in zip(before[2].mem, before[1].mem, strict=True))
    if documents:
        begun = torch.cat([segment.doc_starts for segment in segments[3:6]]).any(0)
        assert (before[2].valid[begun] == 0).all()
    assert after.mem == ()


def test_after_a_skipped_step_a_new_document_does_not_see_the_one_before_it():
    """The third step is skipped, in which documents begin in some streams; their memory is hidden then."""
    segments, before, after = skipped_at({2}, DOCUMENTS, tokens=64 * 3)
    begun = segments[2].doc_starts.any(0)
    assert begun.any()
    assert not begun.all()
    assert (after.valid[begun] == 0).all()
    assert torch.equal(after.valid[~begun], before[2].valid[~begun])
    assert all(one is other for one, other in zip(after.mem, before[2].mem, strict=True))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_compiled_step_has_the_same_gradient(model):
    torch.compiler.reset()
    lm, parts = small_lm(model, n_layers=1), [segment(7) for _ in range(3)]
    compiled = torch.compile(lm, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    outcome, wanted = gradient_of(lm, parts)
    again, found = gradient_of(lm, parts, UnrolledSegments(compiled))
    assert again.loss.item() == pytest.approx(outcome.loss.item(), abs=1e-12)
    check_same(found, wanted, 1e-10)


@pytest.mark.usefixtures("float64")
def test_a_step_on_documents_learns_from_each_of_them_alone():
    """In an epoch's first segment, where what a document has left behind is in the segment itself."""
    config = small_training(batch_size=2, model="transformer-xl")
    lm = small_lm("transformer-xl", segment_len=64, mem_len=16)
    config = replace(config, model=lm.config)
    segment = next(segments_of(config, documents=DOCUMENTS))
    assert segment.doc_starts[1:].any()
    outcome = backward(UnrolledSegments(lm), [segment], Memory(()), config, Distributed())
    losses = []
    for b in range(2):
        firsts = [*segment.doc_starts[:, b].nonzero()[:, 0].tolist(), 64]
        for first, end in itertools.pairwise(firsts):
            inputs, targets = (x[first:end, b : b + 1] for x in (segment.inputs, segment.targets))
            losses.append(lm(inputs, None, targets).scores.losses[targets != IGNORED])
    assert outcome.loss.item() == pytest.approx(torch.cat(losses).mean().item(), abs=1e-10)
    ends = torch.cat([segment.doc_starts[1:], segment.doc_starts[:0]]).sum()
    assert segment.predictions == 128 - ends - (segment.targets[-1] == IGNORED).sum()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("embedding", ["plain", "adaptive"])
def test_each_prediction_counts_alike_whatever_part_of_a_step_it_is_in(embedding):
    """Also where a part has none: then its mean is not a number, and it adds nothing."""
    changes = {"embedding": "adaptive", "adaptive": AdaptiveConfig((2, 5), 2)} if embedding != "plain" else {}
    lm = small_lm("transformer-xl", **changes)
    inputs, targets = torch.randint(0, 11, (2, 5, 4))
    targets[1:, 0] = targets[:, 1] = targets[2, 3] = IGNORED
    whole = Segment(inputs, targets, doc_starts=torch.rand(5, 4) < 0.3)
    found = []
    for accumulate in (1, 2, 4):
        found.append(gradient_of(lm, [whole], accumulate=accumulate))
    (one, expected), *others = found
    assert one.loss > 0
    for several, grads in others:
        assert several.loss.item() == pytest.approx(one.loss.item(), abs=1e-12)
        assert several.correct == one.correct
        assert torch.equal(several.memory.valid, one.memory.valid)
        check_same(grads, expected, 1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["attention", "auto-encoding"])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("c_mem_len", [4, (0, 4)])
def test_each_stream_counts_alike_in_the_reconstruction_loss_whatever_part_of_a_step_it_is_in(
    loss, segments, c_mem_len
):
    """Of the first part of two all count, and of the second one; of the last of four, none. In the segment
    after it, others do, and the third is the first of an epoch, which is long enough to compress."""
    lm = small_lm("compressive", mem_len=6, segment_len=6, compression_loss=loss, c_mem_len=c_mem_len)
    *_, memory = [lm(torch.randint(0, 11, (6, 4))).memory for _ in range(2)]
    memory = replace(memory, valid=torch.tensor([99, 3, 99, 99]))
    inputs, targets = torch.randint(0, 11, (2, 6, 4))
    doc_starts = torch.zeros(6, 4, dtype=torch.bool)
    doc_starts[5, 3] = True
    first = Segment(inputs, targets, doc_starts=doc_starts)
    parts = [first, Segment(targets, inputs, doc_starts=doc_starts.roll(1, dims=1)),
             replace(first.with_streams(lambda x: x.repeat(3, 1)), starts_over=True)]  # fmt: skip
    found = []
    for accumulate in (1, 2, 4):
        lm.zero_grad()
        config = changed(small_training(batch_size=4, accumulate=accumulate), model=lm.config)
        outcome = backward(UnrolledSegments(lm), parts[:segments], memory, config, Distributed())
        found.append((outcome.auxiliary_loss.item(), [p.grad for p in lm.parameters()]))
    (one, expected), *others = found
    assert one > 0
    for several, grads in others:
        assert several == pytest.approx(one, abs=1e-12)
        check_same(grads, expected, 1e-10)


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_compressions_learn_without_a_loss_of_their_own_and_records_say_how_much(documents):
    slots = {"bptt": 2, "compression_loss": "none", "compression_rate": 4, "c_mem_len": 8}
    lm = small_lm("compressive", segment_len=16, mem_len=16, **slots)
    learning = [p for f in lm.transformer.compressions for p in f.parameters()]
    before = [p.detach().clone() for p in learning]
    config = small_training(tokens=64 * 7, log_every=1)
    records = train_here(lm, config, segments_of(config, documents=documents))
    assert not any(map(torch.equal, learning, before))
    assert all(p.grad is not None and p.grad.any() for p in learning)
    assert not any("reconstruction_loss.train" in found for found in records)
    assert [("gradient_norm.compression" in found) for found in records[:3]] == [False, False, True]
    assert records[3]["gradient_norm.compression"] > 0
    language, compressing = clip(lm, 1e-6)  # what the last step had, shortened for each by itself
    assert min(language, compressing) > 1e-5
    assert torch.cat([p.grad.flatten() for p in learning]).norm() == pytest.approx(1e-6, rel=0.2)


def test_accuracy_is_that_of_tokens_that_are_predicted():
    config = small_training(tokens=64 * 7, log_every=7)
    lm = small_lm("transformer-xl", segment_len=16, mem_len=16)
    correct = []
    lm.register_forward_hook(lambda _, inputs, output: correct.append(int(output.scores.correct.sum())))
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 7))
    records = train_here(lm, config, iter(segments))
    predictions = sum(segment.predictions for segment in segments)
    assert predictions < 7 * 64
    assert records[-1]["accuracy.train"] == sum(correct) / predictions


@pytest.mark.parametrize("lengths", [(90, *[1] * 10), (1,) * 20])
def test_documents_in_which_nothing_can_be_predicted_are_an_error(lengths, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_text", finding("x" * sum(lengths), lengths))
    config = small_training(batch_size=1, model="transformer")
    config = replace(config, model=replace(config.model, segment_len=1))
    with pytest.raises(ValueError, match=r"some has only documents of a single token to (train|validate) on"):
        train_run(config, tmp_path / "run")


@pytest.mark.parametrize("model", ["compressive", pytest.param("transformer-xl", marks=pytest.mark.long)])
def test_a_compiled_training_on_documents_compiles_once(model, monkeypatch):
    """As long as segments are whole: from the first step on, every step has the same shapes."""
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    torch.compiler.reset()
    config = small_training(model=model, compile=True, tokens=64 * 8, precision="bfloat16")
    settings = {"n_layers": 1, "vocab_size": 11, "compression_rate": 4, "embedding": "adaptive"}
    adaptive = AdaptiveConfig(d_embed=8)
    config = replace(config, model=replace(config.model, **settings, adaptive=adaptive))
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 7))
    whole = [segment for segment in segments if len(segment.inputs) == 16]
    train_here(MemoryLM(config.model), config, itertools.cycle(whole))
    assert compiled.frame_count == 1
