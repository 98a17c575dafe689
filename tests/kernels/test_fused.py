"""The fused GPU kernel against the naive one: output and every gradient. Without a GPU, Triton's
interpreter runs the same kernels on CPU."""

import pytest
import torch

pytest.importorskip("triton")

from memformers.kernels import fused, naive
from tests.kernels import against_naive
from tests.kernels.against_naive import close, compare, first_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (B, H, S, K, E): prime and different, and the edges: no memory, one query, one of everything,
# several tiles of queries and of keys with ragged ends, heads of all widths.
SIZES = {
    torch.float32: [
        (2, 3, 5, 11, 7),
        (3, 2, 7, 7, 5),
        (5, 3, 1, 13, 2),
        (1, 1, 1, 1, 1),
        (1, 2, 37, 83, 7),
        (2, 1, 67, 67, 32),
        (1, 1, 41, 97, 64),
        (1, 1, 19, 43, 128),
    ],
    torch.bfloat16: [(2, 3, 5, 11, 7), (2, 1, 67, 67, 32), (1, 2, 71, 139, 64), (1, 1, 67, 131, 128)],
    torch.float16: [(1, 2, 71, 139, 64)],
}


@pytest.fixture(autouse=True)
def _bfloat16_as_on_the_gpu(monkeypatch):
    """The interpreter cuts float32 to bfloat16 instead of rounding, and multiplies bfloat16's bits as
    if they were whole numbers."""
    if DEVICE == "cuda":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def round_to_nearest(x, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        rounded = torch.from_numpy(np.array(x, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def multiply_numbers(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", round_to_nearest)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_numbers)


def tensors(*arguments):
    return against_naive.tensors(*arguments, DEVICE)


@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype in SIZES for size in SIZES[dtype]])
def test_fused_equals_naive_in_output_and_every_gradient(dtype, size):
    compare(fused.relative_attention, tensors(*size, dtype), dtype)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, (3, 2, 5, 11, 7)),
        (torch.float32, (5, 1, 1, 13, 2)),
        (torch.float32, (3, 1, 37, 83, 7)),
        (torch.bfloat16, (3, 1, 67, 139, 5)),
    ],
)
def test_fused_equals_naive_where_queries_see_the_keys_from_another_one_on(dtype, size):
    B, _, S, K, _ = size
    compare(fused.relative_attention, tensors(*size, dtype), dtype, first_keys(B, S, K, DEVICE))


def test_documents_in_a_long_segment_begin_at_any_key():
    """Of several tiles of keys, some are seen by no query, and some by a few."""
    size, doc_starts = (2, 1, 67, 131, 3), torch.tensor([[0, 20, 65], [33, 40, 66]])
    documents = (torch.arange(67)[:, None] >= doc_starts[:, None]).sum(-1)  # [B, S]
    begins = torch.cat((torch.tensor([[0], [50]]), 64 + doc_starts), dim=1)
    compare(
        fused.relative_attention,
        tensors(*size, torch.float32),
        torch.float32,
        begins.gather(1, documents).to(DEVICE),
    )


def test_any_memory_order_of_the_inputs_works():
    """The attention module gives views whose memory is sequence first, and the first of its distances."""
    inputs = tensors(2, 3, 5, 11, 7, torch.float32)
    for name in ("query", "key", "value"):
        t = inputs[name].detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        inputs[name] = t.requires_grad_()
    table = torch.randn(3, 17, 7, device=DEVICE)
    inputs |= {"r": table[:, :11].requires_grad_(), "s": table[:, :11, 0].detach().requires_grad_()}
    compare(fused.relative_attention, inputs, torch.float32)
    inputs["r"] = table.permute(1, 0, 2).contiguous().permute(1, 0, 2)[:, :11].requires_grad_()
    compare(fused.relative_attention, inputs, torch.float32)


def test_vectors_that_are_not_in_one_piece_work():
    inputs = tensors(2, 3, 5, 11, 7, torch.float32)
    inputs = {n: t.detach().mT.contiguous().mT.requires_grad_() for n, t in inputs.items()}
    compare(fused.relative_attention, inputs, torch.float32)
    got = fused.relative_attention(**inputs)
    spread = torch.autograd.grad(got.sum(), inputs["value"])  # of one number, expanded
    wanted = torch.autograd.grad(naive.relative_attention(**inputs).sum(), inputs["value"])
    close(spread[0], wanted[0], torch.float32)


def test_parameters_may_stay_in_float32_while_activations_are_bfloat16():
    """As under autocast."""
    inputs = tensors(2, 3, 5, 11, 8, torch.bfloat16)
    for name in ("u", "v", "s", "r"):
        inputs[name] = inputs[name].detach().float().requires_grad_()
    compare(fused.relative_attention, inputs, torch.bfloat16)


@pytest.mark.parametrize("programs", [1, 6])
def test_streams_may_share_a_program(programs, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    compare(fused.relative_attention, tensors(5, 1, 7, 37, 3, torch.float32), torch.float32)


def test_the_same_inputs_give_the_same_bits():
    inputs = tensors(2, 1, 37, 67, 7, torch.float32)
    first, second = (fused.relative_attention(**inputs) for _ in range(2))
    assert torch.equal(first, second)
    grads = [torch.autograd.grad(out.square().sum(), list(inputs.values())) for out in (first, second)]
    assert all(map(torch.equal, *grads))


def test_nothing_as_large_as_queries_times_keys_is_kept():
    inputs = tensors(1, 1, 67, 67, 1, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused.relative_attention(**inputs)
    assert kept
    assert max(t.numel() for t in kept) == 67


def test_heads_too_wide_and_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="d_head=129"):
        fused.relative_attention(**tensors(1, 1, 1, 1, 129, torch.float32))
    with pytest.raises(ValueError, match="float64"):
        fused.relative_attention(**tensors(1, 1, 1, 1, 1, torch.float64))


def test_the_operator_keeps_torchs_promises():
    inputs, key_start = tensors(2, 3, 5, 11, 7, torch.float32), first_keys(2, 5, 11, DEVICE).int()
    torch.library.opcheck(torch.ops.memformers.fused_attention, (*inputs.values(), key_start))


def test_torch_compile_takes_it_in_one_graph():
    inputs = tensors(2, 3, 5, 11, 7, torch.float32)
    compiled = torch.compile(fused.relative_attention, fullgraph=True, backend="aot_eager")
    outs = [f(**inputs) for f in (compiled, fused.relative_attention)]
    grads = [torch.autograd.grad(out.square().sum(), list(inputs.values())) for out in outs]
    assert all(map(torch.equal, *grads))
