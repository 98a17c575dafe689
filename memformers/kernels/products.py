"""Products of matrices with one or two vectors each, as fast as the matrices can be read from memory.

There are two ways to compute them, matrix times column and row times transposed matrix, which read the same
numbers in the same order. Which one is faster depends on the processor and its library: on an AMD EPYC the
first by 50 %, on an Intel Xeon the second by a factor of four. So both are timed, once in a process.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

SHAPE = (8, 1024, 64)
"""The shape of the matrices that are timed: the keys of eight heads, 2 MiB in float32."""
ROUNDS = 9
"""How often each way is timed, alternately; its shortest time counts."""
CLEARLY = 1.1
"""By what factor the second way must be faster to be used."""


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
