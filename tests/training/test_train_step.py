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
from memformers.training.train_step import UnrolledSegments, backward
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


ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((2, 5), 2)}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("model", "changes"),
    [("transformer", {}), ("transformer-xl", {}), ("transformer-xl", ADAPTIVE), ("compressive", {})],
)
def test_a_step_learns_from_the_mean_of_its_predictions_in_any_number_of_parts(model, changes):
    """Each counts alike, in a segment that is shorter or has some without a target too. A part without any
    adds nothing, though its mean is not a number."""
    lm, parts = small_lm(model, n_layers=1, **changes), [segment(n) for n in (7, 7, 7, 3)]
    parts[1].targets[2:5] = parts[2].targets[:, 1] = parts[2].targets[1:, 0] = IGNORED
    memory, losses, auxiliary, correct = Memory(()), [], torch.zeros(()), 0
    for part in parts:
        logits, memory, auxiliary_loss = lm(part.inputs, memory, through_memory=True)
        auxiliary = auxiliary + auxiliary_loss / len(parts)
        losses.append(F.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), reduction="none"))
        correct += (logits.argmax(-1) == part.targets).sum()
    wanted, learning = torch.cat(losses).sum() / sum(part.predictions for part in parts), [*lm.parameters()]
    grads = torch.autograd.grad(wanted + auxiliary, learning, allow_unused=True)
    for accumulate in (1, 2, 4):
        outcome, found = gradient_of(lm, parts, accumulate=accumulate)
        assert outcome.loss.item() == pytest.approx(wanted.item(), abs=1e-12)
        assert outcome.auxiliary_loss.item() == pytest.approx(auxiliary.item(), abs=1e-12)
        assert outcome.correct == correct > 0
        check_same(found, grads, 1e-10)
        assert not any(x.requires_grad for x in outcome.memory.mem + outcome.memory.c_mem)
        check_same(outcome.memory.mem + outcome.memory.c_mem, memory.mem + memory.c_mem, 1e-12)


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


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_after_a_skipped_step_nothing_of_an_ended_epoch_or_document_is_remembered(documents):
    """The second of three steps is skipped, in which documents begin in some streams; and the third, of whose
    three segments the last begins an epoch."""
    lm = poisoned(small_lm("transformer-xl", segment_len=16, mem_len=16), "head", {3, 7})
    config, before = small_training(tokens=3 * 3 * 64 - 12, tbptt=2, skip_bad_steps=2), []
    state = TrainingState(build_optimizers(lm, config))
    segments = list(itertools.islice(segments_of(config, documents=documents), 9))
    assert [segment.starts_over for segment in segments] == [True] + [False] * 7 + [True]
    with pytest.warns(RuntimeWarning, match="the step is skipped"):
        train_here(lm, config, iter(segments), state=state,
                   maybe_checkpoint=lambda state: before.append(state.memory))  # fmt: skip
    assert all(one is other for one, other in zip(before[2].mem, before[1].mem, strict=True))
    if documents:
        begun = torch.cat([segment.doc_starts for segment in segments[3:6]]).any(0)
        assert begun.any()
        assert torch.equal(before[2].valid, torch.where(begun, 0, before[1].valid))
        assert (before[2].valid > 0).any()
    assert state.memory.mem == ()


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


@pytest.mark.long
@pytest.mark.parametrize("model", ["compressive", "transformer-xl"])
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "most"),
    [({"mem_len": 192}, 4), ({"mem_len": 16, "divided_len": 176}, 6), ({"mem_len": ((16, 192),)}, 2),
     ({"model": "compressive", "compression_rate": 4, "mem_len": 16, "c_mem_len": 44}, 6)],
)  # fmt: skip
def test_a_compiled_training_in_which_the_memory_fills_for_long_compiles_few_times(model, most, monkeypatch):
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    torch.compiler.reset()
    config = small_training(compile=True, tokens=64 * 14, precision="bfloat16")
    config = replace(config, model=replace(config.model, **{"n_layers": 1, "vocab_size": 11, **model}))
    train_here(MemoryLM(config.model), config, segments_of(config))
    assert 0 < compiled.frame_count <= most
