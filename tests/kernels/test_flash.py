"""Sinusoidal attention by a plain flash kernel, against the naive kernel with the same distances."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memformers import MemoryLM, ModelConfig, RelativeMultiHeadAttention
from memformers.kernels import flash, naive, plain, sdpa
from memformers.kernels.naive import causal_mask
from memformers.models.sinusoids import sinusoids
from tests.builders import fill_zeros
from tests.kernels.against_naive import TOLERANCE, compare, first_keys, kept_by, random_inputs

# (B, H, S, K, E, P): prime and different, and the edges: one query, one of everything, no memory, blocks.
SIZES = [
    (2, 3, 5, 11, 7, 6),
    (5, 3, 1, 13, 2, 2),
    (1, 1, 1, 1, 1, 2),
    (3, 2, 7, 7, 5, 10),
    (2, 3, 293, 431, 5, 8),
    (1, 2, 521, 1031, 3, 4),
    (1, 2, 300, 310, 64, 16),
]


def inputs_and_table(B, H, S, K, E, P, dtype, base=10_000.0):
    """The kernel's arguments that have gradients, and the sinusoids, exact in float32 at least."""
    inputs = random_inputs(B, H, S, K, E, dtype)
    inputs = {name: inputs[name] for name in ("query", "key", "value", "u", "v")}
    draw = torch.Generator().manual_seed(4)
    w = torch.randn(H, E, P, generator=draw, dtype=torch.float64) / math.sqrt(P)
    inputs["w"] = w.to(dtype).requires_grad_()
    exact = torch.promote_types(dtype, torch.float32)
    return inputs, sinusoids(K, P, base=base).to(exact)


def reference(table, *, w, **arguments):
    """The naive kernel, with the vector of each distance d as W_R · sinusoid(d)."""
    r = torch.einsum("hep,kp->hke", w, table.to(w))
    return naive.relative_attention(**arguments, r=r)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_flash_equals_naive_in_output_and_every_gradient(size, dtype, bounded):
    inputs, table = inputs_and_table(*size, dtype)
    key_start = first_keys(size[0], *size[2:4]) if bounded else None
    compare(
        partial(flash.relative_attention, table=table), inputs, dtype, key_start, partial(reference, table)
    )


@pytest.mark.parametrize("base", [3.0, 80.0])
def test_other_wavelengths_are_exact_too(base):
    inputs, table = inputs_and_table(2, 3, 5, 11, 7, 6, torch.float64, base)
    kernel = partial(flash.relative_attention, table=table)
    compare(kernel, inputs, torch.float64, None, partial(reference, table))


def test_without_v_the_position_score_is_of_the_query_alone():
    inputs, table = inputs_and_table(2, 3, 5, 11, 7, 6, torch.float64)
    del inputs["v"]
    kernel = partial(flash.relative_attention, table=table, v=None)
    compare(kernel, inputs, torch.float64, None, partial(reference, table))


def test_a_mask_hides_keys_beside_those_before_the_first():
    inputs, table = inputs_and_table(2, 3, 4, 6, 5, 8, torch.float64)
    mask = causal_mask(4, 6, torch.device("cpu")).repeat(2, 1, 1, 1)
    mask[0, 0, 1, 1:3] = False
    key_start = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]])
    kernel = partial(flash.relative_attention, table=table, mask=mask)
    compare(kernel, inputs, torch.float64, key_start, partial(reference, table, mask=mask))


def relative_errors(kernel, inputs, wanted):
    """RMS errors of the output and of every gradient, relative to the RMS value in float64."""
    results = output_and_gradients(kernel, inputs)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)]


def output_and_gradients(kernel, inputs):
    output = kernel(**inputs)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(inputs.values()), weight.bfloat16().to(output.dtype))
    return [output.detach(), *gradients]


@pytest.mark.parametrize(
    "size", [(2, 3, 293, 431, 16, 8), (1, 2, 521, 1031, 64, 16), (4, 4, 64, 128, 32, 16)]
)
def test_bfloat16_is_as_exact_as_pytorchs_attention_with_a_bias(size):
    """Both are within 6e-3: rounding features and table adds little to what PyTorch's kernel rounds."""
    inputs, table = inputs_and_table(*size, torch.bfloat16)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted = output_and_gradients(partial(reference, table), exact)

    def with_bias(w, **arguments):
        r = torch.einsum("hep,kp->hke", w.float(), table)
        return sdpa.relative_attention(**arguments, r=r.bfloat16())

    errors = relative_errors(partial(flash.relative_attention, table=table), inputs, wanted)
    assert max(errors) <= 1.1 * max(relative_errors(with_bias, inputs, wanted))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("size", [(5, 3, 7, 13, 2, 4), (2, 3, 293, 331, 2, 6)])
