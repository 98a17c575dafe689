"""Relative attention with sinusoidal positions, computed by an attention without positions.

The sine and cosine of a difference split into products: sin(i − j) = sin i cos j − cos i sin j and
cos(i − j) = cos i cos j + sin i sin j. So with r_d = W_R·sinusoid(d), the position score of query i and
key j is a dot product of a vector that depends only on i and one that depends only on j: with
p = W_Rᵀ(q_i + v), whose part p_s belongs to the sines of d and whose part p_c to the cosines,

    (q_i + v)·r_{i−j} = [p_c ∘ sin i − p_s ∘ cos i; p_s ∘ sin i + p_c ∘ cos i]·[sin j; cos j]

for each frequency. These vectors are appended to queries and keys, whose plain product is then the
relative score, and PyTorch's ``scaled_dot_product_attention`` computes the rest. Its memory grows with
S + K; a head has E + P numbers for P position features.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memformers.kernels.naive import causal_mask, from_key_start

QUERIES = 256
"""The most queries in a block, if each query has its own first key."""


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinusoids: Tensor,
    w_r: Tensor,
    *,
    u: Tensor,
    v: Tensor,
    key_start: Tensor | None = None,
    dropout_prob: float = 0.0,
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][], causal, for ``r = w_r · sinusoids``.

    Shapes: ``query [B, H, S, E]``; ``key``, ``value [B, H, K, E]``; ``sinusoids [K, P]``, the sines and
    then the cosines of the positions 0 … K−1; ``w_r [H, E, P]``; ``u``, ``v [H, E]``; ``key_start
    [B, S]``. Returns ``[B, H, S, E]``.
    """
    from torch.nn.attention.bias import (
        causal_lower_right,
    )  # here, since it imports torch.compile, which takes a second

    (B, H, S, E), (K, P) = query.shape, sinusoids.shape
    sin_i, cos_i = sinusoids[K - S :].chunk(2, dim=-1)  # [S, P / 2]
    p_s, p_c = torch.einsum("bhie,hep->bhip", query + v[:, None], w_r).chunk(2, dim=-1)
    of_query = torch.cat((query + u[:, None], p_c * sin_i - p_s * cos_i, p_s * sin_i + p_c * cos_i), dim=-1)
    of_key = torch.cat((key, sinusoids.expand(B, H, K, P)), dim=-1)  # [B, H, K, E + P]
    # The fast implementations require the same width of all three.
    padded = F.pad(value, (0, P))
    scale = 1.0 / math.sqrt(E)
    if key_start is not None:
        return in_blocks(of_query, of_key, padded, key_start, dropout_prob, scale)[..., :E]
    mask = causal_lower_right(S, K)
    return F.scaled_dot_product_attention(of_query, of_key, padded, mask, dropout_prob, scale=scale)[..., :E]


def in_blocks(
    query: Tensor, key: Tensor, value: Tensor, key_start: Tensor, dropout_prob: float, scale: float
) -> Tensor:
    """Plain causal attention of ``query [B, H, S, W]`` over ``key``, ``value [B, H, K, W]``, beginning with
    key ``key_start [B, S]``: ``[B, H, S, W]``.

    It needs a mask, which all heads share. The mask is built for one block of queries at a time and not
    kept: the backward pass computes the mask and the outputs of these queries again.
    """
    S, K = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, S, QUERIES):
        rows, k = slice(start, start + QUERIES), min(K - S + start + QUERIES, K)
        inputs = query[:, :, rows], key[:, :, :k], value[:, :, :k], key_start[:, rows], dropout_prob, scale
        learns = torch.is_grad_enabled()
        parts.append(checkpoint(masked, *inputs, use_reentrant=False) if learns else masked(*inputs))
    return torch.cat(parts, dim=2)


def masked(
    query: Tensor, key: Tensor, value: Tensor, key_start: Tensor, dropout_prob: float, scale: float
) -> Tensor:
    """The same as [`in_blocks`][], for ``query [B, H, s, W]`` over ``key [B, H, k, W]`` in one block."""
    visible = causal_mask(query.shape[2], key.shape[2], query.device) & from_key_start(
        key_start, key.shape[2]
    )
    return F.scaled_dot_product_attention(query, key, value, visible, dropout_prob, scale=scale)
