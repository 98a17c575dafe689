# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The kernels of the fused attention: its forward pass and three backward passes.

The forward pass has a running softmax over the keys, and keeps the logarithm of its denominator, from which
the backward pass computes probabilities again (FlashAttention, Dao et al. 2022, arXiv 2205.14135).

(q + u)·k_j + (q + v)·r_d + s_d = q·k_j + q·r_d + a_j + b_d: a_j = u·k_j and b_d = v·r_d + s_d come ready.

The near distances of some keys are the far ones of the next N, so a program that iterates over keys
multiplies each query with each distance once. Every number is summed by one program in a fixed order, so the
same inputs give the same bits.
"""

import math

import triton
import triton.language as tl

from memformers.kernels.fused.tiles import (
    dot,
    fold,
    kept,
    load,
    load_numbers,
    place,
    skew,
    store,
    store_numbers,
)

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def dot_rows(x, y, dots, H, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """The product of each vector of x with that of y, for N of them."""
    stream, head, first = place(x.length, H, N)
    a, b = load(x, stream, head, first, E, W, N), load(y, stream, head, first, E, W, N)
    product = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    store_numbers(dots, stream * H + head, x.length, first, product, N)


@triton.jit
def split_keys(
    key, value, u, first, finite_key, finite_value, a,
    H, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """N keys and values with 0 in place of numbers that are not finite, and a_j = u·k_j, NaN where there were
    such numbers, except before the ``first`` key that any query sees: rows of no query see all keys."""
    stream, head, j = place(key.length, H, N)
    k, values = load(key, stream, head, j, E, W, N), load(value, stream, head, j, E, W, N)
    e = tl.arange(0, W)
    u_e = tl.load(u + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    k_is_finite, value_is_finite = tl.abs(k) < float("inf"), tl.abs(values) < float("inf")
    broken = (k_is_finite & value_is_finite) == 0
    if first is not None:
        broken = broken & (j + tl.arange(0, N)[:, None] >= tl.load(first + stream))
    finite_k = tl.where(k_is_finite, k, 0.0)
    product = tl.where(broken, float("nan"), finite_k.to(tl.float32) * u_e[None, :])
    store_numbers(a, stream * H + head, key.length, j, tl.sum(product, axis=1), N)
    store(finite_key, stream, head, j, finite_k, E, W, N)
    store(finite_value, stream, head, j, tl.where(value_is_finite, values, 0.0), E, W, N)


@triton.jit
def attend(
    query, key, value, r, a, b, key_start, seed, dropout, out, lse,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The output and the log-sum-exp of N queries."""
    S, K = query.length, key.length
    stream, head, i = place(S, H, N)
    first_distance = K - S + i  # of the first query to the first key
    q = load(query, stream, head, i, E, W, N)
    begin = first_tile(key_start, stream, S, i, N)
    far = distance_scores(q, r, b, head, first_distance - begin + 1, E, W, N)
    highest, total = tl.full([N], float("-inf"), tl.float32), tl.zeros([N], tl.float32)
    context = tl.zeros([N, W], tl.float32)
    for j in range(begin, tl.minimum(K, first_distance + N), N):
        near = distance_scores(q, r, b, head, first_distance - j - N + 1, E, W, N)
        k = load(key, stream, head, j, E, W, N).to(q.dtype)
        a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
        x = key_scores(
            q, k, a_j, fold(near, far, N), first_distance - j, scale, key_start, stream, S, i, j, N
        )
        far = near

        higher = tl.maximum(highest, tl.max(x, axis=1))
        top = higher
        if key_start is not None:  # a query that has seen no key yet has no highest score
            top = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x - top[:, None])
        shrink = tl.exp2(highest - top)
        highest, total = higher, total * shrink + tl.sum(p, axis=1)
        values = load(value, stream, head, j, E, W, N).to(q.dtype)
        p = p * kept(seed, dropout, stream * H + head, i, j + tl.arange(0, N)[None, :], N)
        context = dot(p.to(q.dtype), values, context * shrink[:, None])
    store(out, stream, head, i, context / total[:, None], E, W, N)
    store_numbers(lse, stream * H + head, S, i, highest + tl.log2(total), N)


