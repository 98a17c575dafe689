"""How scores are divided into blocks, and the layout of a block in memory.

The relative shift costs nothing. A block's position scores are one matrix product for each head, W
``[h, s·b, w]``: rows by query and stream, columns by descending distance w−1 … 0, with w > k. Query i's
score for key j, at distance d = k − s + i − j, is in column w − 1 − d = w − 1 − k + s − i + j of its
row. The next query's row starts b·w elements later, and its column is one less. So the same memory, read from
element w − 1 − k + s with a stride of b·w − 1 elements between queries, *is* the position score by key, and
the gradient of the scores, written through this view, is that of W. (In the future, the view reads entries
that no distance uses.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE = 1 << 21
"""The most numbers in W: 8 MiB in float32; more only if two pairs of head and stream need more."""
QUERIES = 256
"""The most queries in a block: few, so that few scores that the causal mask hides are computed."""
ALIGNED = 16
"""What divides the length of W's rows: matrix products write such rows faster."""


@dataclass(frozen=True)
class Block:
    """Some queries of some heads of some streams, and the keys and distances that they see."""

    heads: slice
    streams: slice
    queries: slice
    keys: slice
    distances: slice  # their columns in a table by descending distance
    last: bool  # whether these are the segment's last queries
    shape: tuple[int, int, int, int, int]  # h, b, s and k, their numbers, and w, the length of W's rows

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """The index of its queries' part ``[b, h, s, E]`` of an ``[B, H, S, E]``."""
        return self.streams, self.heads, self.queries

    def columns(self, x: Tensor) -> Tensor:
        """Its keys' part ``[n, E, k]`` of ``x [B, H, K, E]``, by pairs of stream and head, n = b·h: a view if
        the memory of ``x`` is sequence first, since a block has all heads or one stream."""
        return x[self.streams, self.heads, self.keys].transpose(2, 3).flatten(0, 1)

    def unpair(self, x: Tensor) -> Tensor:
        """``[n, s, ·]`` separated into streams and heads, ``[b, h, s, ·]``."""
        return x.unflatten(0, (self.shape[1], self.shape[0]))

    def scores(self, workspace: Tensor) -> Tensor:
        """Space for the block's scores ``[n, s, k]``, in a workspace ``[·]`` that is large enough."""
        h, b, s, k, _ = self.shape
        return workspace[: b * h * s * k].view(b * h, s, k)

    def split(self, workspace: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """The same memory ``[·]`` read by descending distance, ``[h, s·b, w]``, and by key, ``[b, h, s, k]``,
        for ``b`` streams."""
        h, _, s, k, w = self.shape
        by_distance = workspace[: h * s * b * w].view(h, s * b, w)
        by_key = workspace.as_strided((b, h, s, k), (w, s * b * w, b * w - 1, 1), w - 1 - k + s)
        return by_distance, by_key

    def accumulate(self, gradient: Tensor, scores: Tensor, x: Tensor) -> None:
        """Add the product of ``scores [n, s, k]`` and ``x [n, s, E]`` over queries to ``gradient
        [B, H, K, E]``; the segment's last queries come first and write it."""
        target = gradient[self.streams, self.heads, self.keys].view(len(scores), -1, x.shape[-1])  # [n, k, E]
        if self.last:
            torch.bmm(scores.mT, x, out=target)
        else:  # baddbmm_ into pairs that aren't adjacent would compute one product for each pair
            target += torch.bmm(scores.mT, x)


def blocks(query: Tensor, key: Tensor, key_start: Tensor | None = None) -> Iterator[Block]:
    """Blocks that cover all of ``query [B, H, S, E]`` over ``key [B, H, K, E]``, the last queries first: all
    heads of some streams, or some heads of one; of 2, 4, 8 … pairs, which threads share evenly.

    A block of one stream starts with the first key that any of its queries sees, by ``key_start [B, S]``;
    blocks of several have all keys, so that no stream's computation depends on another's.
    """
    (B, H, S, _), K = query.shape, key.shape[2]
    s, columns = min(S, QUERIES), K + padding_columns(K)
    n = 1 << max((WORKSPACE // (s * columns)).bit_length() - 1, 1)
    h, b = min(H, n), max(min(B, n // H), 1)
    for stop in range(S, 0, -s):
        queries = slice(max(stop - s, 0), stop)
        for stream in range(0, B, b):
            begin = 0 if key_start is None or b > 1 else int(key_start[stream, queries].min())
            streams, keys = slice(stream, min(stream + b, B)), slice(begin, K - S + stop)
            k = keys.stop - begin
            w = k + padding_columns(k)
            for head in range(0, H, h):
                heads = slice(head, min(head + h, H))
                shape = heads.stop - head, streams.stop - stream, stop - queries.start, k, w
                yield Block(heads, streams, queries, keys, slice(columns - w, columns), stop == S, shape)


def padding_columns(k: int) -> int:
    """The number of columns, at least one, that W has before those of the distances for ``k`` keys."""
    return ALIGNED - k % ALIGNED
