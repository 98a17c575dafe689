"""Relative attention with sinusoidal positions, by any attention that knows none.

The sine and cosine of a difference split into products: sin(i − j) = sin i cos j − cos i sin j and
cos(i − j) = cos i cos j + sin i sin j. So with r_d = W_R·sinusoid(d), the position score of query i and
key j is a dot product of something of i and something of j alone: with p = W_Rᵀ(q_i + v), of which p_s
meets the sines of d and p_c the cosines,

    (q_i + v)·r_{i−j} = [p_c ∘ sin i − p_s ∘ cos i; p_s ∘ sin i + p_c ∘ cos i]·[sin j; cos j]

for each frequency. Queries and keys that carry these numbers beside their own have the relative score as
their plain product, and PyTorch's ``scaled_dot_product_attention`` does the rest, in memory that grows
with S + K, by heads of E + P numbers for P position features.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinusoids: Tensor,
    w_r: Tensor,
    *,
    u: Tensor,
    v: Tensor,
    dropout_prob: float = 0.0,
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][], causal, for ``r = w_r · sinusoids``.

    Shapes: ``query [B, H, S, E]``; ``key``, ``value [B, H, K, E]``; ``sinusoids [K, P]``, the sines and
    then the cosines of the positions 0 … K−1; ``w_r [H, E, P]``; ``u``, ``v [H, E]``. Returns
    ``[B, H, S, E]``.
    """
    from torch.nn.attention.bias import causal_lower_right  # not above: it imports torch.compile, in a second

    (B, H, S, E), (K, P) = query.shape, sinusoids.shape
    sin_i, cos_i = sinusoids[K - S :].chunk(2, dim=-1)  # [S, P / 2]
    p_s, p_c = torch.einsum("bhie,hep->bhip", query + v[:, None], w_r).chunk(2, dim=-1)
    of_query = torch.cat((query + u[:, None], p_c * sin_i - p_s * cos_i, p_s * sin_i + p_c * cos_i), dim=-1)
    of_key = torch.cat((key, sinusoids.expand(B, H, K, P)), dim=-1)  # [B, H, K, E + P]
    # One width for all three is what the fast implementations ask for.
    padded = F.pad(value, (0, P))
    mask = causal_lower_right(S, K)
    scale = 1.0 / math.sqrt(E)
    return F.scaled_dot_product_attention(of_query, of_key, padded, mask, dropout_prob, scale=scale)[..., :E]
