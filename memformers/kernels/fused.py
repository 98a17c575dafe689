# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Relative attention on GPU, tile by tile in fast memory: no S × K matrix is ever stored.

The forward pass walks over the keys with a running softmax and keeps the output and, for each query,
the logarithm of its softmax's denominator, from which the backward pass computes probabilities again
(FlashAttention, Dao et al. 2022, arXiv 2205.14135). What is added here are the distances.

u and v never meet a query: (q + u)·k_j + (q + v)·r_d + s_d = q·k_j + q·r_d + a_j + b_d, where
a_j = u·k_j of each key and b_d = v·r_d + s_d of each distance are known beforehand.

The band. N queries and N keys, row i and column j of a tile, are at 2N − 1 different distances,
first + N − 1 + i − j. They lie in two tiles of N distances, a near one from ``first`` on and a far one
after it. Row i needs each column c of just one of them: of the near one where c ≥ i, else of the far
one (:func:`fold`).

The skew. Column c, the distance first + c or first + N + c, belongs to key column j = (i − c − 1) mod N:
a permutation of each row that is its own inverse (:func:`skew`), so the gradient goes back the same
way. And c ≥ i exactly where j ≥ i, so folding and skewing may change places.

The far distances of some keys are the near ones of the next N keys, so a program that walks over keys
multiplies each query with each distance once. The backward pass has three kernels, one by query, one
by key and one by distance; there, the queries meet a tile of distances as it is, and two tiles of keys
folded. Every number is summed by one program in a fixed order: the same inputs give the same bits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memformers.kernels.blocked import sequence_first

LOG2E = tl.constexpr(math.log2(math.e))
PROGRAMS = 512
"""Programs that the streams are shared among, if there are enough, in the kernel by distance: a few
for each multiprocessor of a large GPU."""


class Rows(NamedTuple):
    """Vectors ``[B, H, length, E]`` as a kernel takes them: where they are, and the strides."""

    data: Tensor
    stream: int
    head: int
    row: int
    length: int


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
) -> Tensor:
    """:func:`memformers.kernels.naive.relative_attention`, causal and without dropout: the same
    arguments, shapes and result, and the same gradients. Raises ValueError for heads wider than 128
    and for dtypes other than float32, float16 and bfloat16."""
    v = torch.zeros_like(u) if v is None else v
    s = r.new_zeros(r.shape[:2]) if s is None else s
    return fused_attention(query, key, value, r, u, v, s)[0]


