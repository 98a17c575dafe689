"""The naive kernel against the definition itself, one score at a time."""

import math

import pytest
import torch

from memformers.kernels.naive import causal_mask, relative_attention, relative_shift
from tests.kernels.against_naive import first_keys

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [(3, 5), (1, 1), (1, 7), (5, 5), (7, 11), (2, 13)]


def inputs(S: int, K: int, B: int = 2, H: int = 3, E: int = 5):
    shapes = {"query": (B, H, S, E), "key": (B, H, K, E), "value": (B, H, K, E), "r": (H, K, E)}
    shapes |= {"u": (H, E), "v": (H, E), "s": (H, K)}
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def one_score_at_a_time(query, key, value, r, u, v=None, s=None, mask=None, key_start=None):
    B, H, S, E = query.shape
    K = key.shape[2]
    out = torch.zeros(B, H, S, E)
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


@pytest.mark.parametrize(("S", "K"), SIZES)
@pytest.mark.parametrize("terms", [("u",), ("u", "v"), ("u", "s"), ("u", "v", "s")])
def test_naive_equals_the_definition_in_output_and_every_gradient(S, K, terms):
    tensors = inputs(S, K)
    used = {k: t for k, t in tensors.items() if k in ("query", "key", "value", "r", *terms)}
    naive, definition = relative_attention(**used), one_score_at_a_time(**used)
    torch.testing.assert_close(naive, definition, rtol=0, atol=1e-12)
    weight = torch.randn_like(naive)
    got = torch.autograd.grad((naive * weight).sum(), list(used.values()))
    wanted = torch.autograd.grad((definition * weight).sum(), list(used.values()))
    for name, a, b in zip(used, got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=f"gradient of {name}")


def test_a_mask_hides_keys_from_queries():
    tensors = inputs(4, 6)
    mask = causal_mask(4, 6, torch.device("cpu")).expand(2, 1, 4, 6).clone()
    mask[1, 0, 2, :3] = False
    naive = relative_attention(**tensors, mask=mask)
    torch.testing.assert_close(naive, one_score_at_a_time(**tensors, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("S", "K"), SIZES)
def test_a_query_sees_no_key_before_its_first(S, K):
    tensors, key_start = inputs(S, K, B=5), first_keys(5, S, K)
    naive, definition = (
        relative_attention(**tensors, key_start=key_start),
        one_score_at_a_time(**tensors, key_start=key_start),
    )
    torch.testing.assert_close(naive, definition, rtol=0, atol=1e-12)


def test_a_first_key_and_a_mask_hide_what_either_hides():
    tensors, key_start = inputs(4, 6), torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]])
    mask = causal_mask(4, 6, torch.device("cpu")).expand(2, 1, 4, 6).clone()
    mask[0, 0, 1, 1:3] = False
    naive = relative_attention(**tensors, mask=mask, key_start=key_start)
    wanted = one_score_at_a_time(**tensors, mask=mask, key_start=key_start)
    torch.testing.assert_close(naive, wanted, rtol=0, atol=1e-12)


def test_what_comes_before_a_first_key_gets_a_gradient_of_exactly_zero():
    tensors = inputs(4, 6)
    relative_attention(**tensors, key_start=torch.tensor([[0] * 4, [2] * 4])).square().sum().backward()
    for name in ("key", "value"):
        grad = tensors[name].grad
        assert not grad[1, :, :2].any()
        assert grad[1, :, 2:].all()
        assert grad[0].all()


def test_the_shift_puts_each_distance_at_its_key():
    S, K = 3, 5
    descending = torch.arange(K - 1, -1, -1).expand(S, K)  # every row: distances 4 3 2 1 0
    shifted = relative_shift(descending)
    for i in range(S):
        for j in range(K - S + i + 1):
            assert shifted[i, j] == K - S + i - j


def test_dropout_drops_whole_probabilities_and_keeps_the_mean():
    tensors = inputs(3, 9)
    tensors["value"] = torch.ones(2, 3, 9, 5)
    dropped = torch.stack([relative_attention(**tensors, dropout_prob=0.5) for _ in range(500)])
    assert dropped.std() > 0.1
    torch.testing.assert_close(dropped.mean(), torch.tensor(1.0), rtol=0, atol=0.03)
