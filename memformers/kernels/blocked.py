"""Relative attention on CPU, block by block in a workspace that stays in the cache.

The naive kernel's large temporaries cost more than its arithmetic: every one is fresh memory. Here a
few heads of a few streams are worked on at a time, their scores are written once, in place, and only
the inputs are kept for the backward pass, which computes a block's probabilities again.

The relative shift costs nothing. Say W ``[s, K + 1]`` holds the position scores of s queries by
descending distance K … 0. Query i's score for key j, at distance d = K − s + i − j, stands at column
K − d = s − i + j, which is element i·(K + 1) + s − i + j = s + i·K + j of the block read as one row:
from element s on, the same memory read with rows of K *is* the position score by key. So the content
scores are added there by the matrix product itself, and the gradient of the scores, written there,
is the gradient of the position scores when read back with rows of K + 1. (Distance K, which no query
has, is only a column to make room; its entries are hidden ones of the future, whose gradient is 0.)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE = 1 << 18
"""Scores in a block of several heads or streams, at most: 1 MiB in float32."""
QUERIES = 256
"""Queries in a block, at most; so few of the keys that the causal mask hides are computed."""


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
    arguments, shapes and result, and the same gradients."""
    v = torch.zeros_like(u) if v is None else v
    s = r.new_zeros(r.shape[:2]) if s is None else s
    return blocked_attention(query, key, value, r, u, v, s)


@torch.library.custom_op("memformers::blocked_attention", mutates_args=(), device_types="cpu")
def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor
) -> Tensor:
    """The forward pass; shapes as in :func:`relative_attention`."""
    out = sequence_first(query)
    terms = Terms(query, key, r, u, v, s)
    workspace = query.new_empty(largest_block(query, key))
    for block in blocks(query, key):
        probabilities = terms.scores(block, workspace).softmax(dim=-1)  # [n, s, k]
        context = torch.bmm(probabilities, block.pairs(value, block.keys))  # [n, s, E]
        block.of(out, block.queries).copy_(block.unpair(context))
    return out


