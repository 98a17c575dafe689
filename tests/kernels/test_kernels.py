"""Every kernel against the naive one, and that against the definition; which kernel is chosen."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from memformers import RelativeMultiHeadAttention
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
    B, H, S, E = query.shape
    K = key.shape[2]
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
    B, _, S, K, _ = size
    kernel = kernel_named(name)
    reference = one_score_at_a_time if name == "naive" else naive.relative_attention
    inputs = random_inputs(*size, dtype)
    for term in without:
        del inputs[term]
    if autocast:
        kernel = torch.autocast("cpu", dtype)(kernel)
        for term in "rsuv":
            inputs[term] = inputs[term].detach().float().requires_grad_()
    key_start = first_keys(B, S, K) if bounded else None
    # Sums over queries of a gradient that PyTorch rounds to bfloat16: of few, the errors don't average out.
    ignored = "uvs" if name == "sdpa" and dtype == torch.bfloat16 and B * S < 256 else ""
    compare(kernel, inputs, dtype, key_start, reference, ignored)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_a_kernel_equals_the_reference(name, dtype, size, bounded):
    """In output and every gradient."""
    check(name, dtype, size, bounded)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("without", ["vs", "s", "v"])
def test_a_kernel_equals_the_reference_in_either_position_scheme(name, without):
    first_dtype = next(iter(SIZES[name]))
    check(name, first_dtype, EDGES[0], without=without)


@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_equals_the_reference_under_autocast(name):
    check(name, torch.bfloat16, (2, 3, 5, 11, 8), autocast=True)


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
def test_a_mask_hides_keys_beside_those_before_the_first(name, bounded):
    inputs = random_inputs(2, 3, 4, 6, 5, torch.float64)
    mask = causal_mask(4, 6, "cpu").repeat(2, 1, 1, 1)
    mask[0, 0, 1, 1:3] = False
    mask[1, 0, 2, :3] = False
    key_start = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]]) if bounded else None
    kernel = partial(kernel_named(name), mask=mask)
    reference = partial(one_score_at_a_time, mask=mask)
    compare(kernel, inputs, torch.float64, key_start, reference)


@pytest.mark.parametrize("name", ["naive", "blocked", "sdpa"])
def test_one_graph_of_torch_compile_gives_what_a_kernel_gives(name):
    kernel = kernel_named(name)
    inputs = random_inputs(2, 3, 5, 11, 7, torch.float64)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    compare(compiled, inputs, torch.float64, first_keys(2, 5, 11), kernel)


@pytest.mark.parametrize("name", ["naive", "blocked", "sdpa"])
def test_a_stream_changes_no_bit_of_the_others(name):
    """Neither by its numbers, finite or not, nor by where its document begins."""
    kernel = kernel_named(name)
    inputs = random_inputs(3, 2, 5, 17, 3, torch.float32)
    start = torch.tensor([[2] * 5, [0] * 5, [11] * 5])
    later_start = torch.tensor([[2] * 5, [7] * 5, [11] * 5])
    broken = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    for name in ("query", "key", "value"):
        broken[name][1] = math.nan
    with torch.no_grad():
        plain = kernel(**inputs, key_start=start)
        changed = (kernel(**inputs, key_start=later_start), kernel(**broken, key_start=start))
    for output in changed:
        assert torch.equal(output[::2], plain[::2])
        assert not torch.equal(output[1], plain[1])


@pytest.mark.parametrize("name", ["naive", "blocked"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_hidden_key_is_selected_away_even_if_it_is_not_finite(name, number):
    """Its value must be finite, as it is after a reset, since it meets a probability of 0."""
    kernel = kernel_named(name)
    inputs = random_inputs(2, 1, 5, 11, 3, torch.float32)
    key_start = torch.full((2, 5), 4)
    plain = kernel(**inputs, key_start=key_start)
    with torch.no_grad():
        inputs["key"][0, :, 2] = number
    assert torch.equal(kernel(**inputs, key_start=key_start), plain)


def attention(kernel):
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel))


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that are called."""
    names = []

    def watch(name, module):
        kernel = module.relative_attention

        def watched(*arguments, **named):
            names.append(name)
            return kernel(*arguments, **named)

        monkeypatch.setattr(module, "relative_attention", watched)

    watch("naive", naive)
    watch("blocked", blocked)
    watch("sdpa", sdpa)
    return names


def attend(module, S, device="cpu", mask=None):
    x = torch.randn(S, 1, 8, device=device)
    module.to(device)(query=x, key=x, value=x, mask=mask)


def test_auto_takes_a_kernel_by_size_and_device(called):
    """Blocked for large attention on a CPU, and sdpa on other devices."""
    attend(attention("auto"), 5)
    attend(attention("auto"), 1100)
    attend(attention("naive"), 1100)
    attend(attention("auto"), 5, device="meta")
    assert called == ["naive", "blocked", "naive", "sdpa"]


def test_auto_takes_no_blocked_kernel_for_a_mask(called):
    attend(attention("auto"), 1100, mask=causal_mask(1100, 1100, "cpu")[:, :, None])
    attend(RelativeMultiHeadAttention(2, 8, 0.5), 1100)
    assert called == ["naive", "blocked"]


def test_the_blocked_kernel_refuses_a_mask():
    with pytest.raises(ValueError, match=r"kernel='blocked' .*takes no mask"):
        attend(attention("blocked"), 5, mask=causal_mask(5, 5, "cpu")[:, :, None])


def test_the_blocked_kernel_refuses_other_devices():
    with pytest.raises(ValueError, match=r"kernel='blocked' .*the model is on meta"):
        attend(attention("blocked"), 5, device="meta")


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_KERNEL", "sdpa")
    assert attention("auto").kernel == "sdpa"
    assert attention("naive").kernel == "naive"
    monkeypatch.setenv("MEMFORMERS_KERNEL", "quick")
    with pytest.raises(ValueError, match=r"MEMFORMERS_KERNEL.*quick"):
        attention("auto")
