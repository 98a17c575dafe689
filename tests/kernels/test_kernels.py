"""Every kernel against the naive one, and that against the definition; which kernel is chosen."""

import math
from itertools import product

import pytest
import torch

from memformers import RelativeMultiHeadAttention, kernels
from memformers.kernels import blocked, naive, sdpa
from memformers.kernels.naive import causal_mask
from tests.builders import fill_zeros
from tests.kernels.against_naive import compare, compare_dropout, first_keys, kernel_named, random_inputs

# (B, H, S, K, E): prime and different, and the edges: one query, one of everything, no memory.
EDGES = [(2, 3, 5, 11, 7), (5, 3, 1, 13, 2), (1, 1, 1, 1, 1), (3, 2, 7, 7, 5)]
BLOCKS = [(2, 3, 293, 431, 5), (1, 2, 521, 1031, 3), (7, 5, 17, 23, 11)]
BLOCKS += [(2, 3, 16, 32, 5), (1, 2, 300, 310, 3)]
"""Several blocks of queries, and blocks of several heads."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SIZES = {
    "naive": {torch.float64: EDGES, torch.bfloat16: EDGES[:1]},
    "blocked": {dtype: [*EDGES, *BLOCKS] for dtype in DTYPES},
    "sdpa": {dtype: [*EDGES, *BLOCKS] for dtype in DTYPES[:2]}
    # In half precision, PyTorch's attention itself rounds more than the tolerance for 3 features a head.
    | {torch.bfloat16: [size for size in [*EDGES, *BLOCKS, (1, 2, 300, 310, 64)] if size[-1] != 3]},
}
CASES = [(name, dtype, size) for name, sizes in SIZES.items() for dtype in sizes for size in sizes[dtype]]


def one_score_at_a_time(query, key, value, r, u, v=None, s=None, mask=None, key_start=None):
    """The definition."""
    (B, H, S, E), K = query.shape, key.shape[2]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
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
    kernel, (B, _, S, K, _) = kernel_named(name), size
    reference = one_score_at_a_time if name == "naive" else naive.relative_attention
    inputs = {n: t for n, t in random_inputs(*size, dtype).items() if n not in without}
    if autocast:
        terms = {name: inputs[name].detach().float().requires_grad_() for name in "rsuv"}
        inputs, kernel = inputs | terms, torch.autocast("cpu", dtype)(kernel)
    # Sums over queries of a gradient that PyTorch rounds to bfloat16: of few, the errors don't average out.
    ignored = "uvs" if name == "sdpa" and dtype == torch.bfloat16 and B * S < 256 else ""
    compare(kernel, inputs, dtype, first_keys(B, S, K) if bounded else None, reference, ignored)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_a_kernel_equals_the_reference_in_output_and_every_gradient(name, dtype, size, bounded):
    check(name, dtype, size, bounded)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("without", ["vs", "s", "v", "autocast"])
def test_a_kernel_equals_the_reference_in_either_scheme_of_positions_and_under_autocast(name, without):
    if without == "autocast":
        check(name, torch.bfloat16, (2, 3, 5, 11, 8), autocast=True)
    else:
        check(name, next(iter(SIZES[name])), EDGES[0], without=without)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [("naive", torch.float64, (2, 3, 7, 11, 5)), ("blocked", torch.bfloat16, (2, 3, 7, 11, 11)),
     ("sdpa", torch.float64, (2, 3, 7, 11, 11))],
)  # fmt: skip
def test_dropout_drops_the_same_probabilities_in_all_passes(name, dtype, size, bounded):
    compare_dropout(kernel_named(name), random_inputs(*size, dtype), dtype, bounded)


@pytest.mark.parametrize("name", ["naive", "sdpa"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_mask_hides_keys_beside_those_that_come_before_the_first(name, bounded):
    inputs, mask = random_inputs(2, 3, 4, 6, 5, torch.float64), causal_mask(4, 6, "cpu").repeat(2, 1, 1, 1)
    mask[0, 0, 1, 1:3] = mask[1, 0, 2, :3] = False
    bounds = {"mask": mask, "key_start": torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]]) if bounded else None}
    kernel = kernel_named(name)
    compare(lambda key_start, **inputs: kernel(**inputs, **bounds), inputs, torch.float64,
            reference=lambda key_start, **inputs: one_score_at_a_time(**inputs, **bounds))  # fmt: skip


@pytest.mark.parametrize("name", ["naive", "blocked", "sdpa"])
def test_one_graph_of_torch_compile_gives_what_a_kernel_gives(name):
    kernel, inputs = kernel_named(name), random_inputs(2, 3, 5, 11, 7, torch.float64)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    compare(compiled, inputs, torch.float64, first_keys(2, 5, 11), kernel)


@pytest.mark.parametrize("name", ["naive", "blocked", "sdpa"])
def test_a_stream_changes_no_bit_of_the_others(name):
    """Neither by its numbers, finite or not, nor by where its document begins."""
    kernel, inputs = kernel_named(name), random_inputs(3, 2, 5, 17, 3, torch.float32)
    start, later = (torch.tensor([[2] * 5, [begin] * 5, [11] * 5]) for begin in (0, 7))
    with torch.no_grad():
        plain = kernel(**inputs, key_start=start)
        broken = {name: t.clone() for name, t in inputs.items()}
        for name in ("query", "key", "value"):
            broken[name][1] = math.nan
        for other in (kernel(**inputs, key_start=later), kernel(**broken, key_start=start)):
            assert torch.equal(other[::2], plain[::2])
            assert not torch.equal(other[1], plain[1])


@pytest.mark.parametrize("name", ["naive", "blocked"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_hidden_key_is_selected_away_even_if_its_numbers_are_not_finite(name, number):
    """Its value must be finite, as it is after a reset, since it meets a probability of 0."""
    kernel, inputs = kernel_named(name), random_inputs(2, 1, 5, 11, 3, torch.float32)
    key_start = torch.full((2, 5), 4)
    plain = kernel(**inputs, key_start=key_start)
    with torch.no_grad():
        inputs["key"][0, :, 2] = number
    assert torch.equal(kernel(**inputs, key_start=key_start), plain)


def attention(kernel):
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel))


def test_auto_takes_blocked_for_large_attention_on_a_cpu_and_sdpa_on_other_devices(monkeypatch):
    called, x, large = [], torch.randn(5, 1, 8), torch.randn(1100, 1, 8)
    for name, home in (("naive", naive), ("blocked", blocked), ("sdpa", sdpa)):
        real = home.relative_attention
        monkeypatch.setattr(
            home, "relative_attention", lambda *a, n=name, f=real, **k: called.append(n) or f(*a, **k)
        )

    def last_called(x, module, **forward):
        module(query=x, key=x, value=x, **forward)
        return called[-1]

    assert last_called(x, attention("auto")) == "naive"
    assert last_called(large, attention("auto")) == "blocked"
    assert last_called(large, attention("naive")) == "naive"
    assert last_called(x.to("meta"), attention("auto").to("meta")) == "sdpa"
    monkeypatch.setattr(kernels, "MIN_SCORES_FOR_BLOCKED", 1)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    assert last_called(x, attention("auto"), mask=mask) == "naive"
    assert last_called(x, RelativeMultiHeadAttention(2, 8, 0.5)) == "blocked"
    assert len(called) == 6


def test_the_blocked_kernel_refuses_a_mask_and_other_devices():
    for device, masked, why in (("cpu", True, "takes no mask"), ("meta", False, "the model is on meta")):
        x = torch.randn(5, 1, 8, device=device)
        mask = causal_mask(5, 5, x.device)[:, :, None] if masked else None
        with pytest.raises(ValueError, match=f"kernel='blocked' .*{why}"):
            attention("blocked").to(device)(query=x, key=x, value=x, mask=mask)


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_KERNEL", "sdpa")
    assert (attention("auto").kernel, attention("naive").kernel) == ("sdpa", "naive")
    monkeypatch.setenv("MEMFORMERS_KERNEL", "quick")
    with pytest.raises(ValueError, match=r"MEMFORMERS_KERNEL.*quick"):
        attention("auto")
