"""A training: what a step learns from and computes in, when it records, and with which memory."""

import itertools
import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memformers import AdaptiveConfig, LayerMemory, MemoryLM, MemoryRule
from memformers.data.streams import IGNORED, Segment, training_segments
from memformers.models.memory import Memory
from memformers.training.job import build_model
from memformers.training.optimizers import learning_rate_schedule
from memformers.training.state import NotFiniteError, TrainingState
from memformers.training.trainer import clip_gradients, truncate_to_stage
from tests.builders import MODELS, small_lm, small_training
from tests.texts import kept, memory_of
from tests.training.runs import (
    DOCUMENTS,
    Notes,
    segments_of,
    train_here,
    train_run,
    trainer_of,
    write_text_file,
)

TEXT = torch.arange(3_000) % 7  # so regular that every model can learn it


def regular(config):
    return training_segments(TEXT, config.batch_size, config.model.segment_len)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns(model):
    config = small_training(model=model, max_tokens=5_000, learning_rate=1e-2)
    records = train_here(build_model(config), config, regular(config))
    assert records[-1]["loss.train"] < 0.1 < math.log(7) / 2 < records[0]["loss.train"]


def test_records_and_evaluations_come_as_often_as_asked_for(monkeypatch):
    """Only they read the loss, which waits for the device."""
    config = small_training(max_tokens=64 * 23, evaluations=3, log_every=5)
    read_pending = TrainingState.read_pending
    steps_read = []

    def read(state, ranks):
        steps_read.append(state.step)
        read_pending(state, ranks)

    monkeypatch.setattr(TrainingState, "read_pending", read)
    notes = Notes()
    end = trainer_of(build_model(config), config, regular(config), notes).fit()
    assert notes.steps == [5, -8, 10, 15, -16, 20, 23, -23]
    assert steps_read == [5, 8, 10, 15, 16, 20, 23]
    assert (end.step, end.tokens, end.evaluations) == (23, 64 * 23, 3)


def test_records_have_the_rate_of_the_middle_of_a_step():
    config = small_training(max_tokens=64 * 23, evaluations=3, log_every=5)
    notes = Notes()
    trainer_of(build_model(config), config, regular(config), notes).fit()
    share_of_peak = learning_rate_schedule(config, config.max_tokens)
    rates = []
    for step in (5, 10, 15, 20, 23):
        rates.append(config.optim.learning_rate * share_of_peak(64 * step - 32))
    assert [record["learning_rate"] for record in notes.records] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("model", "kernel"),
    [("compressive", "blocked"),
     *(pytest.param(model, "auto", marks=pytest.mark.long) for model in MODELS),
     *(pytest.param(model, "blocked", marks=pytest.mark.long) for model in MODELS[:2])],
)  # fmt: skip
def test_bfloat16_learns_like_float32(model, kernel):
    memories = []
    losses = {}
    for precision in ("float32", "bfloat16"):
        # Slowly, since at high rates rounding of any kind sends a network of this size another way.
        rates = {"learning_rate": 3e-3, "muon_learning_rate": 5e-3}
        config = small_training(model=model, kernel=kernel, max_tokens=2_000, precision=precision, **rates)
        lm = build_model(config)
        lm.register_forward_hook(lambda _, __, output: memories.append(output.memory))
        losses[precision] = [metrics["loss.train"] for metrics in train_here(lm, config, regular(config))]
        for weight in lm.parameters():
            assert weight.dtype == torch.float32
    # Memories are kept in float32, too.
    for memory in memories:
        for tensor in kept(memory):
            assert tensor.dtype == torch.float32
    assert losses["bfloat16"] != losses["float32"], "nothing was rounded"
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.02)


def test_the_gradients_of_the_two_losses_are_shortened_apart():
    model = build_model(small_training(model="compressive"))
    # The language model's gradient is short, and that of the compressions is too long.
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 1e-6)
    for f_c in model.transformer.compressions:
        for weight in f_c.parameters():
            weight.grad = torch.full_like(weight, 3.0)

    norm, compression_norm = clip_gradients(model, 1.0)
    gradients = []
    compression_gradients = []
    for name, weight in model.named_parameters():
        if ".f_c." in name:
            compression_gradients.append(weight.grad.flatten())
        else:
            gradients.append(weight.grad.flatten())
    grads = torch.cat(gradients)
    assert norm.item() == pytest.approx(1e-6 * len(grads) ** 0.5)
    assert bool((grads == 1e-6).all()), "they are short enough"
    compression_grads = torch.cat(compression_gradients)
    assert compression_norm.item() == pytest.approx(3.0 * len(compression_grads) ** 0.5)
    assert compression_grads.norm().item() == pytest.approx(1.0, rel=1e-4)


def counting(*lengths):
    """For each of ``lengths``, a tensor ``[length, 1, 1]`` that counts its positions."""
    return tuple(torch.arange(float(length)).view(-1, 1, 1) for length in lengths)


