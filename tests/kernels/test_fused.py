"""What is special to the fused GPU kernel. Without a GPU, Triton's interpreter runs it on CPU."""

import pytest
import torch

pytest.importorskip("triton")

from memformers.kernels import fused, naive
from tests.kernels import against_naive
from tests.kernels.against_naive import DEVICE, close, compare, compare_dropout, first_keys, kept_by, results

pytestmark = pytest.mark.usefixtures("bfloat16_as_on_the_gpu")


def tensors(*arguments):
    return against_naive.tensors(*arguments, DEVICE)


def test_documents_in_a_long_segment_begin_at_any_key():
    """Of several tiles of keys, some are seen by no query, and some by a few."""
    size, doc_starts = (2, 1, 67, 131, 3), torch.tensor([[0, 20, 65], [33, 40, 66]])
    documents = (torch.arange(67)[:, None] >= doc_starts[:, None]).sum(-1)  # [B, S]
    begins = torch.cat((torch.tensor([[0], [50]]), 64 + doc_starts), dim=1)
    key_start = begins.gather(1, documents).to(DEVICE)
    compare(fused.relative_attention, tensors(*size, torch.float32), torch.float32, key_start)


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


@pytest.mark.parametrize("programs", [1, 6])
def test_streams_may_share_a_program(programs, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    compare(fused.relative_attention, tensors(5, 1, 7, 37, 3, torch.float32), torch.float32)


def test_the_same_inputs_give_the_same_bits_and_torch_compile_takes_them_in_one_graph():
    inputs = tensors(2, 1, 19, 37, 3, torch.float32)
    compiled = torch.compile(fused.relative_attention, fullgraph=True, backend="aot_eager")
    first, *others = (results(kernel, inputs) for kernel in (*[fused.relative_attention] * 2, compiled))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_nothing_as_large_as_queries_times_keys_is_kept():
    inputs = tensors(1, 1, 67, 67, 1, torch.float32)
    assert max(t.numel() for t in kept_by(lambda: fused.relative_attention(**inputs))) == 67


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [((2, 3, 7, 11), torch.float32), ((3, 1, 37, 67), torch.float32), ((1, 2, 71, 103), torch.bfloat16)],
)
def test_dropout_drops_the_same_probabilities_in_all_passes(size, dtype, bounded):
    compare_dropout(fused.relative_attention, *size, dtype, bounded, DEVICE)


def test_each_stream_head_and_query_drops_other_keys():
    """With one-hot values, the output shows which probabilities are left."""
    torch.manual_seed(5)
    B, H, S, K = 2, 2, 67, 67
    inputs = {name: torch.zeros_like(t) for name, t in tensors(B, H, S, K, K, torch.float32).items()}
    inputs["value"] = torch.eye(K, device=DEVICE).expand(B, H, K, K)
    twice = [fused.relative_attention(**inputs, dropout_prob=0.5) > 0 for _ in range(2)]
    left = torch.stack(twice)[..., -3:, :-2].flatten(0, 3) * 2.0 - 1  # of three queries that see these keys
    likeness = (left @ left.T / left.shape[1]).fill_diagonal_(0)
    assert likeness.abs().max() < 0.6


@pytest.mark.parametrize("dropout_prob", [0.0, 0.5])
def test_the_operator_keeps_torchs_promises(dropout_prob):
    inputs, key_start = tensors(2, 1, 3, 5, 2, torch.float32), first_keys(2, 3, 5, DEVICE).int()
    seed = torch.tensor(3, device=DEVICE) if dropout_prob else None
    arguments = *inputs.values(), key_start, seed, dropout_prob
    torch.library.opcheck(torch.ops.memformers.fused_attention, arguments)
