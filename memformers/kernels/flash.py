"""Relative attention with sinusoidal positions as plain attention, which flash kernels compute: without a
bias and without a relative shift.

The position score of query i and key j is (q_i + v) · W_R · sinusoid(i − j). Let f = W_Rᵀ (q_i + v) be the
query's features, of which f_s meets the sines and f_c the cosines. For each rate ω,

    f_s sin ω(i − j) + f_c cos ω(i − j)
        = (f_s sin ωi + f_c cos ωi) cos ωj + (f_c sin ωi − f_s cos ωi) sin ωj,

since sines and cosines of a difference are sums of products. So the features, rotated by the query's index,
meet a table by the key's index, and the whole score is one product of E + P features:

    score(i, j) = [q_i + u ; rotated f] · [k_j ; cos ωj, sin ωj] / √E

It pays for few position features P. PyTorch's kernels take it as it is, with values of E + P features. On a
CPU, [`memformers.kernels.plain`][] is faster.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive, plain


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None,
    mask: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] for r = W_R · sinusoid(d): ``[B, H, S, E]``.

    Shapes: ``w [H, E, P]``, W_R by head, with an even P; ``table [K, P]``, the sinusoids of 0 … K−1, first
    sines and then cosines; the others as there. Keys must be finite, hidden ones too. In half precision,
    devices other than a CPU round the rotated features and the table, like queries and keys. On a CPU, there
    is no derivative in forward mode, for which a custom operator silently gives none: NotImplementedError.
    """
    S, E = query.shape[2:]
    K, P = table.shape
    key, value = _in_autocast_dtype(key, value)

    # The two sides of the score's only product, still in float32 where keys are in half precision.
    augmented_query = augment_query(query, w, table, u=u, v=v)  # [B, H, S, E + P]
    key_features = cosines_first(table).to(augmented_query.dtype)  # [K, P]

    # On a CPU, block by block. Only PyTorch's attention drops probabilities.
    if query.device.type == "cpu" and not dropout_prob:
        is_causal = mask is None and key_start is None
        bias = None if is_causal else mask_bias(S, K, mask, key_start, augmented_query)
        return plain.attention(augmented_query, key, value, key_features, bias)

    # Elsewhere, by PyTorch's kernel, which takes one dtype, and queries, keys and values of one width.
    augmented_query = augmented_query.to(key.dtype)
    key_features = key_features.to(key.dtype).expand(*key.shape[:3], P)  # [B, H, K, P]
    augmented_key = torch.cat((key, key_features), dim=-1)  # [B, H, K, E + P]
    padded_value = F.pad(value, (0, P))  # [B, H, K, E + P]
    bias = mask_bias(S, K, mask, key_start, augmented_query)
    scale = 1 / math.sqrt(E)  # as without position features: they widen the product, not the head
    attended = F.scaled_dot_product_attention(
        augmented_query, augmented_key, padded_value, bias, dropout_prob, scale=scale
    )
    return attended[..., :E]


def augment_query(query: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None) -> Tensor:
    """[q + u ; rotated f], which meets keys beside [`cosines_first`][] in one product: ``[B, H, S, E + P]``
    of ``query [B, H, S, E]``, the last S of the indices in ``table [K, P]``."""
    # In half precision, sums and rotations stay in float32: only their results are rounded, by the caller.
    exact = torch.promote_types(query.dtype, torch.float32)
    query = query.to(exact)
    w = w.to(exact)
    u = u.to(exact)
    table = table.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        with_v = query if v is None else query + v.to(exact)[:, None]
        features = torch.einsum("bhse,hep->bhsp", with_v, w)  # f: [B, H, S, P]

    # Half of the features meet the sines of the distance, half the cosines: [B, H, S, P / 2] each.
    f_s, f_c = features.chunk(2, dim=-1)
    # Of the queries' indices K − S … K − 1: [S, P / 2] each.
    sines, cosines = table[len(table) - query.shape[2] :].chunk(2, dim=-1)
    meets_cosines = f_s * sines + f_c * cosines
    meets_sines = f_c * sines - f_s * cosines
    return torch.cat((query + u[:, None], meets_cosines, meets_sines), dim=-1)


def cosines_first(table: Tensor) -> Tensor:
    """The sinusoids ``table [K, P]`` in the order of [`augment_query`][]'s features: first cosines, then
    sines, ``[K, P]``."""
    sines, cosines = table.chunk(2, dim=-1)
    return torch.cat((cosines, sines), dim=-1)


def mask_bias(S: int, K: int, mask: Tensor | None, key_start: Tensor | None, query: Tensor) -> Tensor:
    """−∞ where a query does not see a key, else 0, in the dtype and on the device of ``query``: ``[S, K]``
    where only the future is hidden, else ``[B or 1, 1, S, K]``."""
    if mask is None and key_start is None:
        return query.new_full((S, K), -math.inf).triu_(K - S + 1)
    visible = naive.causal_mask(S, K, query.device) if mask is None else mask
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    return query.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _in_autocast_dtype(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value in the dtype that PyTorch's attention would use under autocast."""
    device = "cpu" if key.is_meta else key.device.type
    if not torch.is_autocast_enabled(device) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(device)
    return key.to(dtype), value.to(dtype)
