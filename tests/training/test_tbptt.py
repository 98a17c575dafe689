"""Training steps of several segments, whose gradient reaches through memory."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend

from memformers.data.streams import IGNORED
from memformers.models.memory import Memory
from memformers.training.distributed import Distributed
from memformers.training.gradients import Batch, InTurn, backward
from memformers.training.loop import train
from memformers.training.optimizers import build_optimizers
from memformers.training.run import train_run
from memformers.training.state import TrainingState
from tests.builders import small_lm, small_training
from tests.training.launches import program
from tests.training.ranks_program import train_in_double
from tests.training.runs import DOCUMENTS, poisoned, resumed, segments_of


def gradient_of(lm, parts, forward=None, **changes):
    """What a step's backward pass finds, and the gradient."""
    lm.zero_grad()
    predictions = sum(int((part.targets != IGNORED).sum()) for part in parts)
    config = small_training(batch_size=4, tbptt=len(parts) - 1, **changes)
    outcome = backward(
        forward or InTurn(lm), parts, Memory(()), config, Distributed(), predictions=predictions
    )
    return outcome, [p.grad for p in lm.parameters()]


def segment(length, streams=4):
    return Batch(torch.randint(11, (length, streams)), torch.randint(11, (length, streams)))


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
    predictions = sum(int((part.targets != IGNORED).sum()) for part in parts)
    wanted, auxiliary, learning = sum(losses) / predictions, auxiliary / 4, list(lm.parameters())
    grads = torch.autograd.grad(wanted + auxiliary, learning, allow_unused=True)
    lm.transformer.recompute = recompute
    for accumulate in (1, 2):
        outcome, found = gradient_of(lm, parts, accumulate=accumulate)
        assert outcome.loss == pytest.approx(wanted.item(), abs=1e-12)
        assert outcome.auxiliary_loss == pytest.approx(auxiliary.item(), abs=1e-12)
        assert outcome.correct > 0
        for a, b in zip(found, grads, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert not any(x.requires_grad for x in outcome.memory.mem + outcome.memory.c_mem)
        for kind in ("mem", "c_mem"):
            torch.testing.assert_close(
                getattr(outcome.memory, kind), getattr(memory.detach(), kind), rtol=0, atol=1e-12
            )


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
    backward(InTurn(lm), [second], past, small_training(), Distributed())
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
    end = train(lm, segments_of(config), config, record=lambda *_: None, evaluate=lambda _: None, state=state)
    memories = [0, 16, 16, 16, 16, 16, 16, 16]  # none at the beginning of an epoch
    lengths = [16] * 7 + [13]
    assert [s[0] for s in seen] == (lengths * 3)[: len(seen)]
    assert [s[1] for s in seen] == (memories * 3)[: len(seen)]
    assert [s[2] for s in seen] == [True, True, False] * end.step
    assert (end.step, end.tokens) == (6, 4 * (2 * 125 + 32))
    assert (state.epoch, state.position) == (2, 32)
    assert config.tokens_a_step == 3 * 16 * 4


def test_without_it_a_step_is_one_segment_and_its_memory_carries_no_gradient():
    lm, config, seen = small_lm("transformer-xl", segment_len=16, mem_len=16), small_training(tokens=128), []
    lm.register_forward_hook(lambda _, args, output: seen.append(output.memory.mem[0].requires_grad))
    end = train(lm, segments_of(config), config, record=lambda *_: None, evaluate=lambda _: None)
    assert seen == [False, False]
    assert end.step == 2


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_after_a_skipped_step_nothing_of_an_epoch_that_has_ended_is_remembered(documents):
    """With three segments a step, the third step has the end of an epoch in it."""
    lm = poisoned(small_lm("transformer-xl", segment_len=16, mem_len=16), "head", {3, 7})
    config, before = small_training(tokens=3 * 3 * 64 - 12, skip_bad_steps=2, tbptt=2), []
    state = TrainingState(build_optimizers(lm, config))
    segments = list(islice(segments_of(config, documents=documents), 9))
    with pytest.warns(RuntimeWarning, match="the step is skipped"):
        train(lm, iter(segments), config, record=lambda *_: None, evaluate=lambda _: None, state=state,
              maybe_checkpoint=lambda state: before.append(state.memory))  # fmt: skip
    assert [segment.starts_over for segment in segments] == [True] + [False] * 7 + [True]
    assert before[2].mem is before[1].mem
    if documents:
        begun = torch.cat([segment.doc_starts for segment in segments[3:6]]).any(0)
        assert (before[2].valid[begun] == 0).all()
    assert state.memory.mem == ()


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_resumed_run_has_the_same_records_and_weights(model, tmp_path, monkeypatch):
    config = small_training(model=model, log_every=2, tbptt=1, evaluations=1, accumulate=2)
    config = replace(config, model=replace(config.model, dropout=0.3))
    _, folder = resumed(config, tmp_path, monkeypatch, (1, 8))
    with pytest.raises(ValueError, match="can't be resumed with other settings: tbptt 1 → 0"):
        train_run(replace(config, tbptt=0), folder, resume=True)


def test_it_learns_in_bfloat16():
    lm = small_lm("compressive", segment_len=16, mem_len=16)
    config, records = small_training(tokens=128 * 20, tbptt=1, precision="bfloat16", log_every=1), []
    train(lm, segments_of(config), config, record=lambda _, found: records.append(found["loss.train"]),
          evaluate=lambda _: None)  # fmt: skip
    assert records[-1] < 0.8 * records[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_compiled_step_has_the_same_gradient(model):
    torch.compiler.reset()
    lm, parts = small_lm(model, n_layers=1), [segment(7) for _ in range(3)]
    compiled = torch.compile(lm, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    outcome, wanted = gradient_of(lm, parts)
    again, found = gradient_of(lm, parts, InTurn(compiled))
    assert again.loss == pytest.approx(outcome.loss, abs=1e-12)
    for a, b in zip(found, wanted, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_two_ranks_end_with_one_processs_weights_memory_and_losses(model, tmp_path):
    """A slot is made every other segment, so that some segments of a step leave the compressions idle."""
    config = small_training(model=model, batch_size=4, tokens=4 * 16 * 12, log_every=1, tbptt=1)
    config = replace(config, model=replace(config.model, compression_rate=32, mem_len=32))
    train_in_double(tmp_path, config)
    program(tmp_path, replace(config, parallel="ddp", accumulate=2), 2)
    one = load_file(tmp_path / "single.0.safetensors")
    ranks = [load_file(tmp_path / f"ddp.{rank}.safetensors") for rank in range(2)]
    for name, tensor in one.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=0, atol=1e-10)
        assert torch.equal(ranks[0][name], ranks[1][name])
