"""What is special to the fused GPU kernel. Without a GPU, Triton's interpreter runs it on CPU."""

import pytest
import torch

pytest.importorskip("triton")

from memformers.kernels import fused
from memformers.kernels.self_test import random_inputs
from tests.kernels.against_naive import DEVICE, compare, first_keys, kept_by


def tensors(*size):
    return random_inputs(*size, torch.float32, DEVICE)


@pytest.mark.long
def test_documents_in_a_long_segment_begin_at_any_key():
    size, doc_starts = (2, 1, 67, 131, 3), torch.tensor([[0, 20, 65], [33, 40, 66]])
    documents = (torch.arange(67)[:, None] >= doc_starts[:, None]).sum(-1)  # [B, S]
    begins = torch.cat((torch.tensor([[0], [50]]), 64 + doc_starts), dim=1)
    key_start = begins.gather(1, documents).to(DEVICE)
    compare(fused.relative_attention, tensors(*size), torch.float32, key_start)


ORDERS = {
    "contiguous": lambda x: x.contiguous(),
    "in columns": lambda x: x.mT.contiguous().mT,
    "a part": lambda x: torch.cat((x, x), dim=-2)[..., : x.shape[-2], :],
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_memory_order_of_the_inputs_works(order):
    inputs = tensors(1, 2, 3, 5, 7)
    inputs = {name: ORDERS[order](t.detach()).requires_grad_() for name, t in inputs.items()}
    compare(fused.relative_attention, inputs, torch.float32)


def test_a_gradient_of_one_number_expanded_works():
    inputs = tensors(1, 1, 5, 11, 7)
    out = fused.relative_attention(**inputs)
    grads = torch.ones_like(out), torch.ones(1, device=DEVICE).expand_as(out)
    (got,), (wanted,) = (torch.autograd.grad(out, inputs["value"], g, retain_graph=True) for g in grads)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("programs", [1, 2])
def test_streams_may_share_a_program(programs, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    compare(fused.relative_attention, tensors(3, 1, 3, 7, 2), torch.float32)


def test_the_same_inputs_give_the_same_bits_and_torch_compile_takes_them_in_one_graph():
    compiled = torch.compile(fused.relative_attention, fullgraph=True, backend="aot_eager")
    inputs, found = tensors(2, 1, 5, 11, 3), []
    for kernel in (*[fused.relative_attention] * 2, compiled):
        out = kernel(**inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_nothing_as_large_as_queries_times_keys_is_kept():
    inputs = tensors(1, 1, 67, 67, 1)
    assert max(t.numel() for t in kept_by(lambda: fused.relative_attention(**inputs))) == 67


@pytest.mark.long
def test_each_stream_head_and_query_drops_other_keys():
    """With one-hot values, the output shows which probabilities are left."""
    torch.manual_seed(5)
    inputs = {name: torch.zeros_like(t) for name, t in tensors(2, 2, 67, 67, 67).items()}
    inputs["value"] = torch.eye(67, device=DEVICE).expand(2, 2, 67, 67)
    twice = [fused.relative_attention(**inputs, dropout_prob=0.5) > 0 for _ in range(2)]
    left = torch.stack(twice)[..., -3:, :-2].flatten(0, 3) * 2.0 - 1  # of three queries that see these keys
    likeness = (left @ left.T / left.shape[1]).fill_diagonal_(0)
    assert likeness.abs().max() < 0.6


@pytest.mark.parametrize("dropout_prob", [0.5, pytest.param(0.0, marks=pytest.mark.long)])
def test_the_operator_keeps_torchs_promises(dropout_prob):
    inputs, key_start = tensors(2, 1, 3, 5, 2), first_keys(2, 3, 5, DEVICE).int()
    seed = torch.tensor(3, device=DEVICE) if dropout_prob else None
    arguments = *inputs.values(), key_start, seed, dropout_prob
    torch.library.opcheck(torch.ops.memformers.fused_attention, arguments)
