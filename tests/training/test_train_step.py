"""What a training step learns from: all predictions of all parts alike, and what it computes in."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memformers import AdaptiveConfig, MemoryLM
from memformers.data.streams import IGNORED, Segment
from memformers.training import run as run_module
from memformers.training.loop import NotFiniteError, TrainingState, train_step
from memformers.training.optimizers import build_optimizers
from memformers.training.run import build_model
from tests.builders import MODELS, small_lm, small_training
from tests.training.runs import DOCUMENTS, finding, poisoned, segments_of, train_here, train_run


def step(lm, segment, memory, forward=None, **changes):
    """The state after a step without clipping, and the gradient."""
    config = small_training(batch_size=4, max_grad_norm=1e9, **changes)
    state = TrainingState((), memory)
    train_step(lm, lm if forward is None else forward, segment, state, config)
    state.read_losses()
    return state, [p.grad for p in lm.parameters()]


def check_same(gradients, wanted, atol):
    """All gradients, except those of parameters that have none."""
    for a, b in zip(gradients, wanted, strict=True):
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
    """Each prediction counts alike, and those without a target don't. A part without any target adds nothing,
    though its mean is not a number."""
    lm, part = small_lm(model, n_layers=1, **changes), segment(7)
    memory = lm(torch.randint(11, (7, 4))).memory
    part.targets[:, 1] = part.targets[1:, 0] = part.targets[2:4, 3] = IGNORED
    logits, after, auxiliary = lm(part.inputs, memory)
    loss = F.cross_entropy(logits.flatten(0, 1), part.targets.flatten())
    wanted = torch.autograd.grad(loss + auxiliary, [*lm.parameters()], allow_unused=True)
    for accumulate in (1, 2, 4):
        state, gradients = step(lm, part, memory, accumulate=accumulate)
        assert state.window.loss == pytest.approx(loss.item(), abs=1e-12)
        assert state.window.reconstruction_loss == pytest.approx(auxiliary.item(), abs=1e-12)
        check_same(gradients, wanted, 1e-10)
        assert not any(x.requires_grad for x in state.memory.mem + state.memory.c_mem)
        check_same(state.memory.mem + state.memory.c_mem, after.mem + after.c_mem, 1e-12)


class NoFloat64(TorchDispatchMode):
    """Fails where a tensor of float64 is made, which Apple's GPUs don't have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert all(x.dtype != torch.float64 for x in tree_leaves(result) if isinstance(x, torch.Tensor)), func
        return result


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_makes_no_tensor_of_float64_so_that_it_runs_on_mps(model, optimizer):
    config = small_training(model=model, optimizer=optimizer, accumulate=2)
    for mode in (nullcontext(), NoFloat64()):  # first the tables of distances are made, on the CPU
        lm, segments = build_model(config), segments_of(config)
        state = TrainingState(build_optimizers(lm, config))
        with mode:
            for _ in range(4):
                train_step(lm, lm, next(segments), state, config)
        state.read_losses()
    assert state.window.steps == 4
    assert state.window.loss > 0


def test_a_loss_that_is_not_finite_ends_the_training_at_the_next_record():
    config, steps = small_training(tokens=64 * 12, evaluations=1, log_every=5), []
    lm = poisoned(build_model(config), "embed", {7})
    with pytest.raises(NotFiniteError, match="the loss is nan in step 7; training stopped"):
        train_here(lm, config, segments_of(config), maybe_checkpoint=lambda state: steps.append(state.step))
    assert steps == [*range(10)], "the record after step 9 reads the loss of step 7"


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_compiled_step_has_the_same_gradient(model):
    torch.compiler.reset()
    lm, part = small_lm(model, n_layers=1), segment(7)
    memory = lm(torch.randint(11, (7, 4))).memory
    compiled = torch.compile(lm, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    state, wanted = step(lm, part, memory)
    wanted = [x if x is None else x.clone() for x in wanted]
    again, gradients = step(lm, part, memory, compiled)
    assert again.window.loss == pytest.approx(state.window.loss, abs=1e-12)
    check_same(gradients, wanted, 1e-10)


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
    [({"mem_len": 192}, 4),
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