def test_the_number_of_pairs_in_a_block_changes_no_bit(size, bounded, monkeypatch):
    inputs, table = inputs_and_table(*size, torch.float64)
    key_start = first_keys(size[0], *size[2:4]) if bounded else None
    kernel = partial(flash.relative_attention, table=table, key_start=key_start)
    wanted = output_and_gradients(kernel, inputs)
    for pairs in (2, 4, 8):
        monkeypatch.setattr(plain, "WORKSPACE", pairs * min(size[2], plain.QUERIES) * size[3])
        assert all(map(torch.equal, output_and_gradients(kernel, inputs), wanted))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("size", [(5, 3, 7, 13, 2, 4), (1, 2, 293, 331, 2, 6)])
def test_probabilities_that_are_computed_again_change_no_bit(size, bounded, monkeypatch):
    inputs, table = inputs_and_table(*size, torch.float32)
    key_start = first_keys(size[0], *size[2:4]) if bounded else None
    kernel = partial(flash.relative_attention, table=table, key_start=key_start)
    wanted = output_and_gradients(kernel, inputs)
    monkeypatch.setattr(plain, "MAX_KEPT", 0)
    assert all(map(torch.equal, output_and_gradients(kernel, inputs), wanted))


def test_scores_are_not_rounded_under_autocast():
    """Of a query whose keys have scores that half precision doesn't tell apart."""
    inputs, table = inputs_and_table(1, 1, 2, 3, 4, 2, torch.bfloat16)
    with torch.no_grad():
        inputs["query"].fill_(8)
        inputs["key"].copy_(torch.tensor([32.0, 32.25, 32.5])[:, None])
    exact = {name: x.detach().float() for name, x in inputs.items()}
    wanted = reference(table, **exact)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = flash.relative_attention(**inputs, table=table)
    torch.testing.assert_close(output.float(), wanted, rtol=2e-2, atol=1e-2)


def test_forward_mode_is_an_error_that_names_naive():
    inputs, table = inputs_and_table(1, 1, 3, 5, 2, 2, torch.float64)
    values = {name: x.detach() for name, x in inputs.items()}
    with pytest.raises(NotImplementedError, match="kernel='naive'"):
        torch.func.jvp(lambda x: flash.relative_attention(**x, table=table), (values,), (values,))


def test_activation_checkpointing_reads_what_is_kept_once():
    inputs, table = inputs_and_table(2, 3, 7, 11, 5, 4, torch.float64)
    output = checkpoint(flash.relative_attention, **inputs, table=table, use_reentrant=False)
    again = torch.autograd.grad(output.sum(), list(inputs.values()))
    output = flash.relative_attention(**inputs, table=table)
    assert all(map(torch.equal, again, torch.autograd.grad(output.sum(), list(inputs.values()))))


