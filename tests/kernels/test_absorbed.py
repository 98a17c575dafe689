"""Attention without keys and values, against the naive kernel with them."""

import math

import pytest
import torch

from memformers import CoreConfig, MemoryCore
from memformers.kernels import absorbed, naive
from tests.builders import fill_zeros
from tests.kernels.against_naive import compare, first_keys, random_inputs

# (B, H, S, K, E, D): prime and different, and the edges: one query, one of everything, no memory.
SIZES = [(2, 3, 5, 29, 7, 11), (5, 3, 1, 13, 2, 6), (1, 1, 1, 1, 1, 1), (3, 2, 7, 7, 5, 10)]
WITHOUT = {"learned": "v", "sinusoidal": "s", "both": ""}


def absorbed_attention(query, z, r, **terms):
    n_past = z.shape[1] - query.shape[2]
    return absorbed.relative_attention(query, z[:, :n_past], z[:, n_past:], r, **terms)


def with_keys_and_values(query, z, r, *, w_key, w_value, **terms):
    key = torch.einsum("bkd,hed->bhke", z, w_key)
    value = torch.einsum("bkd,hed->bhke", z, w_value)
    return naive.relative_attention(query, key, value, r, **terms)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("positions", WITHOUT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_absorbed_equals_naive_in_output_and_every_gradient(size, dtype, positions, bounded):
    B, H, S, K, E, D = size
    inputs = random_inputs(B, H, S, K, E, dtype)
    omitted = {"key", "value", WITHOUT[positions]}
    inputs = {name: x for name, x in inputs.items() if name not in omitted}
    draw = torch.Generator().manual_seed(5)
    shapes = {"z": (B, K, D), "w_key": (H, E, D), "w_value": (H, E, D)}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(D)
        inputs[name] = x.to(dtype).requires_grad_()
    key_start = first_keys(B, S, K) if bounded else None
    compare(absorbed_attention, inputs, dtype, key_start, with_keys_and_values)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_short_segments_learn_as_with_the_naive_kernel(positions, token_shift):
    outputs = []
    gradients = []
    for kernel in ("auto", "naive"):
        torch.manual_seed(0)
        core = MemoryCore(
            CoreConfig(
                "compressive", d_input=16, d_model=32, n_heads=2, d_ff=32, n_layers=2, segment_len=4,
                mem_len=16, c_mem_len=8, compression_rate=2, positions=positions, kernel=kernel,
                token_shift=token_shift,
            )
        )  # fmt: skip
        fill_zeros(core)
        memory = None
        starts = torch.zeros(4, 3, dtype=torch.bool)
        starts[2, 1] = True
        for x in torch.randn(9, 4, 3, 16, generator=torch.Generator().manual_seed(1)):
            output, memory, loss = core(x, memory, starts)
        (output.square().sum() + loss).backward()
        outputs.append(output.detach())
        gradients.append([p.grad for p in core.parameters()])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
