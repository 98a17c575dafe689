"""A training: what it learns, when it records, and with which memory; learning rates and clipping."""

import math
from dataclasses import replace

import pytest
import torch

from memformers import kernels
from memformers.data.streams import training_segments
from memformers.models.memory import Memory
from memformers.training.loop import TrainingState, clip, shortened, train_steps
from memformers.training.optimizers import learning_rate_schedule
from memformers.training.run import build_model
from tests.builders import MODELS, small_lm, small_training
from tests.training.runs import train_here

TEXT = torch.arange(3_000) % 7  # so regular that every model can learn it


def segments_of(config):
    return training_segments(TEXT, config.batch_size, config.model.segment_len)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns(model):
    config = small_training(model=model, tokens=5_000, learning_rate=1e-2)
    records = train_here(build_model(config), config, segments_of(config))
    assert records[-1]["loss.train"] < 0.1 < math.log(7) / 2 < records[0]["loss.train"]


def test_records_and_evaluations_come_as_often_as_asked_for():
    config, seen = small_training(tokens=64 * 23, evaluations=3, log_every=5), []
    rates = []

    def record(state, metrics):
        seen.append(state.step)
        rates.append(metrics["learning_rate"])

    hooks = {"record": record, "evaluate": lambda state: seen.append(-state.step)}
    end = train_steps(build_model(config), segments_of(config), config, **hooks)
    assert seen == [5, -8, 10, 15, -16, 20, 23, -23]
    assert (end.step, end.tokens, end.evaluations) == (23, 64 * 23, 3)
    part = learning_rate_schedule(config, config.tokens)  # of the tokens in the middle of a step
    peak = config.optim.learning_rate
    assert rates == [pytest.approx(peak * part(64 * step - 32)) for step in (5, 10, 15, 20, 23)]


def test_the_loss_is_read_at_each_record_evaluation_and_checkpoint_and_else_never(monkeypatch):
    config, reads = small_training(tokens=64 * 12, evaluations=3, log_every=6), []
    read = TrainingState.read_losses
    monkeypatch.setattr(TrainingState, "read_losses", lambda s, r: reads.append(s.step) or read(s, r))
    train_here(build_model(config), config, segments_of(config))
    assert reads == [4, 6, 8, 12]


@pytest.mark.parametrize(
    ("model", "worth_blocking"),
    [("compressive", 1),
     *(pytest.param(model, 1 << 18, marks=pytest.mark.long) for model in MODELS),
     *(pytest.param(model, 1, marks=pytest.mark.long) for model in MODELS[:2])],
)  # fmt: skip
def test_bfloat16_learns_as_float32_does_and_keeps_weights_and_memory_in_float32(
    model, worth_blocking, monkeypatch
):
    monkeypatch.setattr(kernels, "MIN_SCORES_FOR_BLOCKED", worth_blocking)
    dtypes, losses = set(), {}
    for precision in ("float32", "bfloat16"):
        # Slowly, since at high rates rounding of any kind sends a network of this size another way.
        rates = {"learning_rate": 3e-3, "muon_learning_rate": 5e-3}
        config = small_training(model=model, tokens=2_000, precision=precision, **rates)
        lm = build_model(config)
        lm.register_forward_hook(
            lambda _, inputs, output: dtypes.update(
                t.dtype for t in (*output.memory.mem, *output.memory.c_mem)
            )
        )
        losses[precision] = [found["loss.train"] for found in train_here(lm, config, segments_of(config))]
        assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert dtypes == {torch.float32}
    assert losses["bfloat16"] != losses["float32"], "nothing was rounded"
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.02)


def test_the_gradients_of_the_two_losses_are_shortened_apart():
    model = build_model(small_training(model="compressive"))
    f_c = {id(p) for compress in model.transformer.compressions for p in compress.parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0 if id(p) in f_c else 1e-6)
    for norm, value, compresses in zip(clip(model, 1.0), (1e-6, 3.0), (False, True), strict=True):
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if (id(p) in f_c) == compresses])
        assert norm.item() == pytest.approx(value * len(grads) ** 0.5)
        assert grads.norm().item() == pytest.approx(min(norm.item(), 1.0), rel=1e-4)
        assert compresses or bool((grads == 1e-6).all())


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
def test_a_growing_memory_grows_in_stages_from_nothing_to_everything(warmup, lengths):
    config = small_training(tokens=64 * 16, memory_warmup=warmup, log_every=1, model="transformer-xl")
    records = train_here(build_model(config), config, segments_of(config))
    assert [record["memory.length"] for record in records] == lengths


def test_a_share_of_a_memory_is_its_newest_positions_then_its_newest_slots():
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=4, bptt=1)
    layers, memory = lm.config.memory_sizes, Memory(counting(8, 8), counting(8, 8), None, counting(8, 8))
    kept = [(0, (0, 0, 0)), (3 / 8, (4, 0, 0)), (7 / 16, (4, 0, 0)), (1 / 2, (8, 0, 0)),
            (5 / 8, (8, 2, 8)), (1, (8, 8, 8))]  # fmt: skip
    for share, lengths in kept:
        part = shortened(memory, share, layers)
        assert (part.mem_len, part.c_mem_len, len(part.slot_inputs[0])) == lengths
        for whole, cut in zip(memory.mem + memory.c_mem, part.mem + part.c_mem, strict=True):
            assert torch.equal(cut, whole[len(whole) - len(cut) :])
    assert shortened(Memory(()), 0.5, layers) == Memory(())
    layers = small_lm("transformer-xl", n_layers=2, mem_len=(4, 16)).config.memory_sizes
    assert shortened(Memory(counting(4, 16)), 0.5, layers).lengths(2) == [(2, 0), (8, 0)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [3 / 8, 6 / 8])
def test_a_shortened_memory_still_hides_the_documents_before(share):
    """What a stream's ended document left in it can be anything."""
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=2)
    tokens, memory = torch.randint(11, (4, 8, 3)), None
    doc_starts = torch.zeros(4, 8, 3, dtype=torch.bool)
    doc_starts[2, 4, 1] = doc_starts[3, 2, 2] = True
    for segment, begun in zip(tokens, doc_starts, strict=True):
        memory = lm(segment, memory, doc_starts=begun).memory
    short = shortened(memory, share, lm.config.memory_sizes)
    assert short.valid.tolist()[2] == 6, "the third stream's document has 6 positions yet"
    other = replace(
        short, mem=tuple(x.clone() for x in short.mem), c_mem=tuple(x.clone() for x in short.c_mem)
    )
    for x, hidden in [(x, max(len(x) - 6, 0)) for x in other.mem] + [(x, len(x)) for x in other.c_mem]:
        x[:hidden, 2] = 7.0
    assert torch.equal(lm(tokens[0], other).logits, lm(tokens[0], short).logits)