def test_second_derivatives_are_an_error_that_names_naive():
    inputs, table = inputs_and_table(1, 1, 3, 5, 2, 2, torch.float64)
    output = flash.relative_attention(**inputs, table=table)
    (first,) = torch.autograd.grad(output.pow(2).sum(), inputs["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="kernel='naive'"):
        first.sum().backward()


@pytest.mark.parametrize("bounded", [False, True])
def test_the_operator_keeps_the_promises_of_torch(bounded):
    inputs, table = inputs_and_table(2, 3, 5, 11, 7, 6, torch.float64)
    bias = flash.mask_bias(5, 11, None, first_keys(2, 5, 11), table) if bounded else None
    query = torch.randn(2, 3, 5, 13, dtype=torch.float64, requires_grad=True)
    for keep in (False, True):
        arguments = (query, inputs["key"], inputs["value"], flash.cosines_first(table), bias, keep)
        torch.library.opcheck(torch.ops.memformers.plain_attention, arguments)


def test_what_is_kept_does_not_grow_with_the_number_of_scores(monkeypatch):
    """From 64 MiB of probabilities on, for the backward pass: arguments and output, besides the mask."""
    monkeypatch.setattr(plain, "MAX_KEPT", 2 * 4 * 8 * 300 - 1)
    inputs, table = inputs_and_table(2, 4, 8, 300, 16, 4, torch.float32)
    kept, output = kept_by(lambda: flash.relative_attention(**inputs, table=table))
    known = {t.data_ptr() for t in (output, table, *inputs.values())}
    numbers = sum(t.numel() for t in kept if t.data_ptr() not in known)
    query_sized = 2 * 4 * 8 * (16 + 4)
    assert numbers < 4 * query_sized + 8 * 300 + 300 * 4


def test_far_keys_are_exact():
    """A rotation by 50,000 loses nothing: of the last keys, weights depend on differences alone."""
    K = 50_021
    P = 16
    inputs, table = inputs_and_table(1, 2, 3, K, 8, P, torch.float32)
    with torch.no_grad():
        output = flash.relative_attention(**inputs, table=table)
        exact = {name: x.double() for name, x in inputs.items()}
        wanted = reference(sinusoids(K, P), **exact)
    error = (output.double() - wanted).norm() / wanted.norm()
    assert error <= TOLERANCE[torch.float32]


def test_dropout_keeps_the_mean():
    inputs, table = inputs_and_table(1, 2, 3, 7, 4, 4, torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        kept = flash.relative_attention(**inputs, table=table)
        # Each stream of a batch draws for itself, so that 8,000 equal streams are 8,000 draws.
        for name in ("query", "key", "value"):
            inputs[name] = inputs[name].expand(8_000, -1, -1, -1)
        outputs = flash.relative_attention(**inputs, table=table, dropout_prob=0.3)
    deviation = outputs.std(0) / math.sqrt(len(outputs))
    assert not torch.equal(outputs[0], outputs[1])
    assert ((outputs.mean(0) - kept).abs() < 6 * deviation).all()


def test_compile_and_export_give_what_the_kernel_gives():
    inputs, table = inputs_and_table(2, 3, 5, 11, 7, 6, torch.float64)
    kernel = partial(flash.relative_attention, table=table)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    compare(compiled, inputs, torch.float64, first_keys(2, 5, 11), kernel)

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, u, v, w):
            return kernel(query=query, key=key, value=value, u=u, v=v, w=w)

    arguments = tuple(inputs[name].detach() for name in ("query", "key", "value", "u", "v", "w"))
    program = torch.export.export(Attention(), arguments)
    torch.testing.assert_close(program.module()(*arguments), kernel(**inputs).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("unbounded", [True, False])
def test_a_stream_changes_no_bit_of_the_others(unbounded):
    inputs, table = inputs_and_table(3, 2, 5, 17, 3, 4, torch.float32)
    key_start = None if unbounded else torch.tensor([[2] * 5, [7] * 5, [11] * 5])
    with torch.no_grad():
        plain = flash.relative_attention(**inputs, table=table, key_start=key_start)
        for name in ("query", "key", "value"):
            inputs[name][1] = math.nan
        broken = flash.relative_attention(**inputs, table=table, key_start=key_start)
    assert torch.equal(broken[::2], plain[::2])


SINUSOIDAL = {"positions": "sinusoidal", "position_features": 4}


def test_auto_takes_flash_where_it_is_faster(monkeypatch):
    calls = []
    real = flash.relative_attention
    monkeypatch.setattr(flash, "relative_attention", lambda *a, **k: calls.append(0) or real(*a, **k))

    def uses_flash(length=64, heads=2, d_model=16, dtype=torch.float32, train=False, **arguments):
        attention = RelativeMultiHeadAttention(heads, d_model, 0.5, **(SINUSOIDAL | arguments))
        attention = attention.to(dtype).train(train)
        x = torch.randn(length, 1, d_model, dtype=dtype)
        calls.clear()
        attention(query=x, key=x, value=x)
        return bool(calls)

    assert uses_flash()
    assert uses_flash(dtype=torch.float64)
    assert uses_flash(kernel="flash", length=2)
    assert uses_flash(dtype=torch.bfloat16)
    assert uses_flash(position_features=8)
    assert not uses_flash(position_features=10)
    assert not uses_flash(dtype=torch.bfloat16, position_features=8)
    assert not uses_flash(length=8)
    # PyTorch's kernel for CPUs drops no probabilities.
    assert not uses_flash(train=True)
    assert not uses_flash(position_features=None)
    assert not uses_flash(position_features=3)
    assert not uses_flash(clamp_len=5)
    assert not uses_flash(positions="learned", position_features=None)
    assert not uses_flash(kernel="naive")


def test_a_hooked_position_map_is_called():
    attention = fill_zeros(RelativeMultiHeadAttention(2, 16, 0.0, **SINUSOIDAL))
    x = torch.randn(64, 1, 16)
    attention.position.register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = attention(query=x, key=x, value=x)
    attention.position._forward_hooks.clear()
    with torch.no_grad():
        attention.position.weight *= 2
    torch.testing.assert_close(attention(query=x, key=x, value=x), hooked)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"positions": "learned"}, "positions='learned'"),
        ({"position_features": 5}, "5 features"),
        ({"clamp_len": 7}, "clamp_len=7"),
    ],
)
def test_flash_refuses_positions_that_are_not_rotations(settings, word):
    with pytest.raises(ValueError, match=f"kernel='flash' needs positions='sinusoidal'.*{word}"):
        MemoryLM(ModelConfig(kernel="flash", **settings))
