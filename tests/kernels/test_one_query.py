"""Attention of one query over transposed keys, against the naive kernel."""

import pytest
import torch

from memformers.kernels import naive
from memformers.kernels.one_query import attend_one_query
from tests.kernels.against_naive import TOLERANCE, compare, first_keys, random_inputs

# (B, H, K, E): prime and different, and the edges: one of everything, no memory.
SIZES = [(5, 3, 13, 2), (2, 3, 431, 7), (7, 2, 1, 5), (1, 1, 1, 1)]
WITHOUT = {"learned": "v", "sinusoidal": "s", "both": ""}


def one_query(query, key, value, r, **terms):
    return attend_one_query(query, key.mT, value, r.flip(1).mT, **terms)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("positions", WITHOUT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_one_query_equals_naive_in_output_and_every_gradient(size, dtype, positions, bounded):
    B, H, K, E = size
    inputs = random_inputs(B, H, 1, K, E, dtype)
    inputs = {name: x for name, x in inputs.items() if name not in WITHOUT[positions]}
    compare(one_query, inputs, dtype, first_keys(B, 1, K) if bounded else None)


@pytest.mark.parametrize("bounded", [False, True])
@torch.no_grad()
def test_keys_of_a_cache_need_no_copy(bounded):
    """A part of a longer cache, by its newest keys and shortest distances, as a window has it."""
    inputs = random_inputs(2, 3, 1, 17, 5, torch.float64)
    key_start = torch.tensor([[0], [7]]) if bounded else None
    longer = {name: inputs[name] for name in ("query", "u", "v")}
    part = {name: inputs[name][:, :, 4:] for name in ("key", "value")}
    r_descending = inputs["r"].flip(1).mT.contiguous()
    attended = attend_one_query(
        key=part["key"].contiguous().mT, value=part["value"], r_descending=r_descending[..., -13:],
        key_start=key_start, **longer,
    )  # fmt: skip
    expected = naive.relative_attention(**longer, **part, r=inputs["r"][:, :13], key_start=key_start)
    torch.testing.assert_close(attended, expected, rtol=0, atol=TOLERANCE[torch.float64])


@torch.no_grad()
def test_nan_in_a_hidden_key_changes_nothing():
    """Its value must be finite, since it meets a probability of 0."""
    inputs = random_inputs(2, 3, 1, 11, 5, torch.float32)
    key_start = torch.tensor([[4], [7]])
    plain = one_query(**inputs, key_start=key_start)
    inputs["key"][:, :, :4] = torch.nan
    assert torch.equal(one_query(**inputs, key_start=key_start), plain)