@pytest.mark.parametrize(
    ("warmup", "lengths"),
    [
        (0.5, [*range(2, 16, 2), *[16] * 9]),
        (1.0, [2 * (step // 2) for step in range(1, 17)]),
        (0.0, [16] * 16),
    ],
)
def test_memory_grows_in_stages(warmup, lengths):
    # Sixteen steps; in a warm-up over all of them, every other one adds two positions.
    config = small_training(max_tokens=64 * 16, memory_warmup=warmup, log_every=1, model="transformer-xl")
    records = train_here(build_model(config), config, regular(config))
    assert [record["memory.length"] for record in records] == lengths


def test_a_users_memory_has_its_whole_length_from_the_start():
    class Newest(MemoryRule):
        n_slots = 0

        def update(self, past, x, context):
            window = self.push(past, x, context)
            return LayerMemory(window.mem, window.slots), None

    config = small_training(
        max_tokens=64 * 4, memory_warmup=0.5, log_every=1, model="transformer-xl", mem_len=8
    )
    config = replace(config, model=replace(config.model, model=Newest))
    records = train_here(build_model(config), config, regular(config))
    assert [record["memory.length"] for record in records] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("share", "lengths"),
    [(0, (0, 0, 0)), (3 / 8, (4, 0, 0)), (7 / 16, (4, 0, 0)), (1 / 2, (8, 0, 0)), (5 / 8, (8, 2, 8)),
     (1, (8, 8, 8))],
)  # fmt: skip
def test_a_stage_keeps_newest_positions_before_slots(share, lengths):
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=4, bptt=1)
    memory = memory_of(counting(8, 8), counting(8, 8), bptt_inputs=counting(8, 8))
    truncated = truncate_to_stage(memory, share, lm.config.memory_sizes)
    assert (truncated.mem_len, truncated.n_slots, len(truncated.layers[0].bptt_inputs)) == lengths
    for tensor, part in zip(kept(memory), kept(truncated), strict=True):
        assert torch.equal(part, tensor[len(tensor) - len(part) :])
    assert truncate_to_stage(Memory(()), share, lm.config.memory_sizes) == Memory(())


def test_a_stage_is_a_share_of_each_layers_memory():
    sizes = small_lm("transformer-xl", n_layers=2, mem_len=(4, 16)).config.memory_sizes
    truncated = truncate_to_stage(memory_of(counting(4, 16)), 0.5, sizes)
    assert [(layer.mem_len, layer.n_slots) for layer in truncated.layers] == [(2, 0), (8, 0)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [3 / 8, 6 / 8])
def test_a_truncated_memory_still_hides_earlier_documents(share):
    """What a stream's ended document left in it can be anything."""
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=2)
    segments = torch.randint(11, (4, 8, 3))
    doc_starts = torch.zeros(4, 8, 3, dtype=torch.bool)
    doc_starts[2, 4, 1] = True
    doc_starts[3, 2, 2] = True
    memory = None
    for text, starts in zip(segments, doc_starts, strict=True):
        memory = lm(text, memory, doc_starts=starts).memory
    truncated = truncate_to_stage(memory, share, lm.config.memory_sizes)
    assert truncated.n_valid.tolist()[2] == 6, "the third stream's document has 6 positions yet"
    changed = deepcopy(truncated)
    for layer in changed.layers:
        layer.mem[: max(layer.mem_len - 6, 0), 2] = 7.0
        layer.slots[:, 2] = 7.0
    assert torch.equal(lm(segments[0], changed).logits, lm(segments[0], truncated).logits)


def step_of(lm, segment, memory, forward=None, **changes):
    """The state after a step without clipping, and the gradient."""
    config = small_training(batch_size=4, max_grad_norm=1e9, **changes)
    state = TrainingState((), memory)
    trainer = trainer_of(lm, config, [segment], state=state)
    trainer.forward = lm if forward is None else forward
    trainer.step(segment)
    state.read_pending()
    return state, [p.grad for p in lm.parameters()]


def check_same(gradients, wanted, atol):
    """All gradients, except those of parameters that have none."""
    for gradient, expected in zip(gradients, wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=0, atol=atol)


