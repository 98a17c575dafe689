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
ALIGNMENT = 16
"""The length of W's rows is a multiple of this, since matrix products write such rows faster."""


@dataclass(frozen=True)
class Block:
    """Some queries of some heads of some streams, and the keys and distances that they see."""

    heads: slice
    streams: slice
    queries: slice
    keys: slice
    # The columns of its distances in a table by descending distance.
    distances: slice
    # Whether these are the segment's last queries.
    is_last: bool
    # Numbers of heads, streams, queries and keys, h, b, s and k, and the length of W's rows, w.
    shape: tuple[int, int, int, int, int]

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
        # Strides of stream, head, query and key: the next query's row is b·w further, its distances one less.
        strides = (w, s * b * w, b * w - 1, 1)
        by_key = workspace.as_strided((b, h, s, k), strides, w - 1 - k + s)
        return by_distance, by_key

    def accumulate(self, gradient: Tensor, scores: Tensor, x: Tensor) -> None:
        """Add the product of ``scores [n, s, k]`` and ``x [n, s, E]`` over queries to ``gradient
        [B, H, K, E]``; the segment's last queries come first and write it."""
        target = gradient[self.streams, self.heads, self.keys].view(len(scores), -1, x.shape[-1])  # [n, k, E]
        if self.is_last:
            torch.bmm(scores.mT, x, out=target)
        else:
            # baddbmm_ into pairs that aren't adjacent would compute one product for each pair.
            target += torch.bmm(scores.mT, x)


def blocks(query: Tensor, key: Tensor, key_start: Tensor | None = None) -> Iterator[Block]:
    """Blocks that cover all of ``query [B, H, S, E]`` over ``key [B, H, K, E]``, the last queries first: all
    heads of some streams, or some heads of one; of 2, 4, 8 … pairs, which threads share evenly.

    A block of one stream starts with the first key that any of its queries sees, by ``key_start [B, S]``;
    blocks of several have all keys, so that no stream's computation depends on another's.
    """
    B, H, S, _ = query.shape
    K = key.shape[2]

    # The most queries, pairs, heads and streams in a block.
    max_queries = min(S, QUERIES)
    n_columns = K + padding_columns(K)
    max_pairs = 1 << max((WORKSPACE // (max_queries * n_columns)).bit_length() - 1, 1)
    max_heads = min(H, max_pairs)
    max_streams = max(min(B, max_pairs // H), 1)

    for query_stop in range(S, 0, -max_queries):
        queries = slice(max(query_stop - max_queries, 0), query_stop)
        for stream in range(0, B, max_streams):
            streams = slice(stream, min(stream + max_streams, B))
            first_key = 0
            if key_start is not None and max_streams == 1:
                first_key = int(key_start[stream, queries].min())
            # Causal: the block's last query sees keys up to its own.
            keys = slice(first_key, K - S + query_stop)
            k = keys.stop - keys.start
            w = k + padding_columns(k)
            for head in range(0, H, max_heads):
                heads = slice(head, min(head + max_heads, H))
                h = heads.stop - heads.start
                b = streams.stop - streams.start
                s = queries.stop - queries.start
                distances = slice(n_columns - w, n_columns)
                yield Block(heads, streams, queries, keys, distances, query_stop == S, (h, b, s, k, w))


def padding_columns(k: int) -> int:
    """The number of columns, at least one, that W has before those of the distances for ``k`` keys."""
    return ALIGNMENT - k % ALIGNMENT
