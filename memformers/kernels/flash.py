"""Relative attention with sinusoidal positions by PyTorch's plain flash kernel, without a bias and without a
relative shift.

The position score of query i and key j is (q_i + v) · W_R · sinusoid(i − j). Let f = W_Rᵀ (q_i + v) be the
query's features, of which f_s meets the sines and f_c the cosines. For each rate ω,

    f_s sin ω(i − j) + f_c cos ω(i − j)
        = (f_s sin ωi + f_c cos ωi) cos ωj + (f_c sin ωi − f_s cos ωi) sin ωj,

since sines and cosines of a difference are sums of products. So the features, rotated by the query's index,
meet a table by the key's index, and the whole score is one product of E + P features:

    score(i, j) = [q_i + u ; rotated f] · [k_j ; cos ωj, sin ωj] / √E

It needs no memory for scores, S·K, on devices that have a flash kernel. PyTorch's also wants values of E + P
features, so it pays for few position features P.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None,
    mask: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] for r = W_R · sinusoid(d): ``[B, H, S, E]``.

    Shapes: ``w [H, E, P]``, W_R by head, with an even P; ``table [K, P]``, the sinusoids of 0 … K−1, first
    sines and then cosines; the others as there. Keys must be finite, hidden ones too. In half precision,
    the rotated features and the table are rounded, like queries and keys.
    """
    S, E = query.shape[2:]
    K = key.shape[2]
    P = table.shape[1]
    query, rotated = score_queries(query, w, table, u=u, v=v, out_dtype=key.dtype)
    query = torch.cat((query, rotated), dim=-1)  # [B, H, S, E + P]
    key = torch.cat((key, key_table(table, key)), dim=-1)  # [B, H, K, E + P]
    value = F.pad(value, (0, P))  # [B, H, K, E + P]: flash kernels want one head size

    visible = naive.causal_mask(S, K, query.device) if mask is None else mask  # [S, K]
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)  # [B, 1, S, K]
    attended = F.scaled_dot_product_attention(
        query, key, value, visible, dropout_prob, scale=1 / math.sqrt(E)
    )
    return attended[..., :E]


def score_queries(
    query: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of ``query [B, H, S, E]``, the last of the indices in ``table [K, P]``: q + u ``[B, H, S, E]``, and the
    features that meet a [`key_table`][], ``[B, H, S, P]``, both in ``out_dtype``."""
    # The sums and rotations are exact in half precision too: only their results are rounded.
    exact = torch.promote_types(query.dtype, torch.float32)
    query = query.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        with_v = query if v is None else query + v.to(exact)[:, None]
        features = torch.einsum("bhse,hep->bhsp", with_v, w.to(exact))  # [B, H, S, P]
    for_sines, for_cosines = features.chunk(2, dim=-1)  # [B, H, S, P / 2] each
    sines, cosines = table[len(table) - query.shape[2] :].to(exact).chunk(2, dim=-1)  # [S, P / 2] each
    rotated = torch.cat(
        (for_sines * sines + for_cosines * cosines, for_cosines * sines - for_sines * cosines), dim=-1
    )
    return (query + u.to(exact)[:, None]).to(out_dtype), rotated.to(out_dtype)


def key_table(table: Tensor, key: Tensor) -> Tensor:
    """Of each index in ``table [K, P]``, what the rotated features of queries meet: cosines, then sines, for
    each stream and head of ``key [B, H, K, E]``: ``[B, H, K, P]``."""
    sines, cosines = table.to(key.dtype).chunk(2, dim=-1)
    return torch.cat((cosines, sines), dim=-1).expand(*key.shape[:3], -1)
