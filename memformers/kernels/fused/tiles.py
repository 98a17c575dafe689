# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Functions of the fused kernels: they read and write tiles, and arrange the distances in them.

The band. N queries and N keys, row i and column j of a tile, are at 2N − 1 distances, first + N − 1 + i − j,
in two tiles of N: a near one from ``first`` on, and a far one after it. Row i needs each column c from one of
them: the near one if c ≥ i, otherwise the far one ([`fold`][]).

The skew. Column c, the distance first + c or first + N + c, belongs to key column j = (i − c − 1) mod N: a
permutation of each row that is its own inverse ([`skew`][]), so it serves the gradient too. c ≥ i exactly
where j ≥ i, so folding and skewing may be swapped.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """Vectors ``[B, H, length, E]`` as a kernel takes them: their memory and its strides."""

    data: Tensor
    stream: int
    head: int
    row: int
    length: int


@triton.jit
def fold(near, far, N: tl.constexpr):
    """The columns that each row needs of two tiles."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return tl.where(column >= row, near, far)


@triton.jit
def skew(x, N: tl.constexpr):
    """From distance columns to key columns, or back."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return tl.gather(x, (row - column - 1) & (N - 1), axis=1)


@triton.jit
def kept(seed, dropout, line, i, at, N: tl.constexpr):
    """By what dropout multiplies the probabilities of N queries from ``i`` on for the keys ``at``, ``[N, N]``
    or ``[1, N]``: 0, or 1 / (1 − dropout), by the seed, the ``line`` (a stream and head), the query and the
    key alone (Philox: Salmon et al. 2011), so that all passes drop the same."""
    share = 1.0
    if seed is not None:
        zero = tl.zeros([N, N], tl.int32)
        query = i + tl.arange(0, N)[:, None] + zero
        drawn, _, _, _ = tl.philox(tl.load(seed), at + zero, query, line + zero, zero)
        uniform = (drawn >> 8).to(tl.float32) * (1.0 / (1 << 24))
        share = tl.where(uniform >= dropout, 1 / (1 - dropout), 0.0)
    return share


@triton.jit
def dot(x, y, total):
    """A matrix product added to ``total``; float32 is computed in full precision, without TensorFloat-32."""
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def place(length, H, N: tl.constexpr):
    """The stream, head and first row of this program's tile."""
    program, tiles = tl.program_id(0), tl.cdiv(length, N)
    return program // tiles // H, program // tiles % H, program % tiles * N


@triton.jit
def addresses(x, stream, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Pointers to N rows, and which of them exist; in 64 bits, since tables may be large."""
    row, e = first + tl.arange(0, N)[:, None], tl.arange(0, W)[None, :]
    start = x.data + tl.cast(stream, tl.int64) * x.stream + tl.cast(head, tl.int64) * x.head
    return start + row.to(tl.int64) * x.row + e, (row >= 0) & (row < x.length) & (e < E)


@triton.jit
def load(x, stream, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """N rows, beginning with ``first``, ``[N, W]``; 0 for rows that don't exist."""
    pointers, exist = addresses(x, stream, head, first, E, W, N)
    return tl.load(pointers, mask=exist, other=0.0)


@triton.jit
def store(x, stream, head, first, tile, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Write those of N rows that exist."""
    pointers, exist = addresses(x, stream, head, first, E, W, N)
    tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=exist)


@triton.jit
def load_numbers(x, line, length, first, other: tl.constexpr, N: tl.constexpr):
    """N numbers of one line of ``x [·, length]``; ``other`` for numbers that don't exist."""
    column = first + tl.arange(0, N)
    start = x + tl.cast(line, tl.int64) * length
    return tl.load(start + column, mask=(column >= 0) & (column < length), other=other)


@triton.jit
def store_numbers(x, line, length, first, numbers, N: tl.constexpr):
    """Write those of N numbers of one line that exist."""
    column = first + tl.arange(0, N)
    tl.store(x + tl.cast(line, tl.int64) * length + column, numbers, mask=column < length)
