"""Relative attention as the equation says it: the definition that every fast kernel is compared with."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels.operators import finite_part


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    mask: Tensor | None = None,
    key_start: Tensor | None = None,
    dropout_prob: float = 0.0,
) -> Tensor:
    """Softmax attention whose scores depend on the distance d = K − S + i − j from query i to key j.

    score(i, j) = [(q_i + u)·k_j + (q_i + v)·r_d + s_d] / √E

    Source: Transformer-XL (Dai et al. 2019, arXiv 1901.02860), section 3.3; the free scalar s_d in
    place of the product v·r_d is the form with learned positions.

    Shapes: ``query [B, H, S, E]``; ``key``, ``value [B, H, K, E]`` with K ≥ S; ``r [H, K, E]``, the
    vector of each distance 0 … K−1; ``u``, ``v [H, E]``; ``s [H, K]``, the scalar of each distance;
    ``mask`` boolean, broadcastable to ``[B, H, S, K]``, true where a query may look (default: causal,
    d ≥ 0; a mask may hide more keys, but must not show one with d < 0, since such distances don't exist
    here); ``key_start [B, S]``, int64, the index of the first key that each query may see, from 0 to that of
    its own key, K − S + i (default: 0); the mask may hide more. ``dropout_prob`` drops attention
    probabilities. Returns ``[B, H, S, E]``.

    A key that is hidden reaches nothing, also if it or its value is not finite; the result is NaN for a query
    that sees one.
    """
    key, value, poison = finite_part(key, value)
    probabilities = attention_probabilities(
        query, key, r, u=u, v=v, s=s, mask=mask, key_start=key_start, poison=poison
    )
    probabilities = F.dropout(probabilities, dropout_prob) if dropout_prob else probabilities
    return torch.einsum("bhij,bhje->bhie", probabilities.to(value.dtype), value)


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    mask: Tensor | None = None,
    key_start: Tensor | None = None,
    poison: Tensor | None = None,
) -> Tensor:
    """The attention of each query to each key, ``[B, H, S, K]``: the softmax of the scores above, in float32
    if the inputs are in half precision, under autocast too. ``poison [B, H, K]`` is added to all scores of a
    key: NaN for one that is not finite ([`memformers.kernels.operators.finite_part`][]).
    """
    S, K, E = query.shape[2], key.shape[2], query.shape[3]

    # A score is an exponent: rounding it to 8 bits would lose more than all other steps together.
    exact = torch.promote_types(query.dtype, torch.float32)
    query, key, r = query.to(exact), key.to(exact), r.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        content = torch.einsum("bhie,bhje->bhij", query + u[:, None], key)
        position = torch.einsum("bhie,hde->bhid", query if v is None else query + v[:, None], r.flip(1))
    if s is not None:
        position = position + s.flip(1)[:, None]
    scores = (content + relative_shift(position)) / math.sqrt(E)  # [B, H, S, K]
    if poison is not None:
        scores = scores + poison[:, :, None]

    visible = causal_mask(S, K, query.device) if mask is None else mask
    if key_start is not None:
        visible = visible & from_key_start(key_start, K)
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


def relative_shift(position: Tensor) -> Tensor:
    """Re-index ``[..., S, K]`` from descending distances d = K−1 … 0 to keys j = K − S + i − d;
    entries of the future, j > K − S + i, contain values of other rows, and the mask must hide them.

    Distances are already in the order of keys, but each row is one column further to the right than the
    previous row. Padding the rows with one column and then reading them with the old length undoes this
    shift (Transformer-XL, appendix B).
    """
    S, K = position.shape[-2:]
    return F.pad(position, (1, 0)).flatten(-2)[..., S:].unflatten(-1, (S, K))


def causal_mask(S: int, K: int, device: torch.device) -> Tensor:
    """Boolean ``[S, K]``: query i sees every key up to its own, which has index K − S + i."""
    return torch.ones(S, K, dtype=torch.bool, device=device).tril(K - S)


def from_key_start(key_start: Tensor, K: int) -> Tensor:
    """Boolean ``[B, 1, S, K]``: query i of a stream sees the key ``key_start [B, S]`` and all later ones."""
    return torch.arange(K, device=key_start.device) >= key_start[:, None, :, None]
