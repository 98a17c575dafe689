"""Every kernel against the naive one, and the naive one against the definition, one score at a time."""

import math
from itertools import product

import pytest
import torch

from memformers.kernels import dispatch, naive
from memformers.kernels.naive import causal_mask
from memformers.kernels.self_test import random_inputs
from tests.kernels.against_naive import compare, compare_dropout, first_keys, kernel_named

# (B, H, S, K, E): prime and different, and the edges: one query, one of everything, no memory.
EDGES = [(2, 3, 5, 11, 7), (5, 3, 1, 13, 2), (1, 1, 1, 1, 1), (3, 2, 7, 7, 5)]
BLOCKS = [(2, 3, 293, 431, 5), (1, 2, 521, 1031, 3), (7, 5, 17, 23, 11)]
BLOCKS += [(2, 3, 16, 32, 5), (1, 2, 300, 310, 3)]
"""Several blocks of queries, and blocks of several heads."""
TILES = [(1, 1, 37, 83, 7), (2, 2, 67, 67, 32), (1, 1, 41, 97, 64), (1, 1, 19, 43, 128)]
"""Several tiles of queries and of keys with ragged ends, and heads of all widths."""
TINY = (1, 1, 3, 5, 2)
SIZES = {
    "naive": {torch.float64: EDGES, torch.bfloat16: EDGES[:1]},
    "blocked": {dtype: [*EDGES, *BLOCKS] for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    "fused": {
        torch.float32: [*EDGES, *TILES],
        torch.bfloat16: [EDGES[0], TILES[1], (1, 1, 71, 139, 64), (1, 1, 67, 131, 128), (1, 1, 35, 41, 200)],
        torch.float16: [(1, 1, 71, 139, 64)],
    },
}
QUICK = {(torch.float32, EDGES[0], True), (torch.float32, EDGES[2], False), (torch.float32, TILES[0], True)}
"""What the fused kernel's interpreter does in a few seconds."""
CASES = [
    pytest.param(*case, marks=[pytest.mark.long] * (case[0] == "fused" and case[1:] not in QUICK))
    for name, of_kernel in SIZES.items()
    for dtype, sizes in of_kernel.items()
    for case in product([name], [dtype], sizes, (False, True))
]


def one_score_at_a_time(query, key, value, r, u, v=None, s=None, mask=None, key_start=None):
    """The definition."""
    (B, H, S, E), K = query.shape, key.shape[2]
    out = torch.zeros_like(query)
    for b, h, i in product(range(B), range(H), range(S)):
        scores = {}
        for j in range(0 if key_start is None else key_start[b, i], K - S + i + 1):
            d = K - S + i - j
            if mask is None or mask.expand(B, H, S, K)[b, h, i, j]:
                score = (query[b, h, i] + u[h]) @ key[b, h, j]
                score = score + (query[b, h, i] + (v[h] if v is not None else 0)) @ r[h, d]
                scores[j] = (score + (s[h, d] if s is not None else 0)) / math.sqrt(E)
        out[b, h, i] = torch.stack(list(scores.values())).softmax(0) @ value[b, h, list(scores)]
    return out


def check(name, dtype, size, bounded=False, without="", autocast=False):
    """Compare the kernel of this name with what it must equal, where queries see all keys or, ``bounded``,
    those from another one on; with ``autocast``, where the terms of distances stay in float32."""
    (kernel, device), (B, _, S, K, _) = kernel_named(name), size
    reference = one_score_at_a_time if name == "naive" else naive.relative_attention
    inputs = {n: t for n, t in random_inputs(*size, dtype, device).items() if n not in without}
    if autocast:
        terms = {name: inputs[name].detach().float().requires_grad_() for name in "rsuv"}
        inputs, kernel = inputs | terms, torch.autocast(device, dtype)(kernel)
    compare(kernel, inputs, dtype, first_keys(B, S, K, device) if bounded else None, reference)


@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
@pytest.mark.parametrize(("name", "dtype", "size", "bounded"), CASES)
def test_a_kernel_equals_the_reference_in_output_and_every_gradient(name, dtype, size, bounded):
    check(name, dtype, size, bounded)


@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
@pytest.mark.parametrize(
    ("name", "without"),
    [(name, without) for name in SIZES for without in ("vs", "s", "v")]
    + [(name, "autocast") for name in dispatch.SUPPORT],
)
def test_a_kernel_equals_the_reference_in_either_scheme_of_positions_and_under_autocast(name, without):
    if without == "autocast":
        check(name, torch.bfloat16, TINY if name == "fused" else (2, 3, 5, 11, 8), autocast=True)
    else:
        check(name, next(iter(SIZES[name])), TINY if name == "fused" else EDGES[0], without=without)


@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("naive", torch.float64, (2, 3, 7, 11, 5)),
        ("blocked", torch.bfloat16, (2, 3, 7, 11, 11)),
        ("fused", torch.float32, (2, 1, 5, 11, 11)),
        pytest.param("fused", torch.float32, (3, 1, 37, 67, 67), marks=pytest.mark.long),
        pytest.param("fused", torch.bfloat16, (1, 2, 71, 103, 103), marks=pytest.mark.long),
    ],
)
def test_dropout_drops_the_same_probabilities_in_all_passes(name, dtype, size, bounded):
    kernel, device = kernel_named(name)
    compare_dropout(kernel, random_inputs(*size, dtype, device), dtype, bounded)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_mask_hides_keys_beside_those_that_come_before_the_first(bounded):
    inputs, mask = random_inputs(2, 3, 4, 6, 5, torch.float64), causal_mask(4, 6, "cpu").repeat(2, 1, 1, 1)
    mask[0, 0, 1, 1:3] = mask[1, 0, 2, :3] = False
    bounds = {"mask": mask, "key_start": torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]]) if bounded else None}
    compare(lambda key_start, **inputs: naive.relative_attention(**inputs, **bounds), inputs, torch.float64,
            reference=lambda key_start, **inputs: one_score_at_a_time(**inputs, **bounds))  # fmt: skip
