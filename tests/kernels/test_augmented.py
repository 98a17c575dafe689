"""Sinusoidal positions as a plain dot product, against the naive kernel."""

import pytest
import torch

from memformers import MemoryLM, RelativeMultiHeadAttention
from memformers.kernels import augmented, naive
from memformers.kernels.dispatch import relative_attention
from memformers.models.positions import sinusoids
from tests.builders import small_lm
from tests.kernels.against_naive import compare_outputs, first_keys


def tensors(B, H, S, K, E, P):
    shapes = {"query": (B, H, S, E), "key": (B, H, K, E), "value": (B, H, K, E), "w_r": (H, E, P)}
    shapes |= {"u": (H, E), "v": (H, E)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "size",
    [(2, 3, 5, 11, 7, 4), (3, 2, 7, 7, 5, 2), (5, 3, 1, 13, 2, 6), (1, 1, 1, 1, 1, 2), (2, 2, 67, 139, 5, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("queries", [None, 3, 256])
def test_augmented_equals_naive_in_output_and_every_gradient(size, dtype, queries, monkeypatch):
    """With the first key that each query may see, if the queries are computed in blocks of ``queries``."""
    monkeypatch.setattr(augmented, "QUERIES", queries)
    key_start = None if queries is None else first_keys(size[0], size[2], size[3])
    inputs = {name: t.to(dtype).requires_grad_() for name, t in tensors(*size).items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    table = sinusoids(size[3], size[5])
    r = torch.einsum("hep,kp->hke", exact["w_r"], table)
    given = {name: exact[name] for name in ("query", "key", "value", "u", "v")}
    wanted = naive.relative_attention(**given, r=r, key_start=key_start)
    got = augmented.relative_attention(**inputs, sinusoids=table.to(dtype), key_start=key_start)
    compare_outputs(got, wanted, inputs, exact, dtype)


def test_no_mask_of_first_keys_is_kept_for_the_backward_pass():
    inputs = {name: t.requires_grad_() for name, t in tensors(1, 2, 67, 139, 2, 2).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        augmented.relative_attention(
            **inputs, sinusoids=sinusoids(139, 2).double(), key_start=first_keys(1, 67, 139)
        )
    assert kept
    assert max(t.numel() for t in kept) < 67 * 139


def test_dropout_drops_whole_probabilities_and_keeps_the_mean():
    inputs, table = tensors(2, 3, 5, 11, 7, 4), sinusoids(11, 4)
    wanted = augmented.relative_attention(**inputs, sinusoids=table)
    drawn = [augmented.relative_attention(**inputs, sinusoids=table, dropout_prob=0.5) for _ in range(2000)]
    mean, error = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / 2000**0.5
    assert error.min() > 0
    assert ((mean - wanted).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "learned", "kernel": "augmented"}, "kernel='augmented' needs sines and cosines"),
        (
            {"position_features": 3, "kernel": "augmented"},
            "needs an even number of position_features; 3 came",
        ),
        ({"position_features": -1}, "position_features=-1 can't represent distances"),
        ({"position_features": 4, "positions": "learned"}, "position_features=4 is for sinusoids, which"),
    ],
)
def test_what_cannot_be_split_is_an_error(options, message):
    options = {"positions": "sinusoidal"} | options
    with pytest.raises(ValueError, match=message):
        RelativeMultiHeadAttention(2, 8, 0.0, **options)
    with pytest.raises(ValueError, match=message):
        MemoryLM(small_lm("transformer-xl").config.__class__(**options))


def test_a_mask_and_a_table_of_distances_are_refused():
    module = RelativeMultiHeadAttention(2, 8, 0.0, positions="sinusoidal", kernel="augmented")
    x = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="kernel='augmented' is causal and takes no explicit mask"):
        module(query=x, key=x, value=x, mask=naive.causal_mask(5, 5, x.device)[:, :, None])
    q = torch.randn(1, 1, 2, 3)
    with pytest.raises(ValueError, match="kernel='augmented' needs sinusoids instead of r"):
        relative_attention(q, q, q, torch.randn(1, 2, 3), u=torch.randn(1, 3), kernel="augmented")
