"""A layer's attention over keys and values that are kept, as text is read and written token by token."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor, nn

from memformers.kernels import single
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.boundaries import first_in_window
from memformers.models.linear import affine, fold, linear, standardized


class KeyValueCache(Protocol):
    """What keeps the keys and values of one layer."""

    key: Tensor
    """``[B, H, T, E]``, a buffer of T columns."""
    value: Tensor
    """``[B, H, E, T]``: transposed, since a sum over positions then reads memory in order."""

    def append(self, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in the stream's next ``inputs [t, B, D]`` and their ``key``, ``value [B, H, t, E]``."""

    def columns(self, newest: int | None) -> list[slice]:
        """Where the keys lie, oldest first; only the ``newest`` of them unless that is None."""


class CachedAttention:
    """Attention of a layer whose weights don't change any more over ``cache``, as a function of the layer's
    input ``x [t, B, D]``; it appends x with its keys and values.

    The scale and shift of ``norm`` are folded into the projections, 1/√E into the queries', and the position
    terms of all ``longest`` distances are computed once. With a ``window``, each position sees only that many
    of the newest keys, its own included.
    """

    def __init__(
        self,
        attention: RelativeMultiHeadAttention,
        norm: nn.LayerNorm | None,
        cache: KeyValueCache,
        longest: int,
        window: int | None = None,
    ):
        self.attention, self.norm, self.cache, self.window = attention, norm, cache, window
        self.scale = 1 / math.sqrt(attention.d_model // attention.heads)
        maps = [fold(norm, m) for m in (attention.query, attention.key, attention.value)]
        (w_query, b_query), *_ = maps
        maps[0] = w_query * self.scale, b_query * self.scale
        self.projections = torch.cat([w for w, _ in maps]), torch.cat([b for _, b in maps])
        terms = attention.distance_terms(longest)
        # By descending distance, K−1 … 0, so that a shorter past takes the end of it.
        self.terms = {"r": terms["r"].flip(1).contiguous()}  # [H, K, E]
        self.terms |= {n: terms[n][:, None] * self.scale for n in ("u", "v") if n in terms}  # [H, 1, E]
        if "s" in terms:
            self.terms["s"] = terms["s"].flip(1)[:, None] * self.scale  # [H, 1, K]

    def __call__(self, x: Tensor, key_start: Tensor | None = None) -> Tensor:
        """``x [t, B, D]`` to the same; ``key_start``, int64 ``[B, t]``, is the index of the first key that
        each query may see, None for all."""
        query, key, value = self.project(x)
        self.cache.append(x, key, value)
        if x.shape[0] > 1:
            return self.several(query, key_start)
        columns = self.cache.columns(self.window if key_start is None else None)
        if key_start is not None:
            key_start = self.within_window(key_start, columns, query)
        context = single.relative_attention(
            query, self.cache.key, self.cache.value, columns=columns, **self.terms, key_start=key_start
        )
        return linear(self.attention.output, rearrange(context, "b h t e -> t b (h e)"))

    def project(self, x: Tensor) -> Tensor:
        """Queries over √E, keys and values of ``x [t, B, D]``: ``[3, B, H, t, E]``."""
        projected = affine(self.projections, standardized(self.norm, x))  # [t, B, 3 D]
        return rearrange(projected, "t b (three h e) -> three b h t e", three=3, h=self.attention.heads)

    def several(self, query: Tensor, key_start: Tensor | None) -> Tensor:
        """Causal attention of several positions, ``query [B, H, t, E]``, from ``key_start [B, t]`` on, as in
        training: ``[t, B, D]``."""
        columns = self.cache.columns(None)
        key = torch.cat([self.cache.key[:, :, run] for run in columns], dim=2)
        value = torch.cat([self.cache.value[..., run].mT for run in columns], dim=2)
        key_start = self.within_window(key_start, columns, query)
        return self.attention.attend(query / self.scale, key, value, key_start=key_start)

    def within_window(
        self, key_start: Tensor | None, columns: Sequence[slice], query: Tensor
    ) -> Tensor | None:
        """``key_start [B, t]``, or the first key of the span where that is newer, for ``query [B, H, t, E]``
        and the keys in ``columns``; None where both are None."""
        if self.window is None:
            return key_start
        (B, _, S, _), K = query.shape, sum(run.stop - run.start for run in columns)
        nearest = first_in_window(S, K, self.window, query.device).expand(B, S)
        return nearest if key_start is None else torch.maximum(key_start, nearest)