@triton.jit
def gradient_by_query(
    query, key, value, r, a, b, key_start, seed, dropout, grad, lse, delta, d_query,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The gradient of N queries."""
    S, K = query.length, key.length
    stream, head, i = place(S, H, N)
    first_distance = K - S + i
    q, g, lse_i, delta_i = load_queries(query, grad, lse, delta, stream, head, H, i, E, W, N)
    begin = first_tile(key_start, stream, S, i, N)
    far = distance_scores(q, r, b, head, first_distance - begin + 1, E, W, N)
    ds_before, dq = tl.zeros([N, N], q.dtype), tl.zeros([N, W], tl.float32)
    keys = tl.minimum(K, first_distance + N)
    for j in range(begin, keys, N):
        near = distance_scores(q, r, b, head, first_distance - j - N + 1, E, W, N)
        k = load(key, stream, head, j, E, W, N).to(q.dtype)
        a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
        x = key_scores(
            q, k, a_j, fold(near, far, N), first_distance - j, scale, key_start, stream, S, i, j, N
        )
        far = near

        dp = dot(g, tl.trans(load(value, stream, head, j, E, W, N).to(q.dtype)), None)
        dp = dp * kept(seed, dropout, stream * H + head, i, j + tl.arange(0, N)[None, :], N)
        # Softmax: dS = P ∘ (dP − rowsum(dO ∘ O)).
        ds = (tl.exp2(x - lse_i[:, None]) * (dp - delta_i[:, None])).to(q.dtype)
        dq = dot(ds, k, dq)
        # The gradient of these keys' far distances, the previous keys' near ones, is complete now.
        r_far = load(r, 0, head, first_distance - j + 1, E, W, N).to(q.dtype)
        dq = dot(skew(fold(ds_before, ds, N), N), r_far, dq)
        ds_before = ds
    r_near = load(r, 0, head, first_distance - tl.cdiv(keys, N) * N + 1, E, W, N).to(q.dtype)
    dq = dot(skew(fold(ds_before, tl.zeros_like(ds_before), N), N), r_near, dq)
    store(d_query, stream, head, i, dq * scale, E, W, N)


@triton.jit
def gradient_by_key(
    query, key, value, r, a, b, key_start, seed, dropout, grad, lse, delta, d_key, d_value, u, d_u,
    H, scale, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The gradients of N keys and values, and these keys' part of the gradient of u."""
    S, K = query.length, key.length
    stream, head, j = place(K, H, N)
    k, values = load(key, stream, head, j, E, W, N), load(value, stream, head, j, E, W, N)
    a_j = load_numbers(a, stream * H + head, K, j, 0.0, N)
    dk, dv, da = tl.zeros([N, W], tl.float32), tl.zeros([N, W], tl.float32), tl.zeros([N], tl.float32)
    for i in range(tl.maximum(j - (K - S), 0) // N * N, S, N):
        first_distance = K - S + i - j
        q, g, lse_i, delta_i = load_queries(query, grad, lse, delta, stream, head, H, i, E, W, N)
        near = distance_scores(q, r, b, head, first_distance - N + 1, E, W, N)
        far = distance_scores(q, r, b, head, first_distance + 1, E, W, N)
        x = key_scores(
            q, k.to(q.dtype), a_j, fold(near, far, N), first_distance, scale, key_start, stream, S, i, j, N
        )

        p = tl.exp2(x - lse_i[:, None])
        share = kept(seed, dropout, stream * H + head, i, j + tl.arange(0, N)[None, :], N)
        dv = dot(tl.trans((p * share).to(q.dtype)), g, dv)
        ds = p * (dot(g, tl.trans(values.to(q.dtype)), None) * share - delta_i[:, None])
        da += tl.sum(ds, axis=0)
        dk = dot(tl.trans(ds.to(q.dtype)), q, dk)
    e = tl.arange(0, W)
    u_e = tl.load(u + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    store(d_key, stream, head, j, (dk + da[:, None] * u_e) * scale, E, W, N)
    store(d_value, stream, head, j, dv, E, W, N)
    du = tl.sum(da[:, None] * k.to(tl.float32), axis=0) * scale
    tl.store(d_u + tl.program_id(0).to(tl.int64) * E + e, du, mask=e < E)


@triton.jit
def gradient_by_distance(
    query, key, value, r, a, b, key_start, seed, dropout, grad, lse, delta, d_r, d_b, B, parts,
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
        q, g, lse_i, delta_i = load_queries(query, grad, lse, delta, stream, head, H, i, E, W, N)
        j = (
            K - S + i - d - N + 1
        )  # the first key to which these distances are near; to the next N they are far
        content, dp = key_products(q, g, key, value, a, stream, head, H, j, E, W, N)
        far_content, far_dp = key_products(q, g, key, value, a, stream, head, H, j + N, E, W, N)
        position = dot(q, tl.trans(r_d.to(q.dtype)), None) + b_d
        x = (fold(content, far_content, N) + skew(position, N)) * (scale * LOG2E)
        at = j + column + tl.where(column >= row, 0, N)
        x = tl.where(at >= 0, x, float("-inf"))
        x = from_key_start(x, key_start, stream, S, i, at, N)

        dp = fold(dp, far_dp, N) * kept(seed, dropout, stream * H + head, i, at, N)
        ds = skew(tl.exp2(x - lse_i[:, None]) * (dp - delta_i[:, None]), N)
        db += tl.sum(ds, axis=0)
        dr = dot(tl.trans(ds.to(q.dtype)), q, dr)
    store(d_r, part, head, d, dr * scale, E, W, N)
    store_numbers(d_b, part * H + head, K, d, db * scale, N)


@triton.jit
def load_queries(
    query, grad, lse, delta, stream, head, H, i, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """N queries, their outputs' gradients, log-sum-exps and deltas; one that doesn't exist sees nothing."""
    q = load(query, stream, head, i, E, W, N)
    g = load(grad, stream, head, i, E, W, N).to(q.dtype)
    lse_i = load_numbers(lse, stream * H + head, query.length, i, float("inf"), N)
    return q, g, lse_i, load_numbers(delta, stream * H + head, query.length, i, 0.0, N)


@triton.jit
def distance_scores(q, r, b, head, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """q_i·r_d + b_d for N distances, beginning with ``first``, by distance."""
    r_d = load(r, 0, head, first, E, W, N).to(q.dtype)
    return dot(q, tl.trans(r_d), None) + load_numbers(b, head, r.length, first, 0.0, N)


@triton.jit
def key_scores(q, k, a_j, band, first_distance, scale, key_start, stream, S, i, j, N: tl.constexpr):
    """The scores by key, times log2(e), of a tile whose first query and key are ``first_distance`` apart,
    from the folded scores by distance; −∞ for hidden keys."""
    x = dot(q, tl.trans(k), skew(band, N) + a_j) * (scale * LOG2E)
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.where(first_distance + row - column >= 0, x, float("-inf"))
    return from_key_start(x, key_start, stream, S, i, j + column, N)


@triton.jit
def first_tile(key_start, stream, S, i, N: tl.constexpr):
    """The first tile of N keys, from a multiple of N on, that any of the N queries from ``i`` on sees."""
    begin = 0
    if key_start is not None:  # rows after the last query see no key
        begin = tl.min(load_numbers(key_start, stream, S, i, 2147483647, N), axis=0) // N * N
    return begin


@triton.jit
def from_key_start(x, key_start, stream, S, i, at, N: tl.constexpr):
    """The scores of queries from ``i`` on for keys ``at``, ``[N, N]`` or ``[1, N]``; −∞ before the first."""
    if key_start is not None:
        i_first = load_numbers(key_start, stream, S, i, 0, N)
        x = tl.where(at >= i_first[:, None], x, float("-inf"))
    return x


@triton.jit
def key_products(
    q, g, key, value, a, stream, head, H, first, E: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """q·k_j + a_j and the gradient g·v_j of the probabilities, for N keys from ``first`` on."""
    k = load(key, stream, head, first, E, W, N).to(q.dtype)
    values = load(value, stream, head, first, E, W, N).to(q.dtype)
    a_j = load_numbers(a, stream * H + head, key.length, first, 0.0, N)
    return dot(q, tl.trans(k), None) + a_j, dot(g, tl.trans(values), None)
