"""Relative attention of a single query over cached keys and values, for generating text token by token.

The cache is one buffer, which contains keys in a few ranges of columns. One product is over the whole buffer,
and the columns outside of these ranges get a score of −∞. Values are transposed, and position terms are
ordered by descending distance, so that a sum over positions reads memory in order.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memformers.kernels.products import products


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    columns: Sequence[slice],
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][] of the newest position over the keys in
    ``columns``, which are in order of time; the query's own key is the last.

    Shapes: ``query [B, H, 1, E]``; ``key [B, H, T, E]`` and ``value [B, H, E, T]``, buffers of T columns;
    ``r [H, K, E]`` and ``s [H, 1, K]`` by descending distance K−1 … 0, for at least as many distances as
    there are keys; ``u``, ``v [H, 1, E]``. ``query``, ``u``, ``v`` and ``s`` are divided by √E already;
    ``key_start [B, 1]`` counts the keys in the order of ``columns``. Returns ``[B, H, 1, E]``.
    """
    B, H, T, _ = key.shape
    by_head = query if v is None else query + v
    position = products(r, by_head.squeeze(2).transpose(0, 1))  # [H, B, K]
    position = (position if s is None else position + s).transpose(0, 1)  # [B, H, K]

    scores = query.new_full((B, H, T), -math.inf)
    begin = r.shape[1] - sum(run.stop - run.start for run in columns)
    for run in columns:
        end = begin + run.stop - run.start
        scores[..., run], begin = position[..., begin:end], end
    if key_start is not None:
        hide(scores, columns, key_start)
    content = products(key.flatten(0, 1), (query + u).flatten(0, 1))  # [B·H, 1, T]
    probabilities = scores.flatten(0, 1)[:, None].add_(content).softmax(-1)  # [B·H, 1, T]
    return products(value.flatten(0, 1), probabilities).view_as(query)


def hide(scores: Tensor, columns: Sequence[slice], key_start: Tensor) -> None:
    """Write −∞ to ``scores [B, H, T]`` for the keys in ``columns`` that come before key ``key_start [B,
    1]``."""
    begin = 0
    for run in columns:
        end = begin + run.stop - run.start
        keys = torch.arange(begin, end, device=key_start.device)
        scores[..., run].masked_fill_(keys < key_start[:, :, None], -math.inf)
        begin = end
