"""Relative attention of a short segment over a long memory, without keys or values.

A score with the key W_K x is (q + u)·(W_K x) = (W_Kᵀ(q + u))·x, and the sum of values is Σ_j P_j W_V x_j =
W_V Σ_j P_j x_j. So the S queries are projected, and not the K remembered inputs: less work if a segment has
fewer tokens than a head has dimensions.
"""

import math

import torch
from torch import Tensor

from memformers.kernels.naive import causal_mask, from_key_start, relative_shift


def relative_attention(
    query: Tensor, past: Tensor, segment: Tensor, w_key: Tensor, w_value: Tensor, r: Tensor, *,
    u: Tensor, v: Tensor | None = None, s: Tensor | None = None, key_start: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] of ``query [B, H, S, E]``, causal, over the finite
    inputs ``past [M, B, D]`` and then ``segment [S, B, D]``, with the maps ``w_key``, ``w_value [H, E, D]``:
    ``[B, H, S, E]``. The past is apart since it seldom needs a gradient."""
    (S, E), M, K = query.shape[2:], len(past), len(past) + len(segment)
    absorbed = torch.einsum("bhie,hed->bhid", query + u[:, None], w_key)  # [B, H, S, D]
    old = torch.einsum("bhid,jbd->bhij", absorbed, past)
    content = torch.cat((old, torch.einsum("bhid,jbd->bhij", absorbed, segment)), dim=-1)
    position = torch.einsum("bhie,hde->bhid", query if v is None else query + v[:, None], r.flip(1))
    position = position if s is None else position + s.flip(1)[:, None]
    scores = (content + relative_shift(position)) / math.sqrt(E)  # [B, H, S, K]
    visible = causal_mask(S, K, query.device)
    visible = visible if key_start is None else visible & from_key_start(key_start, K)
    probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    attended = torch.einsum("bhij,jbd->bhid", probabilities[..., :M], past)
    attended = attended + torch.einsum("bhij,jbd->bhid", probabilities[..., M:], segment)
    return torch.einsum("bhid,hed->bhie", attended, w_value)
