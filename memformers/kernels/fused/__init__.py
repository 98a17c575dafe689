# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Relative attention on GPU, tile by tile in fast memory: no S × K matrix is ever stored. Here are PyTorch's
operators; they launch the kernels of [`memformers.kernels.fused.passes`][]."""

import math
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from memformers.kernels.fused import passes
from memformers.kernels.fused.tiles import Rows
from memformers.kernels.operators import no_second_derivative, sequence_first

PROGRAMS = 512
"""The most programs among which the kernel by distance divides the streams: a few per multiprocessor."""


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], causal: the same arguments, result ``[B, H, S, E]``
    and gradients, for its [`memformers.kernels.dispatch.SUPPORT`][]. By a seed from PyTorch's generator, all
    passes compute which probabilities are dropped."""
    v = torch.zeros_like(u) if v is None else v
    s = r.new_zeros(r.shape[:2]) if s is None else s
    key_start = None if key_start is None else key_start.to(torch.int32).contiguous()
    seed = torch.randint(1 << 62, (), device=query.device) if dropout_prob else None
    return fused_attention(query, key, value, r, u, v, s, key_start, seed, dropout_prob)[0]


@torch.library.custom_op("memformers::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor,
    key_start: Tensor | None, seed: Tensor | None, dropout_prob: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output ``[B, H, S, E]``, and each query's base-2 logarithm of the sum of e^score, ``[B, H, S]``."""
    B, H, S, E = query.shape
    tiling = choose_tiling(query, "attend", dropping=seed is not None)
    out, lse = sequence_first(query), query.new_empty((B, H, S), dtype=torch.float32)
    with torch.cuda.device_of(query):
        inputs = rows(query), *terms(key, value, r, u, v, s, key_start), key_start, seed, dropout_prob
        programs = B * H * triton.cdiv(S, tiling["N"])
        passes.attend[(programs,)](*inputs, rows(out), lse, H, 1 / math.sqrt(E), **tiling)
    return out, lse


@torch.library.custom_op("memformers::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor, out: Tensor, lse: Tensor,
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor,
    key_start: Tensor | None, seed: Tensor | None, dropout_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, r, u, v and s, in their shapes, from ``grad [B, H, S, E]``, the
    gradient of the output."""
    (B, H, S, E), K = query.shape, key.shape[2]
    by_query, by_key, by_distance = (
        choose_tiling(query, kernel, dropping=seed is not None) for kernel in ("query", "key", "distance")
    )
    scale, N = 1 / math.sqrt(E), by_query["N"]
    query_tiles, key_tiles = triton.cdiv(S, N), triton.cdiv(K, N)
    parts = min(B, triton.cdiv(PROGRAMS, key_tiles * H))
    d_query, d_key, d_value = (sequence_first(x) for x in (query, key, value))
    d_u = u.new_empty((B, H, key_tiles, E), dtype=torch.float32)
    d_r = r.new_empty((parts, H, K, E), dtype=torch.float32)
    d_b = s.new_empty((parts, H, K), dtype=torch.float32)
    with torch.cuda.device_of(query):
        of_keys = terms(key, value, r, u, v, s, key_start)
        of_queries = rows(grad), lse, row_dots(grad, out)
        inputs = rows(query), *of_keys, key_start, seed, dropout_prob, *of_queries
        passes.gradient_by_query[(B * H * query_tiles,)](*inputs, rows(d_query), H, scale, **by_query)
        outputs = rows(d_key), rows(d_value), u.contiguous(), d_u
        passes.gradient_by_key[(B * H * key_tiles,)](*inputs, *outputs, H, scale, **by_key)
        passes.gradient_by_distance[(parts * H * key_tiles,)](
            *inputs, rows(d_r), d_b, B, parts, H, scale, **by_distance
        )
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
def _(query, key, value, r, u, v, s, key_start, seed, dropout_prob):
    return sequence_first(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@fused_attention_backward.register_fake
def _(grad, out, lse, query, key, value, r, u, v, s, key_start, seed, dropout_prob):
    return *map(sequence_first, (query, key, value)), *(x.new_empty(x.shape) for x in (r, u, v, s))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.dropout_prob = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *tensors)


def _backward(ctx, grad, _):
    return *fused_attention_backward(grad, *ctx.saved_tensors, ctx.dropout_prob), None, None, None


fused_attention.register_autograd(_backward, setup_context=_setup_context)
fused_attention_backward.register_autograd(no_second_derivative("fused"))


def choose_tiling(
    query: Tensor, kernel: Literal["attend", "query", "key", "distance"], *, dropping: bool
) -> dict[str, Any]:
    """How a kernel, the forward pass or a gradient, is compiled for ``query [B, H, S, E]``: E, its padded
    width W, the tile's side N, and the numbers of warps and of pipeline stages.

    They are not yet measured, but chosen so that in half precision no kernel spills registers on Hopper, by
    ``python -m experiments.benchmarks --only compiled``. In float32 a product keeps its operands in
    registers, so tiles are small.
    """
    E = query.shape[-1]
    W = max(16, triton.next_power_of_2(E))  # a product needs 16
    if query.dtype == torch.float32:
        N, warps, stages = 32 if W <= 32 or (W == 64 and kernel == "attend") else 16, 8, 1
    elif W > 128:
        N, warps, stages = (16, 8, 2) if kernel == "distance" else (16, 4, 1)
    elif kernel == "distance":
        N, warps, stages = 32, 8 if dropping and W <= 32 else 4, 2 if W > 32 else 1
    elif kernel != "attend":
        N, warps, stages = 32, 8 if dropping and W > 64 else 4, 2 if W <= 64 else 1
    elif dropping:
        N, warps, stages = 32, 4, 2 if W <= 64 else 1
    elif W <= 64:
        N, warps, stages = 64, 4, 3
    else:
        N, warps, stages = (64, 8, 2) if shared_memory(query.device) >= 200 << 10 else (32, 4, 2)
    return {"E": E, "W": W, "N": N, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have: 227 KiB on Hopper, 163 on an A100, less on others."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def rows(x: Tensor) -> Rows:
    """``x [B, H, T, E]`` as a kernel takes it: in any order, but each vector must be contiguous."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return Rows(x, x.stride(0), x.stride(1), x.stride(2), x.shape[2])


def terms(
    key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor, key_start: Tensor | None
) -> tuple[Rows, Rows, Rows, Tensor, Tensor]:
    """Copies of ``key`` and ``value [B, H, K, E]`` with 0 in place of numbers that are not finite; r;
    a = u·k of each key that a query sees, ``[B, H, K]``, NaN where it or its value is not finite; and
    b = v·r + s of each distance, ``[H, K]``; a and b in float32."""
    B, H, K, E = key.shape
    finite_key, finite_value = rows(sequence_first(key)), rows(sequence_first(value))
    a = key.new_empty((B, H, K), dtype=torch.float32)
    first = None if key_start is None else key_start.amin(1)  # [B]
    passes.split_keys[(B * H * triton.cdiv(K, 64),)](
        rows(key), rows(value), u.contiguous(), first, finite_key, finite_value, a, H, **row_tiling(E)
    )
    b = row_dots(r[None], v.contiguous()[None, :, None].expand_as(r[None]))[0] + s
    return finite_key, finite_value, rows(r[None]), a, b


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """The product of each vector of ``x [B, H, T, E]`` with that of ``y``, ``[B, H, T]`` in float32."""
    B, H, T, E = x.shape
    dots = x.new_empty((B, H, T), dtype=torch.float32)
    passes.dot_rows[(B * H * triton.cdiv(T, 64),)](rows(x), rows(y), dots, H, **row_tiling(E))
    return dots


def row_tiling(E: int) -> dict[str, Any]:
    """How a kernel that takes 64 vectors of width E, one by one, is compiled."""
    return {"E": E, "W": triton.next_power_of_2(E), "N": 64, "enable_fp_fusion": True}
