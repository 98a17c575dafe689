"""The naive kernel in fewer operators: the same numbers, and what autograd can still do with it."""

import pytest
import torch

from memformers import MemoryLM, ModelConfig
from memformers.kernels import naive, relative_attention, small
from tests.kernels.against_naive import compare, first_keys, random_inputs

# (B, H, S, K, E): prime and different, and the edges: one query, one of everything, no memory.
SIZES = [(2, 3, 5, 11, 7), (5, 3, 1, 13, 2), (1, 1, 1, 1, 1), (3, 2, 7, 7, 5), (7, 5, 17, 23, 11)]
WITHOUT = {"learned": "v", "sinusoidal": "s", "both": "", "neither": "vs"}


def inputs_of(size, dtype, positions="both"):
    inputs = random_inputs(*size, dtype)
    return {name: x for name, x in inputs.items() if name not in WITHOUT[positions]}


def output_and_gradients(kernel, inputs, key_start):
    output = kernel(**inputs, key_start=key_start)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return output, *torch.autograd.grad(output, list(inputs.values()), weight)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("positions", WITHOUT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_small_equals_naive_in_output_and_every_gradient(size, dtype, positions, bounded):
    B, _, S, K, _ = size
    inputs = inputs_of(size, dtype, positions)
    compare(small.relative_attention, inputs, dtype, first_keys(B, S, K) if bounded else None)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_small_has_the_bits_of_naive(positions, bounded):
    size = (8, 4, 8, 16, 32)
    inputs = inputs_of(size, torch.float32, positions)
    key_start = first_keys(8, 8, 16) if bounded else None
    ours = output_and_gradients(small.relative_attention, inputs, key_start)
    expected = output_and_gradients(naive.relative_attention, inputs, key_start)
    # The gradient of keys is a product in another order of rows and columns, which a library may round
    # differently.
    for name, x, wanted in zip(("output", *inputs), ours, expected, strict=True):
        assert name == "key" or torch.equal(x, wanted), name


def test_second_derivatives_are_those_of_naive():
    inputs = inputs_of((2, 3, 5, 11, 7), torch.float64)
    results = []
    for kernel in (small.relative_attention, naive.relative_attention):
        output = kernel(**inputs)
        first = torch.autograd.grad(output.pow(3).sum(), list(inputs.values()), create_graph=True)
        total = sum(x.pow(2).sum() for x in first)
        results.append(torch.autograd.grad(total, list(inputs.values())))
    for x, wanted in zip(*results, strict=True):
        torch.testing.assert_close(x, wanted)


def test_transforms_of_functions_take_naive():
    """Forward mode, and gradients by torch.func."""
    inputs = {name: x.detach() for name, x in inputs_of((2, 3, 5, 11, 7), torch.float64).items()}

    def attend(query):
        return relative_attention(**inputs | {"query": query})

    def loss(query):
        return attend(query).pow(2).sum()

    direction = torch.randn_like(inputs["query"])
    _, derivative = torch.func.jvp(loss, (inputs["query"],), (direction,))
    gradient = torch.func.grad(loss)(inputs["query"])
    torch.testing.assert_close(derivative, (gradient * direction).sum())


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=2, segment_len=4, mem_len=4)
        model = MemoryLM(config)
        model.transformer.activation_checkpointing = checkpointing
        tokens = torch.randint(11, (4, 3))
        memory = model(tokens).memory
        model(tokens, memory).logits.pow(2).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for x, wanted in zip(*gradients, strict=True):
        assert torch.equal(x, wanted)
