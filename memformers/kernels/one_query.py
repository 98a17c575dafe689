"""Relative attention of a single query for each stream, as in generation, over cached keys. They are
transposed, since a row times a plain matrix is fast everywhere, in every precision."""

import math

import torch
from torch import Tensor


def attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, r_descending: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, key_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] for S = 1: ``[B, H, 1, E]``.

    Shapes: ``query [B, H, 1, E]``; ``key [B, H, E, K]``, transposed; ``value [B, H, K, E]``;
    ``r_descending [H, E, K]``, the vectors of the distances K−1 … 0, transposed too; ``u``, ``v [H, E]``, ``s
    [H, K]`` and ``key_start [B, 1]`` as there.
    """
    B, H, E, K = key.shape
    query = query.squeeze(2)  # [B, H, E]

    # The only query sees key j at distance K − 1 − j: its scores by descending distance are those by key.
    with_v = query if v is None else query + v
    position = torch.bmm(with_v.transpose(0, 1), r_descending)  # [H, B, K]
    if s is not None:
        position = position + s.flip(1)[:, None]
    position = position.transpose(0, 1).reshape(B * H, 1, K)

    with_u = (query + u).reshape(B * H, 1, E)
    scale = 1 / math.sqrt(E)
    scores = torch.baddbmm(position, with_u, key.flatten(0, 1), beta=scale, alpha=scale)  # [B·H, 1, K]
    if key_start is not None:
        is_hidden = torch.arange(K, device=key.device) < key_start[:, :, None]  # [B, 1, K]
        scores = scores.view(B, H, K).masked_fill(is_hidden, -math.inf).view(B * H, 1, K)
    return torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1)).view(B, H, 1, E)
