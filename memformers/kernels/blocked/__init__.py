"""Relative attention on CPU, block by block, with small temporaries that are read and written few times.

The naive kernel's large temporaries, each newly allocated, cost more than its arithmetic. Here a block uses a
few workspaces of 8 MiB, matrix products read queries, keys and values without copies, and the relative shift
costs nothing ([`memformers.kernels.blocked.tiling`][]).
"""

import math
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from memformers.kernels.blocked.tiling import Block, blocks, padding_columns

MAX_KEPT = 1 << 24
"""The most probabilities that are kept for the backward pass: 64 MiB in float32. If there are more, each
block's are computed again, and memory does not grow with the number of scores."""


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], causal: the same arguments, result ``[B, H, S, E]``
    and gradients. Dropout draws other random numbers, by a seed from torch's generator. Raises
    NotImplementedError in forward mode, for which a custom operator silently gives no derivative."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        raise NotImplementedError("kernel='blocked' has no forward-mode derivative; use kernel='naive'.")
    inputs = [x for x in (query, key, value, r, u, v, s) if x is not None]
    will_learn = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    keep = will_learn and query.shape[:3].numel() * key.shape[2] <= MAX_KEPT
    seed = torch.randint(1 << 62, ()) if dropout_prob else None
    return blocked_attention(query, key, value, r, u, v, s, key_start, seed, dropout_prob, keep)[0]


class Terms:
    """The terms of scores: u, v and s over √E, and a table of r and s with distances along its rows; in
    float32 for half precision: a score is an exponent, and 8 bits of it would be too few."""

    def __init__(
        self, query: Tensor, key: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None,
        key_start: Tensor | None, seed: Tensor | None, dropout_prob: float,
    ):  # fmt: skip
        self.query = query
        self.key = key
        self.key_start = key_start

        # Divide u, v, s and queries by √E, not the scores, which are larger.
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.u = u.to(self.dtype) * self.scale
        self.v = None if v is None else v.to(self.dtype) * self.scale
        H, K, E = r.shape
        start = padding_columns(K)
        self.table = self.u.new_zeros(H, E if s is None else E + 1, start + K)
        """r and, as the last of E + 1 rows, s by descending distance; longer distances have zeros."""
        self.table[:, :E, start:] = r.flip(1).mT
        if s is not None:
            self.table[:, E, start:] = s.to(self.dtype).flip(1) * self.scale

        # What all blocks share. The first one is the largest.
        max_heads, max_streams, max_queries, _, max_width = next(blocks(query, key)).shape
        self.is_future = torch.ones(max_queries, max_queries, dtype=torch.bool).triu_(1)
        self.hidden = self.u.new_full((), -math.inf)
        self.workspace = self.u.new_empty(max_heads * max_streams * max_queries * max_width)

        # Dropout, by whole numbers from 0 to 2³¹ − 1: they are the cheapest random ones.
        self.generator = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.dropped_below = int(dropout_prob * (1 << 31))
        self.scale_up = 1.0 / (1.0 - dropout_prob)

    def biased_queries(self, block: Block) -> tuple[Tensor, Tensor]:
        """(q + u) / √E as ``[n, s, E]`` and (q + v) / √E as ``[h, s·b, E]``, or with a 1 for s,
        ``[h, s·b, E + 1]``."""
        q = self.query[block.rows].permute(2, 0, 1, 3).to(self.dtype)  # [s, b, h, E]
        content = torch.add(self.u[block.heads], q, alpha=self.scale)
        content = content.flatten(1, 2).transpose(0, 1)  # [n, s, E]
        position = q * self.scale if self.v is None else torch.add(self.v[block.heads], q, alpha=self.scale)
        position = position.flatten(0, 1).transpose(0, 1)  # [h, s·b, E]
        has_s = self.table.shape[1] > position.shape[2]
        if has_s:
            position = F.pad(position, (0, 1), value=1.0)
        return content.contiguous(), position.contiguous()

    def probabilities(self, block: Block, out: Tensor) -> Tensor:
        """The block's probabilities ``[n, s, k]``, written to ``out``; those to drop have a minus sign.
        With dropout, this must be called for the blocks in their order."""
        _, b, s, k, _ = block.shape

        # Scores: (b) and (d) by distance, (a) and (c) by key, and their sum.
        content, position = self.biased_queries(block)
        by_distance, by_key = block.split(self.workspace, b)
        torch.bmm(position, self.table[block.heads, :, block.distances], out=by_distance)
        torch.bmm(content, block.columns(self.key).to(self.dtype), out=out)
        scores = block.unpair(out).add_(by_key)  # [b, h, s, k]

        # Hidden keys: the future, which only the block's last s keys have, and those before the first.
        segment = scores[..., k - s :]
        torch.where(self.is_future[:s, :s], self.hidden, segment, out=segment)
        if self.key_start is not None:
            first = self.key_start[block.streams, block.queries] - block.keys.start  # [b, s]
            torch.where(torch.arange(k) < first[:, None, :, None], self.hidden, scores, out=scores)

        torch.softmax(out, dim=-1, out=out)
        if self.generator is not None:
            numbers = torch.empty_like(out, dtype=torch.int32).random_(generator=self.generator)
            out.copysign_(numbers.sub_(self.dropped_below))
        return out


