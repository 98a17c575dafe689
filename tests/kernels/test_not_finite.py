"""NaN and infinity reach what sees them, and nothing else."""

import math
from itertools import product

import pytest
import torch

from memformers.kernels import blocked, naive
from memformers.kernels.blocked import tiling
from memformers.kernels.naive import causal_mask, from_key_start
from memformers.kernels.self_test import random_inputs
from tests.kernels.against_naive import kernel_named

B, H, S, K, E = 2, 1, 5, 11, 3
KERNELS = ["naive", "compiled", "blocked", "blocks", "blocks, computed twice", "fused"]
SLOW, FUSED = ("compiled", "fused"), ("fused", "key_start", 3)
"""Kernels, of which Triton's interpreter does one case in a few seconds."""


@pytest.fixture
def kernel(request, monkeypatch):
    """The naive kernel also as torch.compile reads it, and the blocked one with several blocks."""
    name, _, twice = request.param.partition(", ")
    if name == "compiled":
        return torch.compile(naive.relative_attention, backend="aot_eager", fullgraph=True), "cpu"
    if name == "blocks":
        monkeypatch.setattr(tiling, "QUERIES", 2)
        monkeypatch.setattr(tiling, "WORKSPACE", 100)
        monkeypatch.setattr(blocked, "KEPT", 0 if twice else blocked.KEPT)
    return kernel_named("blocked" if name == "blocks" else name)


def gradients(kernel, inputs, grad, **options):
    out = kernel(**inputs, **options)
    return [out, *torch.autograd.grad(out, list(inputs.values()), grad)]


def with_numbers(inputs, number, *places):
    changed = {name: t.detach().clone() for name, t in inputs.items()}
    for name, index in places:
        changed[name][index] = number
    return {name: t.requires_grad_() for name, t in changed.items()}


@pytest.mark.parametrize(
    ("kernel", "hiding", "at"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[0] in SLOW and case != FUSED))
     for case in product(KERNELS, ("causal", "key_start", "mask"), (3, 8))
     if case[1] != "mask" or case[0] in ("naive", "compiled")],
    indirect=["kernel"],
)  # fmt: skip
def test_a_key_that_is_not_finite_reaches_only_the_queries_that_see_it(kernel, hiding, at):
    """It is of the first stream's memory, or a query's own."""
    compute, device = kernel
    inputs, own = random_inputs(B, H, S, K, E, torch.float32, device), torch.arange(K - S, K)
    visible, options = causal_mask(S, K, "cpu").repeat(B, 1, 1, 1), {}
    if hiding == "key_start":
        options[hiding] = torch.stack((own.clamp_max(at + 1), own - 1))
        visible &= from_key_start(options[hiding], K)
    if hiding == "mask":
        visible[0, 0, own != at, at] = False
        options[hiding] = visible
    sees = visible[0, 0, :, at]
    options, grad = {n: t.to(device) for n, t in options.items()}, torch.randn(B, H, S, E).to(device)
    wanted = gradients(compute, inputs, grad, **options)
    for name, number in (("key", math.nan), ("key", -math.inf), ("value", math.inf)):
        got = gradients(compute, with_numbers(inputs, number, (name, (0, 0, at, 1))), grad, **options)
        for a, b in zip(got[:2], wanted[:2], strict=True):  # the output and the gradient of the queries
            assert a[0][:, sees].isnan().all()
            assert torch.equal(a[0][:, ~sees], b[0][:, ~sees])
            assert torch.equal(a[1], b[1])
        assert sees.any() or all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(k, marks=[pytest.mark.long] * (k in SLOW)) for k in KERNELS if k != "compiled"],
    indirect=True,
)
def test_what_a_stream_sees_changes_no_bit_of_the_others(kernel):
    """Its numbers, its gradient, and the beginning of its document."""
    compute, device = kernel
    inputs, grad = random_inputs(3, 1, 5, 17, 3, torch.float32, device), torch.randn(3, 1, 5, 3)
    start, later = (torch.tensor([[0] * S, [begin] * S, [11] * S]).to(device) for begin in (0, 7))
    broken = with_numbers(inputs, math.nan, *((name, 1) for name in ("query", "key", "value")))
    worse = grad.index_fill(0, torch.tensor(1), math.nan)
    changed = (inputs, grad, later), (broken, grad, start), (inputs, worse, start)
    first, *others = (  # the output, and the gradients of query, key and value
        gradients(compute, numbers, g.to(device), key_start=begin)[:4]
        for numbers, g, begin in ((inputs, grad, start), *changed)
    )
    for other in others:
        assert all(torch.equal(a[::2], b[::2]) for a, b in zip(first, other, strict=True))
        assert not torch.equal(first[1][1], other[1][1])