def segment(length, streams=4):
    return Segment(torch.randint(11, (length, streams)), torch.randint(11, (length, streams)))


ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((2, 5), 2)}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("model", "changes"),
    [("transformer", {}), ("transformer-xl", {}), ("transformer-xl", ADAPTIVE), ("compressive", {})],
)
def test_gradient_accumulation_keeps_the_mean_over_predictions(model, changes):
    """Each prediction counts alike, and those without a target don't. A part without any target adds nothing,
    though its mean is not a number."""
    lm = small_lm(model, n_layers=1, **changes)
    part = segment(7)
    memory = lm(torch.randint(11, (7, 4))).memory
    part.targets[:, 1] = IGNORED
    part.targets[1:, 0] = IGNORED
    part.targets[2:4, 3] = IGNORED
    logits, next_memory, auxiliary = lm(part.inputs, memory)
    loss = F.cross_entropy(logits.flatten(0, 1), part.targets.flatten())
    wanted = torch.autograd.grad(loss + auxiliary, [*lm.parameters()], allow_unused=True)
    for accumulate in (1, 2, 4):
        state, gradients = step_of(lm, part, memory, gradient_accumulation_steps=accumulate)
        assert state.window.loss == pytest.approx(loss.item(), abs=1e-12)
        assert state.window.reconstruction_loss == pytest.approx(auxiliary.item(), abs=1e-12)
        check_same(gradients, wanted, 1e-10)
        # Nothing of a step can be reached from the next one.
        for tensor in kept(state.memory):
            assert not tensor.requires_grad
        check_same(kept(state.memory), kept(next_memory), 1e-12)


class NoFloat64(TorchDispatchMode):
    """Fails where a tensor of float64 is made, which Apple's GPUs don't have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                assert leaf.dtype != torch.float64, func
        return result


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_makes_no_float64_tensor(model, optimizer):
    config = small_training(model=model, optimizer=optimizer, gradient_accumulation_steps=2)
    # The first steps make the tables of distances, on the CPU.
    for mode in (nullcontext(), NoFloat64()):
        trainer = trainer_of(build_model(config), config)
        with mode:
            for _ in range(4):
                trainer.step(next(trainer.segments))
        trainer.state.read_pending()
    assert trainer.state.window.steps == 4
    assert trainer.state.window.loss > 0


def test_nan_ends_the_training_at_the_next_record():
    config = small_training(max_tokens=64 * 12, evaluations=1, log_every=5)
    lm = build_model(config)
    steps = []
    calls = itertools.count()
    lm.embed.register_forward_hook(lambda _, __, x: x * float("nan") if next(calls) == 7 else x)
    with pytest.raises(NotFiniteError, match="the loss is nan in step 7; training stopped"):
        train_here(lm, config, segments_of(config), at_checkpoint=lambda state: steps.append(state.step))
    assert steps == [*range(10)], "the record after step 9 reads the loss of step 7"


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_compiled_step_has_the_same_gradient(model, graph_counter):
    torch.compiler.reset()
    lm = small_lm(model, n_layers=3)
    lm.transformer.compiles_layers_as_one = True
    part = segment(7)
    memory = lm(torch.randint(11, (7, 4))).memory
    compiled = torch.compile(lm, fullgraph=True, backend=graph_counter)
    state, wanted = step_of(lm, part, memory)
    # The next step reuses these tensors.
    wanted = [grad if grad is None else grad.clone() for grad in wanted]
    compiled_state, gradients = step_of(lm, part, memory, compiled)
    assert compiled_state.window.loss == pytest.approx(state.window.loss, abs=1e-12)
    check_same(gradients, wanted, 1e-10)


@pytest.mark.parametrize("lengths", [(90, *[1] * 10), (1,) * 20])
def test_documents_of_one_token_are_an_error(lengths, tmp_path):
    data = write_text_file(tmp_path, "x" * sum(lengths), lengths)
    config = small_training(batch_size=1, model="transformer", data=data)
    config = replace(config, model=replace(config.model, segment_len=1))
    message = r"text.jsonl has only documents of a single token to (train|validate) on"
    with pytest.raises(ValueError, match=message):
        train_run(config, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("network", "documents", "max_graphs"),
    [({"model": "transformer-xl"}, DOCUMENTS, 1),
     ({"model": "compressive", "compression_rate": 4}, DOCUMENTS, 1),
     ({"mem_len": 48}, (), 2),
     ({"mem_len": 48, "positions": "learned"}, (), 2),
     ({"mem_len": 48, "clamp_len": 20}, (), 2),
     ({"mem_len": 48, "same_length": True}, (), 2),
     ({"model": "compressive", "compression_rate": 4, "mem_len": 16, "c_mem_len": 8}, (), 2)],
)  # fmt: skip
def test_a_compiled_training_compiles_few_times(network, documents, max_graphs, graph_counter, monkeypatch):
    """Once for whole segments, of documents in all steps, and of a text once the memory is full; and once for
    the last segment of a text, which is shorter."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graph_counter))
    torch.compiler.reset()
    config = small_training(compile=True, max_tokens=64 * 14)
    config = replace(config, model=replace(config.model, n_layers=2, vocab_size=11, **network))
    segments = segments_of(config, documents=documents)
    if documents:
        whole_segments = [part for part in itertools.islice(segments, 7) if len(part.inputs) == 16]
        segments = itertools.cycle(whole_segments)
    train_here(MemoryLM(config.model), config, segments)
    assert 0 < graph_counter.frame_count <= max_graphs
