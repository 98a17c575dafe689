import math

import pytest
import torch

from memformers.data.streams import training_segments
from memformers.kernels import dispatch
from memformers.training.loop import train_steps
from memformers.training.optimizers import build_optimizers, learning_rate_schedule
from memformers.training.run import build_model
from memformers.training.train_step import clip
from tests.builders import MODELS, small_training

TEXT = torch.arange(3_000) % 7  # so regular that every model can learn it


def run(config, model=None, text=TEXT):
    records, evaluations = [], []
    model = model or build_model(config)
    segments = training_segments(text, config.batch_size, config.model.segment_len)
    end = train_steps(
        model,
        segments,
        config,
        record=lambda state, metrics: records.append((state.step, metrics)),
        evaluate=lambda state: evaluations.append(state.step),
    )
    return model, records, evaluations, end


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns(model):
    _, records, _, _ = run(small_training(model=model, tokens=8_000, learning_rate=1e-2))
    assert records[-1][1]["loss.train"] < 0.1 < math.log(7) / 2 < records[0][1]["loss.train"]


def test_records_and_evaluations_come_as_often_as_asked_for():
    config = small_training(tokens=64 * 23, evaluations=3, log_every=5)
    _, records, evaluations, end = run(config)
    assert [step for step, _ in records] == [5, 10, 15, 20, 23]
    assert evaluations == [8, 16, 23]
    assert (end.step, end.tokens) == (23, 64 * 23)


def test_the_learning_rate_rises_from_zero_and_falls_to_zero_in_straight_lines():
    rate = learning_rate_schedule(small_training(warmup=0.1, learning_rate=1.0), 1_000)
    assert [rate(t) for t in (0, 50, 100, 550, 999)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 1 / 900])
    assert rate(1_000) == rate(2_000) == 0.0
    flat = learning_rate_schedule(small_training(warmup=0.0, learning_rate=1.0), 1_000)
    assert flat(0) == 1.0


def test_only_matrices_of_maps_decay():
    model = build_model(small_training(model="compressive"))
    (adamw,) = build_optimizers(model, small_training(optimizer="adamw"))
    decaying, others = adamw.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-1] for p in decaying["params"]} == {"weight"}
    assert "embed.weight" in {names[id(p)] for p in others["params"]}
    assert not any("norm" in names[id(p)] for p in decaying["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)


@pytest.mark.parametrize(
    ("model", "worth_blocking"),
    [("compressive", 1), ("transformer-xl", 1 << 18), ("transformer", 1 << 18),
     *(pytest.param(model, 1, marks=pytest.mark.long) for model in MODELS[:2]),
     pytest.param("compressive", 1 << 18, marks=pytest.mark.long)],
)  # fmt: skip
def test_bfloat16_learns_as_float32_does_and_keeps_weights_and_memory_in_float32(
    model, worth_blocking, monkeypatch
):
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", worth_blocking)
    dtypes = set()
    losses = {}
    for precision in ("float32", "bfloat16"):
        # Slowly, since at high rates rounding of any kind sends a network of this size another way.
        rates = {"learning_rate": 3e-3, "muon_learning_rate": 5e-3}
        config = small_training(model=model, tokens=4_000, precision=precision, **rates)
        lm = build_model(config)

        def remember(module, arguments, output, seen=dtypes):
            seen |= {t.dtype for t in (*output.memory.mem, *output.memory.c_mem)}

        lm.register_forward_hook(remember)
        _, records, _, _ = run(config, lm)
        losses[precision] = [m["loss.train"] for _, m in records]
        assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert dtypes == {torch.float32}
    assert losses["bfloat16"] != losses["float32"], "nothing was rounded"
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.02)


def test_the_gradients_of_the_two_losses_are_shortened_apart():
    model = build_model(small_training(model="compressive"))
    f_c = {id(p) for compress in model.transformer.compressions for p in compress.parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0 if id(p) in f_c else 1e-6)
    before = {id(p): p.grad.clone() for p in model.parameters()}
    norm, compression_norm = (norm.item() for norm in clip(model, 1.0))
    of_both = [[p.grad for p in model.parameters() if (id(p) in f_c) == own] for own in (False, True)]
    assert norm == pytest.approx(1e-6 * sum(g.numel() for g in of_both[0]) ** 0.5)
    assert compression_norm == pytest.approx(3 * sum(g.numel() for g in of_both[1]) ** 0.5)
    assert all(torch.equal(p.grad, before[id(p)]) for p in model.parameters() if id(p) not in f_c)
    assert torch.cat([g.flatten() for g in of_both[1]]).norm() == pytest.approx(1.0, rel=1e-4)
