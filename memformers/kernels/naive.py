"""Relative attention, written as the equation: the reference that every fast kernel is compared with."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, mask: Tensor | None = None, key_start: Tensor | None = None,
    dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """Softmax attention whose scores depend on the distance d = K − S + i − j from query i to key j.

    score(i, j) = [(q_i + u)·k_j + (q_i + v)·r_d + s_d] / √E

    Source: Transformer-XL (Dai et al. 2019, arXiv 1901.02860), section 3.3; the free scalar s_d in
    place of the product v·r_d is the form with learned positions.

    Shapes: ``query [B, H, S, E]``; ``key``, ``value [B, H, K, E]`` with K ≥ S; ``r [H, K, E]``, the
    vector of each distance 0 … K−1; ``u``, ``v [H, E]``; ``s [H, K]``, the scalar of each distance;
    ``mask`` boolean, broadcastable to ``[B, H, S, K]``, true where a query may look (default: causal,
    d ≥ 0; no mask may show a key with d < 0, since such distances don't exist); ``key_start [B, S]``, int64,
    the index of the first key that each query may see, from 0 (default) to the query's, K − S + i.
    ``dropout_prob`` drops attention probabilities. Returns ``[B, H, S, E]``.
    """
    probabilities = attention_probabilities(query, key, r, u=u, v=v, s=s, mask=mask, key_start=key_start)
    probabilities = F.dropout(probabilities, dropout_prob) if dropout_prob else probabilities
    return torch.einsum("bhij,bhje->bhie", probabilities.to(value.dtype), value)


def attention_probabilities(
    query: Tensor, key: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None, s: Tensor | None = None,
    mask: Tensor | None = None, key_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The softmax of the scores above, ``[B, H, S, K]``, in float32 for half precision, under autocast
    too."""
    S, E = query.shape[2:]
    K = key.shape[2]

    # A score is an exponent: rounding it to 8 bits would lose more than all other steps together.
    exact = torch.promote_types(query.dtype, torch.float32)
    query = query.to(exact)
    key = key.to(exact)
    r = r.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        # Terms (a) and (c) of section 3.3, by key: [B, H, S, K].
        content = torch.einsum("bhie,bhje->bhij", query + u[:, None], key)
        # Terms (b) and (d), by descending distance K−1 … 0: [B, H, S, K].
        with_v = query if v is None else query + v[:, None]
        position = torch.einsum("bhie,hde->bhid", with_v, r.flip(1))
    if s is not None:
        position = position + s.flip(1)[:, None]
    scores = (content + relative_shift(position)) / math.sqrt(E)  # [B, H, S, K]

    visible = causal_mask(S, K, query.device) if mask is None else mask
    if key_start is not None:
        visible = visible & from_key_start(key_start, K)
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


def token_shift(x: Tensor, w: Tensor, starts: Tensor | None) -> Tensor:
    """x_j + w ⊙ x_{j−1}, of which keys and values are made (arXiv 2411.19574): ``x [1 + t, B, D]`` and ``w
    [D]`` to ``[t, B, D]``; x_j where ``starts [t, B]`` is true."""
    previous = x[:-1] if starts is None else x[:-1].masked_fill(starts[..., None], 0)
    return torch.addcmul(x[1:], w, previous)


def relative_shift(position: Tensor) -> Tensor:
    """Re-index ``[..., S, K]`` from descending distances d = K−1 … 0 to keys j = K − S + i − d;
    entries of the future, j > K − S + i, contain values of other rows, and the mask must hide them.

    Each row is one column further to the right than the previous row. Padding the rows with one column and
    reading them with the old length undoes this shift (Transformer-XL, appendix B).
    """
    S, K = position.shape[-2:]
    return F.pad(position, (1, 0)).flatten(-2)[..., S:].unflatten(-1, (S, K))


def causal_mask(S: int, K: int, device: torch.device) -> Tensor:
    """Boolean ``[S, K]``: query i sees every key up to its own, which has index K − S + i."""
    return torch.ones(S, K, dtype=torch.bool, device=device).tril(K - S)


def from_key_start(key_start: Tensor, K: int) -> Tensor:
    """Boolean ``[B, 1, S, K]``: query i of a stream sees the key ``key_start [B, S]`` and all later ones."""
    return torch.arange(K, device=key_start.device) >= key_start[:, None, :, None]
