"""Relative attention of few queries to many inputs z, of which no keys and values are made.

    (q_i + u) · W_K z_j  =  W_Kᵀ (q_i + u) · z_j            Σ_j p_ij W_V z_j  =  W_V Σ_j p_ij z_j

The maps W_K and W_V are applied to S queries and sums instead of K inputs. In return, scores and sums have D
features for each head instead of E. DeepSeek-V2 absorbs its maps in this way (arXiv 2405.04434, section
2.1.2).
"""

import math

import torch
from torch import Tensor

from memformers.kernels import naive


def relative_attention(
    query: Tensor, past: Tensor, segment: Tensor, r: Tensor, *, w_key: Tensor, w_value: Tensor, u: Tensor,
    v: Tensor | None = None, s: Tensor | None = None, key_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] for keys W_K z and values W_V z: ``[B, H, S, E]``.

    Shapes: ``past [B, M, D]`` and ``segment [B, S, D]``, z apart, since often only the second needs a
    gradient; ``w_key`` and ``w_value [H, E, D]``, W_K and W_V by head; the others as there.
    """
    S, E = query.shape[2:]
    M = past.shape[1]
    K = M + S

    # Terms (a) and (c): queries in the space of z, all heads of a stream together.
    features = torch.einsum("bhse,hed->bhsd", query + u[:, None], w_key)
    rows = features.flatten(1, 2)  # [B, H·S, D]
    content = torch.cat((rows @ past.mT, rows @ segment.mT), dim=-1)  # [B, H·S, K]

    # Terms (b) and (d), as in the reference.
    with_v = query if v is None else query + v[:, None]
    position = torch.einsum("bhie,hde->bhid", with_v, r.flip(1))
    if s is not None:
        position = position + s.flip(1)[:, None]
    position = naive.relative_shift(position)  # [B, H, S, K]
    scores = (content.view_as(position) + position) / math.sqrt(E)

    visible = naive.causal_mask(S, K, query.device)
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1).flatten(1, 2)  # [B, H·S, K]

    # Sums of z, then their values.
    sums = probabilities[..., :M] @ past + probabilities[..., M:] @ segment  # [B, H·S, D]
    return torch.einsum("bhsd,hed->bhse", sums.view_as(features), w_value)