@torch.library.custom_op("memformers::blocked_attention", mutates_args=(), device_types="cpu")
def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None,
    key_start: Tensor | None, seed: Tensor | None, dropout_prob: float, keep: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output ``[B, H, S, E]`` and, if ``keep``, what the backward pass reads again: each block's
    probabilities ``[n, s, k]``, with a minus sign if dropped, in a tensor ``[·]`` as long as it would be
    without ``key_start``."""
    out = sequence_first(query)
    terms = Terms(query, key, r, u, v, s, key_start, seed, dropout_prob)
    kept: list[Tensor] = []
    scores = terms.workspace.new_empty(0 if keep else len(terms.workspace))
    for block in blocks(query, key, key_start):
        if keep:
            # A tensor for each block: allocating a single large one from the system is slow.
            kept.append(scores.new_empty(math.prod(block.shape[:3]) * block.keys.stop))
        probabilities = terms.probabilities(block, block.scores(kept[-1] if keep else scores))  # [n, s, k]
        used = (probabilities.relu() if dropout_prob else probabilities).to(query.dtype)
        context = torch.bmm(used, block.columns(value).mT)  # [n, s, E]
        out[block.rows] = block.unpair(context)
    if dropout_prob:
        out.mul_(terms.scale_up)
    return out, kept


@torch.library.custom_op("memformers::blocked_attention_backward", mutates_args=(), device_types="cpu")
def blocked_attention_backward(
    grad: Tensor, kept: list[Tensor],
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None,
    key_start: Tensor | None, seed: Tensor | None, dropout_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, r, u, v and s, in their shapes, from the gradient of the output,
    ``[B, H, S, E]``; empty tensors where v or s is None."""
    terms = Terms(query, key, r, u, v, s, key_start, seed, dropout_prob)
    K, E = key.shape[2:]
    grad = grad * terms.scale_up if dropout_prob else grad

    # Gradients, which blocks write or add to.
    d_query = sequence_first(query)
    # With key_start, some keys may be read by no block: their gradient is 0.
    new_like = torch.empty_like if key_start is None else torch.zeros_like
    d_key = new_like(key, memory_format=torch.contiguous_format)
    d_value = new_like(value, memory_format=torch.contiguous_format)
    vectors = terms.table[:, :E]  # r by descending distance
    d_vectors = torch.zeros_like(vectors)
    d_u = torch.zeros_like(terms.u)
    d_s = torch.zeros_like(vectors[:, 0])

    # Workspaces, which all blocks share.
    vectors_in_dtype = vectors.to(query.dtype)
    gradients = torch.empty_like(terms.workspace)
    workspace = torch.empty_like(terms.workspace, dtype=query.dtype)
    scores = terms.workspace.new_empty(0 if kept else len(terms.workspace))
    previous_shape = None
    for i, block in enumerate(blocks(query, key, key_start)):
        h, b, n_queries, _, w = block.shape

        # The forward pass again, as far as it wasn't kept.
        content, position = (x.to(query.dtype) for x in terms.biased_queries(block))  # [n, s, E], [h, s·b, E]
        probabilities = block.scores(kept[i] if kept else scores)  # [n, s, k]
        if not kept:
            terms.probabilities(block, probabilities)

        # Values. Contiguous, since the transposed products are a fifth slower if rows are far apart.
        d_context = grad[block.rows].flatten(0, 1).contiguous()  # [n, s, E]
        used = probabilities.relu() if dropout_prob else probabilities
        block.accumulate(d_value, used.to(query.dtype), d_context)

        # Softmax: dS = P ∘ (dP − rowsum(dP ∘ P)).
        d_scores = block.scores(gradients)  # [n, s, k]
        torch.bmm(d_context.to(terms.dtype), block.columns(value).to(terms.dtype), out=d_scores)
        if dropout_prob:
            d_scores.mul_(probabilities > 0)
            probabilities = probabilities.abs()
        torch._softmax_backward_data(d_scores, probabilities, -1, terms.dtype, grad_input=d_scores)

        # By distance: the same memory. Entries outside of the view by key must be 0, and stay so.
        by_distance, by_key = block.split(workspace, b)  # [h, s·b, w], [b, h, s, k]
        if block.shape != previous_shape:
            by_distance.zero_()
            previous_shape = block.shape
        by_key.copy_(block.unpair(d_scores))

        # u, v and s are added to the scores of every query, so their gradients are sums over all queries,
        # for which half precision is not exact enough.
        d_scores_by_key = d_scores.sum(1, keepdim=True)  # [n, 1, k]
        keys = block.columns(key).to(terms.dtype)  # [n, E, k]
        d_u[block.heads] += block.unpair(torch.bmm(d_scores_by_key, keys.mT)).sum((0, 2))
        # Summed over streams, and then by distance: [h, s, w], [1, h, s, k].
        summed_by_distance, summed_by_key = block.split(d_scores.new_zeros(h * n_queries * w), 1)
        summed_by_key[0] = block.unpair(d_scores).sum(0)
        d_s[block.heads, block.distances] += summed_by_distance.sum(1)

        # Keys, vectors of distances and queries.
        d_scores = d_scores.to(query.dtype)
        block.accumulate(d_key, d_scores, content)
        d_vectors[block.heads, :, block.distances] += torch.bmm(position[..., :E].mT, by_distance)
        d_content = block.unpair(torch.bmm(d_scores, block.columns(key).mT))  # [b, h, s, E]
        d_position = torch.bmm(by_distance, vectors_in_dtype[block.heads, :, block.distances].mT)
        d_position = d_position.unflatten(1, (n_queries, b)).permute(2, 0, 1, 3)  # [b, h, s, E]
        d_query[block.rows] = d_content.add_(d_position)

    # Back to ascending distances, without the padding, and to unscaled terms.
    d_v = torch.einsum("hd,hed->he", d_s, vectors)
    d_r = d_vectors[..., -K:].flip(-1)  # [H, E, K]
    d_s = (d_s * terms.scale)[..., -K:].flip(-1)  # [H, K]
    return (
        d_query.mul_(terms.scale),
        d_key,
        d_value,
        d_r.mT.to(r.dtype).contiguous(),
        (d_u * terms.scale).to(u.dtype),
        u.new_empty(0) if v is None else (d_v * terms.scale).to(v.dtype),
        r.new_empty(0) if s is None else d_s.to(s.dtype),
    )