@torch.library.custom_op("memformers::blocked_attention_backward", mutates_args=(), device_types="cpu")
def blocked_attention_backward(
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor,
    s: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, r, u, v and s."""
    terms = Terms(query, key, r, u, v, s)
    d_query, d_key, d_value = (sequence_first(x).zero_() for x in (query, key, value))
    d_r, d_s = torch.zeros_like(terms.r), torch.zeros_like(terms.s)
    d_u, d_v = torch.zeros_like(u), torch.zeros_like(v)
    workspace = query.new_empty(largest_block(query, key))
    d_workspace = torch.empty_like(workspace)
    for block in blocks(query, key):
        probabilities = terms.scores(block, workspace).softmax(dim=-1)  # [n, s, k]
        content, position = terms.biased_queries(block)  # [n, s, E], [h, b·s, E]
        d_context = block.pairs(grad, block.queries)  # [n, s, E]
        block.of(d_value, block.keys).add_(block.unpair(torch.bmm(probabilities.transpose(1, 2), d_context)))

        # Softmax: dS = P ∘ (dP − rowsum(dO ∘ O)); once written by key, it is there by distance too.
        d_by_distance, d_by_key = block.split(d_workspace)  # [h, b·s, k + 1], [n, s, k]
        torch.bmm(d_context, block.pairs(value, block.keys).transpose(1, 2), out=d_by_key)
        d_by_key.sub_((d_context * block.pairs(out, block.queries)).sum(-1, keepdim=True))
        d_by_key.mul_(probabilities)

        block.of(d_key, block.keys).add_(block.unpair(torch.bmm(d_by_key.transpose(1, 2), content)))
        d_r[block.heads, block.distances] += torch.bmm(d_by_distance.transpose(1, 2), position)
        d_s[block.heads, block.distances] += d_by_distance.sum(1)
        d_content = torch.bmm(d_by_key, block.pairs(key, block.keys))  # [n, s, E]
        d_position = torch.bmm(d_by_distance, terms.r[block.heads, block.distances])  # [h, b·s, E]
        d_u[block.heads] += d_content.view(d_position.shape).sum(1)
        d_v[block.heads] += d_position.sum(1)
        d_query_block = d_content.add_(d_position.view(d_content.shape))
        block.of(d_query, block.queries).copy_(block.unpair(d_query_block))
    return (
        d_query.mul_(terms.scale),
        d_key,
        d_value,
        d_r.flip(1)[:, :-1].contiguous(),
        d_u.mul_(terms.scale),
        d_v.mul_(terms.scale),
        d_s.flip(1)[:, :-1].mul(terms.scale),
    )


@blocked_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor) -> Tensor:
    return sequence_first(query)


@blocked_attention_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor,
    s: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rest = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r, u, v, s))
    d_r, d_u, d_v, d_s = rest
    return sequence_first(query), sequence_first(key), sequence_first(value), d_r, d_u, d_v, d_s


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output, *inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return blocked_attention_backward(grad, *ctx.saved_tensors)


blocked_attention.register_autograd(_backward, setup_context=_setup_context)


@dataclass(frozen=True)
class Block:
    """Some queries of some heads of some streams, and the keys and distances that they see."""

    heads: slice
    streams: slice
    queries: slice
    keys: slice
    distances: slice
    """In a table by descending distance."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many heads h, streams b, queries s and keys k it has."""
        h, b, s, k = (p.stop - p.start for p in (self.heads, self.streams, self.queries, self.keys))
        return h, b, s, k

    def of(self, x: Tensor, positions: slice) -> Tensor:
        """The block's part ``[b, h, t, E]`` of ``x [B, H, ·, E]``."""
        return x[self.streams, self.heads, positions]

    def pairs(self, x: Tensor, positions: slice) -> Tensor:
        """That part by pairs of head and stream, ``[n, t, E]`` with n = h·b."""
        return self.of(x, positions).transpose(0, 1).flatten(0, 1)

    def unpair(self, x: Tensor) -> Tensor:
        """``[n, t, E]`` by streams and heads again, ``[b, h, t, E]``."""
        h, b, _, _ = self.shape
        return x.unflatten(0, (h, b)).transpose(0, 1)

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """The same memory read by descending distance, ``[h, b·s, k + 1]``, and by key,
        ``[n, s, k]``; what is only in the first is set to 0."""
        h, b, s, k = self.shape
        flat = workspace[: h * b * s * (k + 1)].view(h * b, s * (k + 1))
        flat[:, :s] = 0.0
        return flat.view(h, b * s, k + 1), flat[:, s:].unflatten(1, (s, k))


def blocks(query: Tensor, key: Tensor) -> Iterator[Block]:
    """Blocks that cover all queries: whole heads of many streams where they are small, parts of one
    head of one stream where they are large."""
    (B, H, S, _), K = query.shape, key.shape[2]
    s = min(S, QUERIES)
    n = max(WORKSPACE // (s * (K + 1)), 1)
    b, h = min(B, n), max(min(H, n // B), 1)
    for head in range(0, H, h):
        for stream in range(0, B, b):
            for start in range(0, S, s):
                stop = min(start + s, S)
                yield Block(
                    heads=slice(head, min(head + h, H)),
                    streams=slice(stream, min(stream + b, B)),
                    queries=slice(start, stop),
                    keys=slice(0, K - S + stop),
                    distances=slice(S - stop, K + 1),
                )


def largest_block(query: Tensor, key: Tensor) -> int:
    """How many scores the workspace must hold."""
    h, b, s, _ = next(blocks(query, key)).shape
    return h * b * s * (key.shape[2] + 1)


class Terms:
    """What scores are made from, scaled, with the distances in descending order K, K−1 … 0."""

    def __init__(self, query: Tensor, key: Tensor, r: Tensor, u: Tensor, v: Tensor, s: Tensor):
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self.query, self.key, self.u, self.v = query, key, u, v
        queries = min(query.shape[2], QUERIES)
        self.future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
        self.r = torch.cat((torch.zeros_like(r[:, :1]), r.flip(1)), dim=1)  # [H, K + 1, E]
        self.s = torch.cat((torch.zeros_like(s[:, :1]), s.flip(1) * self.scale), dim=1)  # [H, K + 1]

    def biased_queries(self, block: Block) -> tuple[Tensor, Tensor]:
        """(q + u) / √E as ``[n, s, E]`` and (q + v) / √E as ``[h, b·s, E]``."""
        h, b, s, _ = block.shape
        q = block.of(self.query, block.queries).transpose(0, 1) * self.scale  # [h, b, s, E]
        content = q + self.u[block.heads, None, None] * self.scale
        position = q + self.v[block.heads, None, None] * self.scale
        return content.reshape(h * b, s, -1), position.reshape(h, b * s, -1)

    def scores(self, block: Block, workspace: Tensor) -> Tensor:
        """The block's scores ``[n, s, k]``, −∞ where a key is in the future, in the workspace."""
        content, position = self.biased_queries(block)
        by_distance, by_key = block.split(workspace)
        r, bias = self.r[block.heads, block.distances], self.s[block.heads, None, block.distances]
        torch.baddbmm(bias, position, r.transpose(1, 2), out=by_distance)
        by_key.baddbmm_(content, block.pairs(self.key, block.keys).transpose(1, 2))
        s = by_key.shape[1]
        by_key[:, :, -s:].masked_fill_(self.future[:s, :s], -math.inf)
        return by_key


def sequence_first(x: Tensor) -> Tensor:
    """An empty ``[B, H, T, E]`` like ``x`` whose memory is in the modules' order, ``[T, B, H, E]``."""
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)
