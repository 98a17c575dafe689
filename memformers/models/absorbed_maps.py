"""Attention of a short segment to a long memory without keys and values of either: see
[`memformers.kernels.absorbed`][].

Keys and values of K inputs take K·D² products each. Without them, scores and sums take S·K·D for each of H
heads instead of S·K·E: together, S / E of the products of keys and values.
"""

import torch
from torch import Tensor

from memformers.kernels import absorbed, is_concrete_cpu
from memformers.models.attention import RelativeMultiHeadAttention

MIN_WIDTHS = 2
"""The least E / S: attention and its gradient take 0.74 of the time with S = 16, E = 32 and M = 128."""
MIN_MEMORIES = 4
"""The least M / S: with S = 8 and E = 32, they take 0.84 of the time at M = 32, but 1.03 at M = 16."""


def is_absorbing_faster(attention: RelativeMultiHeadAttention, x: Tensor, past: Tensor) -> bool:
    """Whether [`attend_absorbed`][] from ``x [S, B, D]`` to ``past [M, B, D]`` is faster than keys and
    values, and equal up to rounding in float32. It was measured on CPUs only."""
    is_exact = x.element_size() >= 4 and not torch.is_autocast_enabled("cpu")
    has_dropout = attention.training and attention.dropout_prob > 0
    if attention.kernel != "auto" or not is_concrete_cpu(x) or not is_exact or has_dropout:
        return False
    S = len(x)
    d_head = attention.d_model // attention.n_heads
    return d_head >= MIN_WIDTHS * S and len(past) >= MIN_MEMORIES * S


def attend_absorbed(
    attention: RelativeMultiHeadAttention,
    query: Tensor,
    past: Tensor,
    kv_input: Tensor,
    key_map: tuple[Tensor, Tensor],
    value_map: tuple[Tensor, Tensor],
    key_start: Tensor | None,
) -> Tensor:
    """Attention of a projected ``query [S, B, D]`` to keys and values of the normalized ``past [M, B, D]``
    and ``kv_input [S, B, D]``, which are not computed, and the output map: ``[S, B, D]``. The maps are weight
    ``[D, D]`` and bias ``[D]``; ``key_start [B, S]`` is the first key that each query may see."""
    # The bias of keys adds the same to all scores of a query, so softmax doesn't depend on it.
    w_key, _ = key_map
    w_value, value_bias = value_map
    by_head = attention.n_heads, -1, attention.d_model
    attended = absorbed.relative_attention(
        attention.by_head(query), past.transpose(0, 1), kv_input.transpose(0, 1),
        w_key=w_key.view(by_head), w_value=w_value.view(by_head),
        **attention.distance_terms(len(past) + len(query)), key_start=key_start,
    )  # fmt: skip
    # Probabilities sum to 1, so the bias of values is added once.
    return attention.output(attention.join_heads(attended) + value_bias)
