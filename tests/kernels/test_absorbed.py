"""Attention without keys and values against the naive kernel, which is given them."""

import pytest
import torch

from memformers.kernels import absorbed, naive
from tests.kernels.against_naive import first_keys

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("S", "M"), [(3, 11), (1, 7), (5, 2), (1, 1)])
@pytest.mark.parametrize("terms", [("u",), ("u", "v"), ("u", "s"), ("u", "v", "s")])
@pytest.mark.parametrize("bounded", [False, True])
def test_absorbed_equals_naive_in_output_and_every_gradient(S, M, terms, bounded):
    B, H, E, D, K = 3, 2, 5, 13, M + S
    key_start = first_keys(B, S, K) if bounded else None
    shapes = {"query": (B, H, S, E), "past": (M, B, D), "segment": (S, B, D), "r": (H, K, E)}
    shapes |= {"w_key": (H, E, D), "w_value": (H, E, D), "u": (H, E), "v": (H, E), "s": (H, K)}
    tensors = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    distance = {name: tensors[name] for name in ("r", *terms)}
    inputs = [tensors[name] for name in ("query", "past", "segment", "w_key", "w_value")]

    got = absorbed.relative_attention(*inputs, **distance, key_start=key_start)
    context = torch.cat((tensors["past"], tensors["segment"]))
    key = torch.einsum("jbd,hed->bhje", context, tensors["w_key"])
    value = torch.einsum("jbd,hed->bhje", context, tensors["w_value"])
    wanted = naive.relative_attention(tensors["query"], key, value, **distance, key_start=key_start)

    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    weight, learning = torch.randn_like(got), [*inputs, *distance.values()]
    got_grads = torch.autograd.grad(got, learning, weight)
    wanted_grads = torch.autograd.grad(wanted, learning, weight)
    for a, b in zip(got_grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
