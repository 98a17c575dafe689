"""Relative attention of a single query over cached keys and values, for generating text token by token.

The cache is one buffer, which contains keys in a few ranges of columns. One product is over the whole buffer,
and the columns outside of these ranges get a score of −∞. Values are transposed, and position terms are
ordered by descending distance, so that a sum over positions reads memory in order.

Such products of matrices with one or two vectors each take as long as reading the matrices from memory. There
are two ways to compute them, matrix times column and row times transposed matrix, which read the same numbers
in the same order. Which one is faster depends on the processor and its library: on an AMD EPYC the first by
50 %, on an Intel Xeon the second by a factor of four. So both are timed, once in a process.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

SHAPE = (8, 1024, 64)
"""The shape of the matrices that are timed: the keys of eight heads, 2 MiB in float32."""
ROUNDS = 9
"""How often each way is timed, alternately; its shortest time counts."""
CLEARLY = 1.1
"""By what factor the second way must be faster to be used."""


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
    first = begin = r.shape[1] - sum(run.stop - run.start for run in columns)
    for run in columns:
        end = begin + run.stop - run.start
        part = position[..., begin:end]
        if key_start is not None:
            keys = torch.arange(begin - first, end - first, device=key_start.device)
            part = part.masked_fill(keys < key_start[:, :, None], -math.inf)
        scores[..., run], begin = part, end
    content = products(key.flatten(0, 1), (query + u).flatten(0, 1))  # [B·H, 1, T]
    probabilities = scores.flatten(0, 1)[:, None].add_(content).softmax(-1)  # [B·H, 1, T]
    return products(value.flatten(0, 1), probabilities).view_as(query)


def products(matrices: Tensor, vectors: Tensor) -> Tensor:
    """``matrices [n, rows, columns]``, whose rows are contiguous in memory, times ``vectors
    [n, few, columns]``: ``[n, few, rows]``."""
    if vectors.device.type == "cpu" and not torch.compiler.is_compiling() and rows_are_faster():
        return by_rows(matrices, vectors)
    return by_columns(matrices, vectors)


def by_columns(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Matrix times column: ``matrices [n, rows, columns]``, ``vectors [n, few, columns]`` to
    ``[n, few, rows]``."""
    return torch.bmm(matrices, vectors.mT).mT


def by_rows(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Row times transposed matrix, of the same shapes: ``[n, few, rows]``."""
    return torch.bmm(vectors, matrices.mT)


@cache
def rows_are_faster() -> bool:
    """Whether [`by_rows`][] is clearly faster than [`by_columns`][] on this processor; the first
    call takes some milliseconds."""
    with torch.inference_mode():
        matrices, vectors = torch.ones(SHAPE), torch.ones(SHAPE[0], 1, SHAPE[2])
        times = [[seconds(way, matrices, vectors) for way in (by_columns, by_rows)] for _ in range(ROUNDS)]
    columns, rows = map(min, zip(*times, strict=True))
    return rows * CLEARLY < columns


def seconds(way: Callable[[Tensor, Tensor], Tensor], matrices: Tensor, vectors: Tensor) -> float:
    """How long ``way`` takes for ``matrices [n, rows, columns]`` and ``vectors [n, few, columns]``."""
    begin = time.perf_counter()
    way(matrices, vectors)
    return time.perf_counter() - begin
