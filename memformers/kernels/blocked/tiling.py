"""How scores are cut into blocks, and how a block lies in memory.

The relative shift costs nothing. A block's position scores are one matrix product a head, W
``[h, s·b, K + 1]``: rows by query and stream, columns by descending distance K … 0. Query i's score
for key j, at distance d = K − s + i − j, stands in column K − d = s − i + j of its row. From one query
to the next a row begins b·(K + 1) elements later, and the column moves one back: so the same memory,
read from element s on with b·(K + 1) − 1 elements from query to query, *is* the position score by key.
The gradient of the scores, written through that view, is the gradient of W. (What the view shows as a
score of the future are entries that no distance uses: column K, and distances longer than query i has.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE = 1 << 20
"""Scores in a block of several heads or streams, at most: 4 MiB in float32."""
QUERIES = 256
"""Queries in a block, at most; so few of the keys that the causal mask hides are computed."""


@dataclass(frozen=True)
class Block:
    """Some queries of some heads of some streams, and the keys and distances that they see."""

    heads: slice
    streams: slice
    queries: slice
    keys: slice
    distances: slice
    """In a table by descending distance."""
    last: bool
    """Whether these are the segment's last queries, which see every key."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many heads h, streams b, queries s and keys k it has."""
        h, b, s, k = (p.stop - p.start for p in (self.heads, self.streams, self.queries, self.keys))
        return h, b, s, k

    def of(self, x: Tensor, positions: slice) -> Tensor:
        """The block's part ``[b, h, t, E]`` of ``x [B, H, ·, E]``."""
        return x[self.streams, self.heads, positions]

    def pairs(self, x: Tensor, positions: slice) -> Tensor:
        """That part by pairs of stream and head, ``[n, t, E]`` with n = b·h; a view where the memory
        of ``x`` is sequence first, since a block has all heads or one stream."""
        return self.of(x, positions).permute(2, 0, 1, 3).flatten(1, 2).transpose(0, 1)

    def unpair(self, x: Tensor) -> Tensor:
        """``[n, t, ·]`` by streams and heads again, ``[b, h, t, ·]``."""
        h, b, _, _ = self.shape
        return x.unflatten(0, (b, h))

    def unrow(self, x: Tensor) -> Tensor:
        """``[h, s·b, E]`` as ``[b, h, s, E]``."""
        _, b, s, _ = self.shape
        return x.unflatten(1, (s, b)).permute(2, 0, 1, 3)

    def scores(self, workspace: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Room for the block's ``[n, s, k]``, in the workspace or, if there is none, of its own."""
        h, b, s, k = self.shape
        if workspace is None:
            return torch.empty(b * h, s, k, dtype=dtype)
        return workspace[: b * h * s * k].view(b * h, s, k)

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """The same memory read by descending distance, ``[h, s·b, k + 1]``, and by key,
        ``[b, h, s, k]``."""
        h, b, s, k = self.shape
        row = k + 1
        by_distance = workspace[: h * s * b * row].view(h, s * b, row)
        by_key = workspace.as_strided((b, h, s, k), (row, s * b * row, b * row - 1, 1), s)
        return by_distance, by_key

    def clear_unused(self, workspace: Tensor) -> None:
        """Set what is in the view by distance, ``[h, s·b, k + 1]``, and not in the view by key to 0: one
        number between any two rows of a head that belong to the same query, and what comes before its
        first row."""
        h, b, s, k = self.shape
        row = k + 1
        workspace[: h * s * b * row].view(h, s * b * row)[:, :s] = 0.0
        workspace.as_strided((h, s, b - 1), (s * b * row, b * row - 1, row), s + k).zero_()

    def accumulate(self, gradient: Tensor, scores: Tensor, x: Tensor) -> None:
        """Into ``gradient [B, H, K, E]``, the product of ``scores [n, s, k]`` and ``x [n, s, E]``
        over queries. The segment's last queries come first, and their keys are all that there are."""
        target = self.of(gradient, self.keys).view(len(scores), -1, x.shape[-1])
        if self.last:
            torch.bmm(scores.transpose(1, 2), x, out=target)
        else:
            target.baddbmm_(scores.transpose(1, 2), x)


def blocks(query: Tensor, key: Tensor) -> Iterator[Block]:
    """Blocks that cover all of ``query [B, H, S, E]`` over ``key [B, H, K, E]``: all heads of some streams
    where they are small, or some heads of one stream; the last queries first. There are 2, 4, 8 … pairs of
    head and stream in a block, because the matrix products share them out among threads, and 3 pairs for 2
    threads take as long as 4."""
    (B, H, S, _), K = query.shape, key.shape[2]
    s = min(S, QUERIES)
    n = 1 << max((WORKSPACE // (s * K)).bit_length() - 1, 1)
    h, b = min(H, n), max(min(B, n // H), 1)
    for stream in range(0, B, b):
        for head in range(0, H, h):
            for stop in range(S, 0, -s):
                yield Block(
                    heads=slice(head, min(head + h, H)),
                    streams=slice(stream, min(stream + b, B)),
                    queries=slice(max(stop - s, 0), stop),
                    keys=slice(0, K - S + stop),
                    distances=slice(S - stop, K + 1),
                    last=stop == S,
                )


def count_scores(query: Tensor, key: Tensor) -> int:
    """How many scores ``query [B, H, S, E]`` and ``key [B, H, K, E]`` have, about: the causal mask may save
    some."""
    return query.shape[:3].numel() * key.shape[2]


def largest_block(query: Tensor, key: Tensor) -> int:
    """How many numbers a workspace for ``query [B, H, S, E]`` and ``key [B, H, K, E]`` must hold, by distance
    or by key."""
    h, b, s, k = next(blocks(query, key)).shape
    return h * b * s * (k + 1) + s
