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
    K = key.shape[2]
    key, value = _in_autocast_dtype(key, value)
    query = score_queries(query, w, table, u=u, v=v)  # [B, H, S, E + P]
    table = key_table(table).to(query.dtype)  # [K, P]
    # PyTorch's attention on a CPU drops probabilities, the plain one doesn't.
    if query.device.type == "cpu" and not dropout_prob:
        is_causal = mask is None and key_start is None
        bias = None if is_causal else hidden_bias(S, K, mask, key_start, query)
        return plain.attention(query, key, value, table, bias)
    query = query.to(key.dtype)
    key = torch.cat((key, table.to(key.dtype).expand(*key.shape[:3], -1)), dim=-1)
    value = F.pad(value, (0, table.shape[1]))
    bias = hidden_bias(S, K, mask, key_start, query)
    attended = F.scaled_dot_product_attention(query, key, value, bias, dropout_prob, scale=1 / math.sqrt(E))
    return attended[..., :E]


def score_queries(query: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None) -> Tensor:
    """What meets keys and a [`key_table`][] in one product, of ``query [B, H, S, E]``, the last S of the
    indices in ``table [K, P]``: q + u, and the rotated features, ``[B, H, S, E + P]``."""
    # The sums and rotations are exact in half precision too: only their results are rounded.
    exact = torch.promote_types(query.dtype, torch.float32)
    query, w, u, table = query.to(exact), w.to(exact), u.to(exact), table.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        with_v = query if v is None else query + v.to(exact)[:, None]
        features = torch.einsum("bhse,hep->bhsp", with_v, w)  # [B, H, S, P]
    for_sines, for_cosines = features.chunk(2, dim=-1)  # [B, H, S, P / 2] each
    sines, cosines = table[len(table) - query.shape[2] :].chunk(2, dim=-1)  # [S, P / 2] each
    meets_cosines = for_sines * sines + for_cosines * cosines
    meets_sines = for_cosines * sines - for_sines * cosines
    return torch.cat((query + u[:, None], meets_cosines, meets_sines), dim=-1)


def key_table(table: Tensor) -> Tensor:
    """What the rotated features of queries meet, of the sinusoids ``table [K, P]``: first cosines, then
    sines, ``[K, P]``."""
    sines, cosines = table.chunk(2, dim=-1)
    return torch.cat((cosines, sines), dim=-1)


def hidden_bias(S: int, K: int, mask: Tensor | None, key_start: Tensor | None, like: Tensor) -> Tensor:
    """−∞ where a query does not see a key, else 0, in the dtype and on the device of ``like``: ``[S, K]``
    where only the future is hidden, else ``[B or 1, 1, S, K]``."""
    if mask is None and key_start is None:
        return like.new_full((S, K), -math.inf).triu_(K - S + 1)
    visible = naive.causal_mask(S, K, like.device) if mask is None else mask
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    return like.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _in_autocast_dtype(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch's attention would compute with under autocast."""
    device = "cpu" if key.is_meta else key.device.type
    if not torch.is_autocast_enabled(device) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(device)
    return key.to(dtype), value.to(dtype)