@torch.library.custom_op("memformers::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """The output, and each query's base-2 logarithm of the sum of e^score, ``[B, H, S]``."""
    B, H, S, E = query.shape
    tiling = choose_tiling(query, backward=False)
    out, lse = sequence_first(query), query.new_empty((B, H, S), dtype=torch.float32)
    with torch.cuda.device_of(query):
        a, b = biases(key, r, u, v, s)
        inputs = rows(query), rows(key), rows(value), rows(r[None]), a, b
        programs = B * H * triton.cdiv(S, tiling["N"])
        _attention[(programs,)](*inputs, rows(out), lse, H, 1 / math.sqrt(E), **tiling)
    return out, lse


@torch.library.custom_op("memformers::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor,
    s: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, r, u, v and s."""
    (B, H, S, E), K = query.shape, key.shape[2]
    tiling, scale = choose_tiling(query, backward=True), 1 / math.sqrt(E)
    query_tiles, key_tiles = triton.cdiv(S, tiling["N"]), triton.cdiv(K, tiling["N"])
    parts = min(B, triton.cdiv(PROGRAMS, key_tiles * H))
    d_query, d_key, d_value = (sequence_first(x) for x in (query, key, value))
    d_u = u.new_empty((B, H, key_tiles, E), dtype=torch.float32)
    d_r = r.new_empty((parts, H, K, E), dtype=torch.float32)
    d_b = s.new_empty((parts, H, K), dtype=torch.float32)
    with torch.cuda.device_of(query):
        a, b = biases(key, r, u, v, s)
        delta = row_dots(grad, out)
        inputs = rows(query), rows(key), rows(value), rows(r[None]), a, b, rows(grad), lse, delta
        _by_query[(B * H * query_tiles,)](*inputs, rows(d_query), H, scale, **tiling)
        by_key = rows(d_key), rows(d_value), u.contiguous(), d_u
        _by_key[(B * H * key_tiles,)](*inputs, *by_key, H, scale, **tiling)
        _by_distance[(parts * H * key_tiles,)](*inputs, rows(d_r), d_b, B, parts, H, scale, **tiling)
    d_b = d_b.sum(0)  # [H, K]
    return (
        d_query,
        d_key,
        d_value,
        (d_r.sum(0) + d_b[:, :, None] * v[:, None]).to(r.dtype),
        d_u.sum((0, 2)).to(u.dtype),
        (d_b[:, :, None] * r).sum(1).to(v.dtype),
        d_b.to(s.dtype),
    )


@fused_attention.register_fake
def _(query, key, value, r, u, v, s):
    return sequence_first(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@fused_attention_backward.register_fake
def _(grad, out, lse, query, key, value, r, u, v, s):
    rest = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r, u, v, s))
    return *(sequence_first(x) for x in (query, key, value)), *rest


def _setup_context(ctx, inputs, output) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *inputs)


def _backward(ctx, grad, _):
    return fused_attention_backward(grad, *ctx.saved_tensors)


fused_attention.register_autograd(_backward, setup_context=_setup_context)


def choose_tiling(query: Tensor, *, backward: bool) -> dict[str, Any]:
    """How the kernels are compiled for these queries: E, its padded width W, the tile's side N, and
    how many warps and loads ahead.

    Chosen for Hopper's registers and shared memory from what the compiler reports, and not yet by
    measurement. In float32, where a product keeps its operands in registers, tiles are small.
    """
    E = query.shape[-1]
    if E > 128:
        raise ValueError(f"the fused kernel takes heads of at most 128 numbers, and d_head={E}.")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the fused kernel takes float32, float16 and bfloat16, not {query.dtype}.")
    W = max(16, triton.next_power_of_2(E))  # a product needs 16
    if query.dtype == torch.float32:
        N, warps, stages = (32, 8, 1) if W <= 64 else (16, 8, 1)
    elif W <= 64:
        N, warps, stages = 64, 4, 2 if backward else 3
    else:
        N, warps, stages = 64, 8, 2 if shared_memory(query.device) >= 160 << 10 else 1
    return {"E": E, "W": W, "N": N, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have: 227 KiB on Hopper, 163 on an A100, less on others."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def rows(x: Tensor) -> Rows:
    """``x [B, H, T, E]`` as a kernel takes it: in any order, but for each vector in one piece."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return Rows(x, x.stride(0), x.stride(1), x.stride(2), x.shape[2])


def biases(key: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """a = u·k of each key, ``[B, H, K]``, and b = v·r + s of each distance, ``[H, K]``, in float32."""
    a = row_dots(key, u.contiguous()[None, :, None].expand_as(key))
    return a, row_dots(r[None], v.contiguous()[None, :, None].expand_as(r[None]))[0] + s


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """The product of each vector of ``x [B, H, T, E]`` with that of ``y``, ``[B, H, T]`` in float32."""
    B, H, T, E = x.shape
    dots = x.new_empty((B, H, T), dtype=torch.float32)
    tiling = {"E": E, "W": triton.next_power_of_2(E), "N": 64, "enable_fp_fusion": True}
    _row_dots[(B * H * triton.cdiv(T, 64),)](rows(x), rows(y), dots, H, **tiling)
    return dots


@triton.jit
def _row_dots(x, y, dots, H, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    stream, head, first = place(x.length, H, N)
    a, b = load(x, stream, head, first, E, W, N), load(y, stream, head, first, E, W, N)
    product = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    store_numbers(dots, stream * H + head, x.length, first, product, N)


@triton.jit
def _attention(
    query, key, value, r, a, b, out, lse, H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """The output and the log-sum-exp of N queries."""
    S, K = query.length, key.length
    stream, head, i = place(S, H, N)
    first_distance = K - S + i  # of the first query to the first key
    q = load(query, stream, head, i, E, W, N)
    far = distance_scores(q, r, b, head, first_distance + 1, E, W, N)
    highest = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    context = tl.zeros([N, W], tl.float32)
    for j in range(0, tl.minimum(K, first_distance + N), N):
        near = distance_scores(q, r, b, head, first_distance - j - N + 1, E, W, N)
        k = load(key, stream, head, j, E, W, N).to(q.dtype)
        a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
        x = key_scores(q, k, a_j, fold(near, far, N), first_distance - j, scale, N)
        far = near

        higher = tl.maximum(highest, tl.max(x, axis=1))
        p = tl.exp2(x - higher[:, None])
        shrink = tl.exp2(highest - higher)
        highest, total = higher, total * shrink + tl.sum(p, axis=1)
        values = load(value, stream, head, j, E, W, N).to(q.dtype)
        context = dot(p.to(q.dtype), values, context * shrink[:, None])
    store(out, stream, head, i, context / total[:, None], E, W, N)
    store_numbers(lse, stream * H + head, S, i, highest + tl.log2(total), N)


@triton.jit
def _by_query(
    query, key, value, r, a, b, grad, lse, delta, d_query,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The gradient of N queries."""
    S, K = query.length, key.length
    stream, head, i = place(S, H, N)
    first_distance = K - S + i
    q = load(query, stream, head, i, E, W, N)
    g = load(grad, stream, head, i, E, W, N).to(q.dtype)
    lse_i, delta_i = load_statistics(lse, delta, stream * H + head, S, i, N)
    far = distance_scores(q, r, b, head, first_distance + 1, E, W, N)
    ds_before = tl.zeros([N, N], q.dtype)
    dq = tl.zeros([N, W], tl.float32)
    keys = tl.minimum(K, first_distance + N)
    for j in range(0, keys, N):
        near = distance_scores(q, r, b, head, first_distance - j - N + 1, E, W, N)
        k = load(key, stream, head, j, E, W, N).to(q.dtype)
        a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
        x = key_scores(q, k, a_j, fold(near, far, N), first_distance - j, scale, N)
        far = near

        dp = dot(g, tl.trans(load(value, stream, head, j, E, W, N).to(q.dtype)), None)
        # Softmax: dS = P ∘ (dP − rowsum(dO ∘ O)).
        ds = (tl.exp2(x - lse_i[:, None]) * (dp - delta_i[:, None])).to(q.dtype)
        dq = dot(ds, k, dq)
        # These keys' far distances were the last keys' near ones: now their gradient is complete.
        r_far = load(r, 0, head, first_distance - j + 1, E, W, N).to(q.dtype)
        dq = dot(skew(fold(ds_before, ds, N), N), r_far, dq)
        ds_before = ds
    r_near = load(r, 0, head, first_distance - tl.cdiv(keys, N) * N + 1, E, W, N).to(q.dtype)
    dq = dot(skew(fold(ds_before, tl.zeros_like(ds_before), N), N), r_near, dq)
    store(d_query, stream, head, i, dq * scale, E, W, N)


@triton.jit
def _by_key(
    query, key, value, r, a, b, grad, lse, delta, d_key, d_value, u, d_u,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The gradients of N keys and values, and these keys' part of the gradient of u."""
    S, K = query.length, key.length
    stream, head, j = place(K, H, N)
    k = load(key, stream, head, j, E, W, N)
    values = load(value, stream, head, j, E, W, N)
    a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
    dk, dv = tl.zeros([N, W], tl.float32), tl.zeros([N, W], tl.float32)
    da = tl.zeros([N], tl.float32)
    for i in range(tl.maximum(j - (K - S), 0) // N * N, S, N):
        first_distance = K - S + i - j
        q = load(query, stream, head, i, E, W, N)
        g = load(grad, stream, head, i, E, W, N).to(q.dtype)
        lse_i, delta_i = load_statistics(lse, delta, stream * H + head, S, i, N)
        near = distance_scores(q, r, b, head, first_distance - N + 1, E, W, N)
        far = distance_scores(q, r, b, head, first_distance + 1, E, W, N)
        x = key_scores(q, k.to(q.dtype), a_j, fold(near, far, N), first_distance, scale, N)

        p = tl.exp2(x - lse_i[:, None])
        dv = dot(tl.trans(p.to(q.dtype)), g, dv)
        ds = p * (dot(g, tl.trans(values.to(q.dtype)), None) - delta_i[:, None])
        da += tl.sum(ds, axis=0)
        dk = dot(tl.trans(ds.to(q.dtype)), q, dk)
    e = tl.arange(0, W)
    u_e = tl.load(u + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    store(d_key, stream, head, j, (dk + da[:, None] * u_e) * scale, E, W, N)
    store(d_value, stream, head, j, dv, E, W, N)
    du = tl.sum(da[:, None] * k.to(tl.float32), axis=0) * scale
    tl.store(d_u + tl.program_id(0).to(tl.int64) * E + e, du, mask=e < E)


@triton.jit
def _by_distance(
    query, key, value, r, a, b, grad, lse, delta, d_r, d_b, B, parts,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The gradient of N distances' q·r_d + b_d with respect to r and b, over every parts-th stream."""
    S, K = query.length, key.length
    part, head, d = place(K, H, N)
    r_d = load(r, 0, head, d, E, W, N)
    b_d = load_numbers(b, head, K, d, 0.0, N)
    dr, db = tl.zeros([N, W], tl.float32), tl.zeros([N], tl.float32)
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    begin = tl.maximum(d - (K - S), 0) // N * N
    steps = tl.cdiv(S - begin, N)
    for step in range(0, tl.cdiv(B - part, parts) * steps):
        stream, i = part + step // steps * parts, begin + step % steps * N
        q = load(query, stream, head, i, E, W, N)
        g = load(grad, stream, head, i, E, W, N).to(q.dtype)
        lse_i, delta_i = load_statistics(lse, delta, stream * H + head, S, i, N)
        # The keys to which these distances are the near ones, and those to which they are far.
        j = K - S + i - d - N + 1
        content, dp = key_products(q, g, key, value, a, stream, head, H, j, E, W, N)
        far_content, far_dp = key_products(q, g, key, value, a, stream, head, H, j + N, E, W, N)
        position = dot(q, tl.trans(r_d.to(q.dtype)), None) + b_d
        x = (fold(content, far_content, N) + skew(position, N)) * (scale * LOG2E)
        x = tl.where(j + column + tl.where(column >= row, 0, N) >= 0, x, float("-inf"))

        ds = tl.exp2(x - lse_i[:, None]) * (fold(dp, far_dp, N) - delta_i[:, None])
        ds = skew(ds, N)
        db += tl.sum(ds, axis=0)
        dr = dot(tl.trans(ds.to(q.dtype)), q, dr)
    store(d_r, part, head, d, dr * scale, E, W, N)
    store_numbers(d_b, part * H + head, K, d, db * scale, N)


@triton.jit
def distance_scores(q, r, b, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """q_i·r_d + b_d for N distances from ``first`` on, by distance."""
    r_d = load(r, 0, head, first, E, W, N).to(q.dtype)
    return dot(q, tl.trans(r_d), None) + load_numbers(b, head, r.length, first, 0.0, N)


@triton.jit
def key_scores(q, k, a_j, band, first_distance, scale, N: tl.constexpr):
    """The scores by key, times log2(e), of a tile whose first query and key are ``first_distance``
    apart, from the folded scores by distance; −∞ for keys in the future."""
    x = dot(q, tl.trans(k), skew(band, N) + a_j) * (scale * LOG2E)
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return tl.where(first_distance + row - column >= 0, x, float("-inf"))


@triton.jit
def key_products(
    q, g, key, value, a, stream, head, H, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """q·k_j + a_j and the gradient g·v_j of the probabilities, for N keys from ``first`` on."""
    k = load(key, stream, head, first, E, W, N).to(q.dtype)
    values = load(value, stream, head, first, E, W, N).to(q.dtype)
    a_j = load_numbers(a, stream * H + head, key.length, first, 0.0, N)
    return dot(q, tl.trans(k), None) + a_j, dot(g, tl.trans(values), None)


@triton.jit
def fold(near, far, N: tl.constexpr):
    """What each row needs of two tiles."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return tl.where(column >= row, near, far)


@triton.jit
def skew(x, N: tl.constexpr):
    """From distance columns to key columns, or back."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return tl.gather(x, (row - column - 1) & (N - 1), axis=1)


@triton.jit
def dot(x, y, total):
    """A matrix product added to ``total``; in float32 really that, and not TensorFloat-32."""
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def place(length, H, N: tl.constexpr):
    """The stream, head and first row of this program's tile."""
    program, tiles = tl.program_id(0), tl.cdiv(length, N)
    return program // tiles // H, program // tiles % H, program % tiles * N


@triton.jit
def addresses(x, stream, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Pointers to N rows, and which of them exist; in 64 bits, for tables may be large."""
    row, e = first + tl.arange(0, N)[:, None], tl.arange(0, W)[None, :]
    start = x.data + tl.cast(stream, tl.int64) * x.stream + tl.cast(head, tl.int64) * x.head
    return start + row.to(tl.int64) * x.row + e, (row >= 0) & (row < x.length) & (e < E)


@triton.jit
def load(x, stream, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """N rows from ``first`` on, ``[N, W]``; 0 where there is none."""
    pointers, exist = addresses(x, stream, head, first, E, W, N)
    return tl.load(pointers, mask=exist, other=0.0)


@triton.jit
def store(x, stream, head, first, tile, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Write N rows, as far as they exist."""
    pointers, exist = addresses(x, stream, head, first, E, W, N)
    tl.store(pointers, tile.to(x.data.dtype.element_ty), mask=exist)


@triton.jit
def load_numbers(x, line, length, first, other: tl.constexpr, N: tl.constexpr):
    """N numbers of one line of ``x [·, length]``; ``other`` where there is none."""
    column = first + tl.arange(0, N)
    start = x + tl.cast(line, tl.int64) * length
    return tl.load(start + column, mask=(column >= 0) & (column < length), other=other)


@triton.jit
def load_statistics(lse, delta, line, S, first, N: tl.constexpr):
    """The log-sum-exp and delta of N queries; a query that doesn't exist has no probabilities."""
    return load_numbers(lse, line, S, first, float("inf"), N), load_numbers(delta, line, S, first, 0.0, N)


@triton.jit
def store_numbers(x, line, length, first, numbers, N: tl.constexpr):
    """Write N numbers of one line, as far as they exist."""
    column = first + tl.arange(0, N)
    tl.store(x + tl.cast(line, tl.int64) * length + column, numbers, mask=column < length)