def sequence_first(x: Tensor) -> Tensor:
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)


@blocked_attention.register_fake
def _(query, key, value, r, u, v, s, key_start, seed, dropout_prob, keep):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(query.dtype, torch.float32)
    sizes = (math.prod(block.shape[:3]) * block.keys.stop for block in blocks(query, key))
    kept = [query.new_empty(size, dtype=dtype) for size in sizes] if keep else []
    return sequence_first(query), kept


@blocked_attention_backward.register_fake
def _(grad, kept, query, key, value, r, u, v, s, *_):  # type: ignore[no-untyped-def]
    rest = (u.new_empty(0) if x is None else x.new_empty(x.shape) for x in (key, value, r, u, v, s))
    return sequence_first(query), *rest


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.dropout_prob, _ = inputs
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as all scores
    ctx.save_for_backward(*tensors, *output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: activation checkpointing gives them only once
    inputs, key_start, seed, kept = saved[:7], saved[7], saved[8], list(saved[9:])
    grads = blocked_attention_backward(grad, kept, *inputs, key_start, seed, ctx.dropout_prob)
    return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None, None, None


def _no_second_derivative(*_: object) -> NoReturn:
    raise NotImplementedError(
        "kernel='blocked', which kernel='auto' chooses for some sizes, has no second derivative; build the "
        "model with kernel='naive' to compute one."
    )


blocked_attention.register_autograd(_backward, setup_context=_setup_context)
blocked_attention_backward.register_autograd(_no_second_derivative)
