"""Relative attention of a short segment over a long memory, without keys or values.

A key is W_K x, and its score (q + u)·(W_K x) = (W_Kᵀ(q + u))·x: the projection can be moved from the
K remembered inputs to the S queries. The same holds for the values, Σ_j P_j W_V x_j = W_V Σ_j P_j x_j. The
products with x then have width D for each head instead of E, but no memory is projected. This is less work
if a segment has fewer tokens than a head has dimensions.
"""

import math

import torch
from torch import Tensor

from memformers.kernels.naive import causal_mask, from_key_start, relative_shift


def relative_attention(
    query: Tensor,
    past: Tensor,
    segment: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][] over ``key = w_key x`` and ``value = w_value x``
    for the inputs x of ``past`` and then of ``segment``: causal, without mask or dropout.

    Shapes: ``query [B, H, S, E]``; ``past [M, B, D]`` and ``segment [S, B, D]``, K positions together;
    they are separate, since the past seldom needs a gradient; ``w_key``, ``w_value [H, E, D]``;
    ``r [H, K, E]``; ``u``, ``v [H, E]``; ``s [H, K]``; ``key_start [B, S]``. Returns ``[B, H, S, E]``.
    """
    S, E = query.shape[2:]
    M, K = len(past), len(past) + len(segment)

    absorbed = torch.einsum("bhie,hed->bhid", query + u[:, None], w_key)  # [B, H, S, D]
    old = torch.einsum("bhid,jbd->bhij", absorbed, past)
    content = torch.cat((old, torch.einsum("bhid,jbd->bhij", absorbed, segment)), dim=-1)
    position = torch.einsum("bhie,hde->bhid", query if v is None else query + v[:, None], r.flip(1))
    if s is not None:
        position = position + s.flip(1)[:, None]
    scores = (content + relative_shift(position)) / math.sqrt(E)  # [B, H, S, K]

    visible = causal_mask(S, K, query.device)
    if key_start is not None:
        visible = visible & from_key_start(key_start, K)
    probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    attended = torch.einsum("bhij,jbd->bhid", probabilities[..., :M], past)
    attended = attended + torch.einsum("bhij,jbd->bhid", probabilities[..., M:], segment)
    return torch.einsum("bhid,hed->bhie", attended, w_value)
