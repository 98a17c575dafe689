"""The blocks of the blocked CPU kernel, what it keeps, and its dropout."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memformers.kernels import blocked
from memformers.kernels.blocked import tiling
from tests.kernels.against_naive import compare, compare_dropout, first_keys, kept_by
from tests.kernels.against_naive import random_inputs as tensors


@pytest.mark.parametrize("kept", [0, blocked.MAX_KEPT])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("workspace", "queries"), [(1, 3), (100, 1), (1000, 7)])
@pytest.mark.parametrize("size", [(5, 3, 7, 13, 2), (2, 3, 23, 37, 2)])
def test_the_sizes_of_blocks_change_nothing(size, kept, workspace, queries, bounded, monkeypatch):
    monkeypatch.setattr(blocked, "MAX_KEPT", kept)
    monkeypatch.setattr(tiling, "WORKSPACE", workspace)
    monkeypatch.setattr(tiling, "QUERIES", queries)
    key_start = first_keys(size[0], *size[2:4]) if bounded else None
    compare(blocked.relative_attention, tensors(*size, torch.float64), torch.float64, key_start)


@pytest.mark.parametrize(("K", "probabilities"), [(100, 4 * 8 * 100), (101, 0)])
def test_probabilities_are_kept_up_to_a_bound(K, probabilities, monkeypatch):
    monkeypatch.setattr(blocked, "MAX_KEPT", 4 * 8 * 100)
    inputs = tensors(1, 4, 8, K, 2, torch.float32)
    kept, output = kept_by(lambda: blocked.relative_attention(**inputs))
    known = {t.data_ptr() for t in (output, *inputs.values())}
    assert sum(t.numel() for t in kept if t.data_ptr() not in known) == probabilities


@pytest.mark.parametrize("kept", [0, blocked.MAX_KEPT])
@pytest.mark.parametrize("bounded", [False, True])
def test_blocks_drop_the_same_probabilities_in_both_passes(kept, bounded, monkeypatch):
    monkeypatch.setattr(blocked, "MAX_KEPT", kept)
    monkeypatch.setattr(tiling, "QUERIES", 3)
    inputs = tensors(2, 3, 7, 11, 5, torch.float64)
    compare_dropout(blocked.relative_attention, inputs, torch.float64, bounded)


@pytest.mark.parametrize(
    ("without", "bounded", "keep", "dropout_prob"),
    [("", True, True, 0.0), ("v", False, False, 0.5), ("s", True, False, 0.0), ("vs", False, True, 0.5)],
)
def test_the_operator_keeps_torchs_promises(keep, without, bounded, dropout_prob):
    inputs = tensors(2, 3, 5, 11, 7, torch.float64)
    arguments = [None if name in without else t for name, t in inputs.items()]
    seed = torch.tensor(3) if dropout_prob else None
    arguments += [first_keys(2, 5, 11) if bounded else None, seed, dropout_prob, keep]
    torch.library.opcheck(torch.ops.memformers.blocked_attention, tuple(arguments))


def test_second_derivatives_are_errors_that_name_naive():
    inputs = tensors(1, 1, 3, 5, 2, torch.float64)
    out = blocked.relative_attention(**inputs)
    (first,) = torch.autograd.grad(out.pow(2).sum(), inputs["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="kernel='naive'"):
        first.sum().backward()
    values = {name: t.detach() for name, t in inputs.items()}
    with pytest.raises(NotImplementedError, match="kernel='naive'"):
        torch.func.jvp(lambda inputs: blocked.relative_attention(**inputs), (values,), (values,))


def test_activation_checkpointing_reads_what_is_kept_once():
    inputs = tensors(2, 3, 7, 11, 5, torch.float64)
    plain = blocked.relative_attention(**inputs)
    again = checkpoint(blocked.relative_attention, **inputs, use_reentrant=False)
    gradients = [torch.autograd.grad(out.sum(), [*inputs.values()]) for out in (plain, again)]
    assert all(map(torch.equal, *gradients))
