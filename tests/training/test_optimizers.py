import copy

import pytest
import torch
from torch import nn

from memformers.common.fields import replace_nested
from memformers.models.language_model import MemoryLM
from memformers.training.optimizers import (
    Muon,
    build_optimizers,
    learning_rate_schedule,
    orthogonalized_in_cache,
)
from tests.builders import MODELS, small_training


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [("linear", (0.5, 1, 0.5, 0.25, 0)), ("constant", (0.5, 1, 1, 1, 1)), ("wsd", (0.5, 1, 1, 1, 0)),
     ("cosine", (0.5, 1, 0.5, (1 - 0.5**0.5) / 2, 0))],
)  # fmt: skip
def test_learning_rates_rise_and_go_on_as_the_schedule_says(schedule, parts):
    config = small_training(schedule=schedule, warmup_fraction=0.2)
    rate = learning_rate_schedule(config, 10_000)
    rates = [rate(at) for at in (0, 1_000, 2_000, 6_000, 8_000, 10_000, 20_000)]
    assert rates == pytest.approx([0, *parts, parts[-1]])
    assert learning_rate_schedule(replace_nested(config, warmup_fraction=0.0), 1_000)(0) == 1.0


def steps_of(optimizer, weights, count=4):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_steps_are_those_of_pytorchs_muon(weight_decay):
    """Which rounds to bfloat16 within a step, so that its direction is precise to some 1e-2 alone, as is ours
    where it is asked to."""
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(6, 9), (9, 6), (6, 9), (5, 5)]]
    others, rounding = copy.deepcopy(weights), copy.deepcopy(weights)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": weight_decay}
    before = [weight.detach().clone() for weight in weights]
    ours = steps_of(Muon(weights, **settings), weights)
    rounded = steps_of(Muon(rounding, **settings, dtype=torch.bfloat16), rounding)
    theirs = torch.optim.Muon(others, lr=0.02, momentum=0.9, weight_decay=weight_decay)
    for start, precise, half, reference in zip(before, ours, rounded, steps_of(theirs, others), strict=True):
        for update in (precise, half):
            assert (update - reference).norm() < 0.03 * (reference - start).norm()
        assert not torch.equal(precise, half)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (7, 13), (400, 350)])
def test_matrices_are_orthogonalized_as_each_one_alone(shape):
    """With so many of each shape that a CPU computes them in several parts, the last one smaller."""
    matrices = torch.randn(45 if shape[0] < 400 else 3, *shape)
    for matrix, orthogonal in zip(matrices, orthogonalized_in_cache(matrices), strict=True):
        x = (matrix / matrix.norm()).double()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
        torch.testing.assert_close(orthogonal.double(), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_muon_has_matrices_of_layers_adamw_the_rest(model):
    config = small_training(model=model)
    lm = MemoryLM(config.model)
    names = {id(p): name for name, p in lm.named_parameters()}

    def groups(optimizer):
        return [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]

    (adamw,) = map(groups, build_optimizers(lm, replace_nested(config, optimizer="adamw")))
    (decaying, others), (muon,) = map(groups, build_optimizers(lm, config))
    kinds = ("query", "key", "value", "output", "position", "layer1", "layer2")
    assert muon == {n for n in names.values() if n.endswith(".weight") and n.split(".")[-2] in kinds}
    assert adamw == [muon | decaying, others]
    assert decaying | others == set(names.values()) - muon
    assert decaying == {n for n in names.values() if n == "head.weight" or n.endswith("f_c.conv.weight")}
