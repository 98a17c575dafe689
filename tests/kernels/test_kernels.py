"""Every kernel against the naive one, and the naive one against the definition, one score at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from memformers.kernels import absorbed, blocked, dispatch, naive, single
from tests.kernels.against_naive import DEVICE, compare, first_keys, leaves, tensors

# (B, H, S, K, E): prime and different, and the edges: no memory, one query, one of everything.
EDGES = [(2, 3, 5, 11, 7), (3, 2, 7, 7, 5), (5, 3, 1, 13, 2), (1, 1, 1, 1, 1)]
BLOCKS = [
    (2, 3, 293, 431, 5),
    (1, 2, 521, 1031, 3),
    (7, 5, 17, 23, 11),
    (2, 3, 16, 32, 5),
    (1, 2, 300, 310, 3),
]
"""Several blocks of queries, and blocks of several heads."""
TILES = [(1, 2, 37, 83, 7), (2, 1, 67, 67, 32), (1, 1, 41, 97, 64), (1, 1, 19, 43, 128)]
"""Several tiles of queries and of keys with ragged ends, and heads of all widths."""
SIZES = {
    "naive": {torch.float64: [*EDGES, (2, 3, 7, 11, 5)], torch.bfloat16: EDGES[:1]},
    "absorbed": {torch.float64: [*EDGES, (3, 2, 5, 7, 5)]},
    "single": {torch.float64: [(5, 2, 1, 13, 3), (3, 2, 1, 2, 5), (1, 1, 1, 1, 1)]},
    "blocked": {dtype: [*EDGES, *BLOCKS] for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    "fused": {
        torch.float32: [*EDGES, *TILES],
        torch.bfloat16: [EDGES[0], TILES[1], (1, 1, 71, 139, 64), (1, 1, 67, 131, 128), (1, 1, 35, 41, 200)],
        torch.float16: [(1, 1, 71, 139, 64)],
    },
}
FROM_KEY_START = SIZES | {
    "fused": {
        torch.float32: [(3, 2, 5, 11, 7), (5, 1, 1, 13, 2), (3, 1, 37, 83, 7)],
        torch.bfloat16: [(3, 1, 67, 139, 5)],
    }
}
"""The sizes in which queries see the keys from another one on."""


def one_score_at_a_time(query, key, value, r, u, v=None, s=None, mask=None, key_start=None):
    """The definition."""
    (B, H, S, E), K = query.shape, key.shape[2]
    out = torch.zeros_like(query)
    for b in range(B):
        for h in range(H):
            for i in range(S):
                scores = {}
                for j in range(0 if key_start is None else key_start[b, i], K):
                    d = K - S + i - j
                    if d >= 0 and (mask is None or mask.expand(B, H, S, K)[b, h, i, j]):
                        score = (query[b, h, i] + u[h]) @ key[b, h, j]
                        score = score + (query[b, h, i] + (v[h] if v is not None else 0)) @ r[h, d]
                        score = score + (s[h, d] if s is not None else 0)
                        scores[j] = score / math.sqrt(E)
                weights = torch.stack(list(scores.values())).softmax(0)
                out[b, h, i] = weights @ value[b, h, list(scores)]
    return out


def of_inputs(query, past, segment, w_key, w_value, **terms):
    """The naive kernel over the keys and values that the absorbed one doesn't compute."""
    context = torch.cat((past, segment))
    key, value = (torch.einsum("jbd,hed->bhje", context, w) for w in (w_key, w_value))
    return naive.relative_attention(query, key, value, **terms)


def over_a_cache(query, key, value, r, u, v=None, s=None, key_start=None):
    """The kernel of a single query, whose keys are in two ranges of a buffer, among others."""
    K, scale, cut = key.shape[2], math.sqrt(query.shape[-1]), key.shape[2] // 3
    columns = [slice(1, 1 + cut), slice(3 + cut, 3 + K)]

    def buffer(x):
        parts = F.pad(x[:, :, :cut], (0, 0, 1, 2), value=1.0), F.pad(x[:, :, cut:], (0, 0, 0, 1), value=1.0)
        return torch.cat(parts, dim=2)

    terms = {name: x[:, None] / scale for name, x in (("u", u), ("v", v)) if x is not None}
    if s is not None:
        terms["s"] = F.pad(s.flip(1)[:, None] / scale, (2, 0), value=1.0)
    longer = F.pad(r.flip(1), (0, 0, 2, 0), value=1.0)
    inputs = query / scale, buffer(key), buffer(value).mT, longer
    return single.relative_attention(*inputs, columns, **terms, key_start=key_start)


def check(name, dtype, size, bounded=False, without="", autocast=False):
    """Compare the kernel of this name with what it must equal, where queries see all keys or, ``bounded``,
    those from another one on; with ``autocast``, where the terms of distances stay in float32."""
    device = DEVICE if name == "fused" else "cpu"
    inputs, law = tensors(*size, dtype, device), naive.relative_attention
    if name == "fused":
        pytest.importorskip("triton", reason="Triton is not installed")
        from memformers.kernels import fused

        kernel = fused.relative_attention
    elif name == "naive":
        kernel, law = naive.relative_attention, one_score_at_a_time
    elif name == "absorbed":
        kernel, law = absorbed.relative_attention, of_inputs
        (B, H, S, K, E), D = size, 13
        own = {"past": (K - S, B, D), "segment": (S, B, D), "w_key": (H, E, D), "w_value": (H, E, D)}
        inputs = leaves({n: tuple(t.shape) for n, t in inputs.items()} | own, dtype)
        del inputs["key"], inputs["value"]
    else:
        kernel = {"blocked": blocked.relative_attention, "single": over_a_cache}[name]
    inputs = {name: t for name, t in inputs.items() if name not in without}
    if autocast:
        terms = {name: inputs[name].detach().float().requires_grad_() for name in "rsuv"}
        inputs, kernel = inputs | terms, torch.autocast(device, dtype)(kernel)
    B, _, S, K, _ = size
    compare(kernel, inputs, dtype, first_keys(B, S, K, device) if bounded else None, law)


@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
@pytest.mark.parametrize(
    ("name", "dtype", "size", "bounded"),
    [
        (name, dtype, size, sizes is FROM_KEY_START)
        for sizes in (SIZES, FROM_KEY_START)
        for name in sizes
        for dtype in sizes[name]
        for size in sizes[name][dtype]
    ],
)
def test_a_kernel_equals_the_law_in_output_and_every_gradient(name, dtype, size, bounded):
    check(name, dtype, size, bounded)


@pytest.mark.parametrize("without", ["vs", "s", "v"])
@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_equals_the_law_in_either_scheme_of_positions(name, without):
    dtype = next(iter(SIZES[name]))
    check(name, dtype, SIZES[name][dtype][0], without=without)


@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
@pytest.mark.parametrize("name", dispatch.SUPPORT)
def test_scores_are_in_float32_under_autocast(name):
    check(name, torch.bfloat16, (2, 3, 5, 11, 8), autocast=True)
