import copy

import pytest
import torch
from torch import nn

from memformers.models.language_model import MemoryLM
from memformers.training.optimizers import COEFFICIENTS, STEPS, Muon, build_optimizers, orthogonalized
from tests.builders import MODELS, small_training


def quintic(x):
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 7, 5), (1, 4, 4), (2, 1, 6)])
def test_orthogonalizing_applies_the_quintic_to_the_singular_values(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, sigma, v = torch.linalg.svd(matrices, full_matrices=False)
    expected = u @ (quintic(sigma / sigma.norm(dim=1, keepdim=True))[:, :, None] * v)
    torch.testing.assert_close(orthogonalized(matrices), expected, rtol=1e-9, atol=1e-9)


def test_a_gradient_of_zeros_changes_nothing():
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    Muon([weight], lr=0.1).step()
    assert torch.equal(weight, torch.ones(3, 4))


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
    others = copy.deepcopy(weights)
    rounding = copy.deepcopy(weights)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": weight_decay}
    ours = steps_of(Muon(weights, **settings), weights)
    rounded = steps_of(Muon(rounding, **settings, dtype=torch.bfloat16), rounding)
    theirs = torch.optim.Muon(others, lr=0.02, momentum=0.9, weight_decay=weight_decay)
    steps = zip(copy.deepcopy(others), ours, rounded, steps_of(theirs, others), strict=True)
    for before, precise, half, reference in steps:
        for ours in (precise, half):
            assert (ours - reference).norm() < 0.03 * (reference - before).norm()
        assert not torch.equal(precise, half)


def test_matrices_of_one_shape_learn_as_if_each_were_alone():
    together = [nn.Parameter(torch.randn(5, 3, dtype=torch.float64)) for _ in range(3)]
    alone = copy.deepcopy(together)
    for weight, other in zip(together, alone, strict=True):
        weight.grad = torch.randn(5, 3, dtype=torch.float64)
        other.grad = weight.grad.clone()
    Muon(together, lr=0.1, weight_decay=0.1).step()
    for weight, other in zip(together, alone, strict=True):
        Muon([other], lr=0.1, weight_decay=0.1).step()
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-12)


def test_adamw_takes_the_linear_maps_of_a_users_own_compression_function():
    config = small_training(model="compressive")
    lm = MemoryLM(config.model)
    for layer in lm.transformer.layers:
        layer.compress = nn.Linear(config.model.d_model, config.model.d_model)
    _, muon = build_optimizers(lm, config)
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    assert taken
    assert not any(id(layer.compress.weight) in taken for layer in lm.transformer.layers)


@pytest.mark.parametrize("model", MODELS)
def test_muon_takes_the_maps_within_layers_and_adamw_all_else(model):
    config = small_training(model=model)
    lm = MemoryLM(config.model)
    adamw, muon = build_optimizers(lm, config)
    names = {id(p): name for name, p in lm.named_parameters()}
    takes = {
        optimizer: {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in (adamw, muon)
    }
    assert takes[adamw] | takes[muon] == set(names.values())
    assert not takes[adamw] & takes[muon]
    kinds = ("query", "key", "value", "output", "position", "layer1", "layer2")
    assert takes[muon] == {
        name for name in names.values() if name.endswith(".weight") and name.split(".")[-2] in kinds
    }
