"""Relative attention on CPU, block by block, with few passes over few temporaries.

The naive kernel's large temporaries cost more than its arithmetic: every one is fresh memory. Here
some heads of some streams are worked on at a time, in workspaces that stay in the cache, and matrix
products read queries, keys and values where they lie. The forward pass keeps the probabilities where
they are not too many; else the backward pass computes a block's again.

The relative shift costs nothing. A block's position scores are one matrix product a head, W
``[h, s·b, K + 1]``: rows by query and stream, columns by descending distance K … 0. Query i's score
for key j, at distance d = K − s + i − j, stands in column K − d = s − i + j of its row. From one query
to the next a row begins b·(K + 1) elements later, and the column moves one back: so the same memory,
read from element s on with b·(K + 1) − 1 elements from query to query, *is* the position score by key.
The gradient of the scores, written through that view, is the gradient of W. (What the view shows as a
score of the future are entries that no distance uses: column K, and distances longer than query i has.)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE = 1 << 20
"""Scores in a block of several heads or streams, at most: 4 MiB in float32."""
QUERIES = 256
"""Queries in a block, at most; so few of the keys that the causal mask hides are computed."""
KEPT = 1 << 24
"""Probabilities kept for the backward pass, at most: 64 MiB in float32. Beyond, a block's are computed
twice, and memory no longer grows with the number of scores."""


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    dropout_prob: float = 0.0,
) -> Tensor:
    """:func:`memformers.kernels.naive.relative_attention`, causal: the same arguments and shapes, the same
    result ``[B, H, S, E]``, and the same gradients. Dropout draws other numbers, one seed from torch's
    generator."""
    inputs = [x for x in (query, key, value, r, u, v, s) if x is not None]
    will_learn = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    keep = will_learn and count_scores(query, key) <= KEPT
    seed = torch.randint(1 << 62, ()) if dropout_prob else None
    return blocked_attention(query, key, value, r, u, v, s, seed, dropout_prob, keep)[0]


@torch.library.custom_op("memformers::blocked_attention", mutates_args=(), device_types="cpu")
def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor | None,
    s: Tensor | None,
    seed: Tensor | None,
    dropout_prob: float,
    keep: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The output ``[B, H, S, E]`` and, if ``keep``, each block's probabilities ``[n, s, k]``, those that
    were dropped with a minus sign."""
    out = sequence_first(query)
    terms = Terms(query, key, r, u, v, s, seed, dropout_prob)
    kept = []
    # What is kept is one tensor a block: memory of that size is taken from what was freed before, while
    # a single large one would be fresh from the system, and its first use slower than the arithmetic.
    scores = None if keep else torch.empty_like(terms.workspace)
    for block in blocks(query, key):
        probabilities = terms.probabilities(block, block.scores(scores, terms.dtype))  # [n, s, k]
        if keep:
            kept.append(probabilities)
        used = terms.not_dropped(probabilities).to(query.dtype)
        context = torch.bmm(used, block.pairs(value, block.keys))  # [n, s, E]
        block.of(out, block.queries).copy_(block.unpair(context))
    if dropout_prob:
        out.mul_(terms.scale_up)
    return out, kept


@torch.library.custom_op("memformers::blocked_attention_backward", mutates_args=(), device_types="cpu")
def blocked_attention_backward(
    grad: Tensor,
    kept: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor | None,
    s: Tensor | None,
    seed: Tensor | None,
    dropout_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, r, u, v and s, of their shapes, from that of the output,
    ``[B, H, S, E]``; empty ones where v or s is None."""
    terms = Terms(query, key, r, u, v, s, seed, dropout_prob)
    d_query = sequence_first(query)
    d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (key, value))
    d_r, d_u, d_s = (torch.zeros_like(x) for x in (terms.r, terms.u, terms.r[..., 0]))
    r_descending = terms.r.to(query.dtype)
    grad = grad * terms.scale_up if dropout_prob else grad
    gradients = torch.empty_like(terms.workspace)
    workspace = terms.workspace.to(query.dtype)
    scores = None if kept else torch.empty_like(terms.workspace)
    for i, block in enumerate(blocks(query, key)):
        content, position = (x.to(query.dtype) for x in terms.biased_queries(block))  # [n, s, E], [h, s·b, E]
        probabilities = kept[i] if kept else terms.probabilities(block, block.scores(scores, terms.dtype))
        # Contiguous, since the transposed products that follow lose a fifth of their speed on rows far apart.
        d_context = block.pairs(grad, block.queries).contiguous()  # [n, s, E]
        block.accumulate(d_value, terms.not_dropped(probabilities).to(query.dtype), d_context)

        # Softmax: dS = P ∘ (dP − rowsum(dP ∘ P)).
        values, keys = (block.pairs(x, block.keys).to(terms.dtype) for x in (value, key))  # [n, k, E]
        d_scores = block.scores(gradients, terms.dtype)  # [n, s, k]
        torch.bmm(d_context.to(terms.dtype), values.transpose(1, 2), out=d_scores)
        if dropout_prob:
            d_scores.mul_(probabilities > 0)
            probabilities = probabilities.abs()
        torch._softmax_backward_data(d_scores, probabilities, -1, terms.dtype, grad_input=d_scores)
        by_distance, by_key = block.split(workspace)  # [h, s·b, k + 1], [b, h, s, k]
        block.clear_unused(workspace)
        by_key.copy_(block.unpair(d_scores))

        # u and v are added to every query: their gradients are those of all queries together.
        at_keys = d_scores.sum(1, keepdim=True)  # [n, 1, k]
        d_u[block.heads] += block.unpair(torch.bmm(at_keys, keys)).sum((0, 2))
        d_s[block.heads, block.distances] += by_distance.sum(1, dtype=terms.dtype)

        d_scores = d_scores.to(query.dtype)
        block.accumulate(d_key, d_scores, content)
        d_content = block.unpair(torch.bmm(d_scores, block.pairs(key, block.keys)))  # [b, h, s, E]
        d_position = block.unrow(torch.bmm(by_distance, r_descending[block.heads, block.distances]))
        d_r[block.heads, block.distances] += torch.bmm(by_distance.transpose(1, 2), position)
        block.of(d_query, block.queries).copy_(d_content.add_(d_position))
    d_v = torch.einsum("hd,hde->he", d_s, terms.r)
    return (
        d_query.mul_(terms.scale),
        d_key,
        d_value,
        ascending(d_r, r),
        (d_u * terms.scale).to(u.dtype),
        u.new_empty(0) if v is None else (d_v * terms.scale).to(v.dtype),
        r.new_empty(0) if s is None else ascending(d_s * terms.scale, s),
    )


@blocked_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor | None,
    s: Tensor | None,
    seed: Tensor | None,
    dropout_prob: float,
    keep: bool,
) -> tuple[Tensor, list[Tensor]]:
    kept = []
    for block in blocks(query, key) if keep else ():
        heads, streams, queries, keys = block.shape
        kept.append(query.new_empty((streams * heads, queries, keys), dtype=exact(query)))
    return sequence_first(query), kept


@blocked_attention_backward.register_fake
def _(
    grad: Tensor,
    kept: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    u: Tensor,
    v: Tensor | None,
    s: Tensor | None,
    seed: Tensor | None,
    dropout_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def fresh(x: Tensor | None) -> Tensor:
        return u.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return sequence_first(query), fresh(key), fresh(value), fresh(r), fresh(u), fresh(v), fresh(s)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.dropout_prob, _ = inputs
    _, kept = output
    ctx.set_materialize_grads(False)  # of what is kept: zeros, as large as all scores
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    *inputs, seed = ctx.saved_tensors[:8]
    kept = list(ctx.saved_tensors[8:])
    grads = blocked_attention_backward(grad, kept, *inputs, seed, ctx.dropout_prob)
    return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None, None


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
    last: bool
    """Whether these are the segment's last queries, which see every key."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many heads h, streams b, queries s and keys k it has."""
        h, b, s, k = (p.stop - p.start for p in (self.heads, self.streams, self.queries, self.keys))
        return h, b, s, k

    def of(self, x: Tensor, positions: slice) -> Tensor:
        """The block's part ``[b, h, t, E]`` of ``x [B, H, ·, E]``."""
        return x[self.streams, self.heads, positions]

    def pairs(self, x: Tensor, positions: slice) -> Tensor:
        """That part by pairs of stream and head, ``[n, t, E]`` with n = b·h; a view where the memory
        of ``x`` is sequence first, since a block has all heads or one stream."""
        return self.of(x, positions).permute(2, 0, 1, 3).flatten(1, 2).transpose(0, 1)

    def unpair(self, x: Tensor) -> Tensor:
        """``[n, t, ·]`` by streams and heads again, ``[b, h, t, ·]``."""
        h, b, _, _ = self.shape
        return x.unflatten(0, (b, h))

    def unrow(self, x: Tensor) -> Tensor:
        """``[h, s·b, E]`` as ``[b, h, s, E]``."""
        _, b, s, _ = self.shape
        return x.unflatten(1, (s, b)).permute(2, 0, 1, 3)

    def scores(self, workspace: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Room for the block's ``[n, s, k]``, in the workspace or, if there is none, of its own."""
        h, b, s, k = self.shape
        if workspace is None:
            return torch.empty(b * h, s, k, dtype=dtype)
        return workspace[: b * h * s * k].view(b * h, s, k)

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """The same memory read by descending distance, ``[h, s·b, k + 1]``, and by key,
        ``[b, h, s, k]``."""
        h, b, s, k = self.shape
        row = k + 1
        by_distance = workspace[: h * s * b * row].view(h, s * b, row)
        by_key = workspace.as_strided((b, h, s, k), (row, s * b * row, b * row - 1, 1), s)
        return by_distance, by_key

    def clear_unused(self, workspace: Tensor) -> None:
        """Set what is in the view by distance, ``[h, s·b, k + 1]``, and not in the view by key to 0: one
        number between any two rows of a head that belong to the same query, and what comes before its
        first row."""
        h, b, s, k = self.shape
        row = k + 1
        workspace[: h * s * b * row].view(h, s * b * row)[:, :s] = 0.0
        workspace.as_strided((h, s, b - 1), (s * b * row, b * row - 1, row), s + k).zero_()

    def accumulate(self, gradient: Tensor, scores: Tensor, x: Tensor) -> None:
        """Into ``gradient [B, H, K, E]``, the product of ``scores [n, s, k]`` and ``x [n, s, E]``
        over queries. The segment's last queries come first, and their keys are all that there are."""
        target = self.of(gradient, self.keys).view(len(scores), -1, x.shape[-1])
        if self.last:
            torch.bmm(scores.transpose(1, 2), x, out=target)
        else:
            target.baddbmm_(scores.transpose(1, 2), x)


def blocks(query: Tensor, key: Tensor) -> Iterator[Block]:
    """Blocks that cover all of ``query [B, H, S, E]`` over ``key [B, H, K, E]``: all heads of some streams
    where they are small, or some heads of one stream; the last queries first. There are 2, 4, 8 … pairs of
    head and stream in a block, because the matrix products share them out among threads, and 3 pairs for 2
    threads take as long as 4."""
    (B, H, S, _), K = query.shape, key.shape[2]
    s = min(S, QUERIES)
    n = 1 << max((WORKSPACE // (s * K)).bit_length() - 1, 1)
    h, b = min(H, n), max(min(B, n // H), 1)
    for stream in range(0, B, b):
        for head in range(0, H, h):
            for stop in range(S, 0, -s):
                yield Block(
                    heads=slice(head, min(head + h, H)),
                    streams=slice(stream, min(stream + b, B)),
                    queries=slice(max(stop - s, 0), stop),
                    keys=slice(0, K - S + stop),
                    distances=slice(S - stop, K + 1),
                    last=stop == S,
                )


def count_scores(query: Tensor, key: Tensor) -> int:
    """How many scores ``query [B, H, S, E]`` and ``key [B, H, K, E]`` have, about: the causal mask may save
    some."""
    return query.shape[:3].numel() * key.shape[2]


def largest_block(query: Tensor, key: Tensor) -> int:
    """How many numbers a workspace for ``query [B, H, S, E]`` and ``key [B, H, K, E]`` must hold, by distance
    or by key."""
    h, b, s, k = next(blocks(query, key)).shape
    return h * b * s * (k + 1) + s


class Terms:
    """What scores are made from, scaled, with the distances in descending order K, K−1 … 0.

    All in float32 where the inputs are in half precision: a score is an exponent, and rounding it
    to 8 bits would cost more digits than everything else.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        r: Tensor,
        u: Tensor,
        v: Tensor | None,
        s: Tensor | None,
        seed: Tensor | None,
        dropout_prob: float,
    ):
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self.dtype = exact(query)
        self.query, self.key = query, key
        self.u = u.to(self.dtype) * self.scale
        self.v = None if v is None else v.to(self.dtype) * self.scale
        self.r = descending(r.to(self.dtype))  # [H, K + 1, E]
        self.s = None if s is None else descending(s.to(self.dtype) * self.scale)  # [H, K + 1]
        queries, numbers = min(query.shape[2], QUERIES), largest_block(query, key)
        self.future = self.r.new_full((queries, queries), -math.inf).triu_(1)
        self.workspace = self.r.new_empty(numbers)
        self.generator = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.dropped_below = int(dropout_prob * (1 << 31))
        self.scale_up = 1.0 / (1.0 - dropout_prob)

    def biased_queries(self, block: Block) -> tuple[Tensor, Tensor]:
        """(q + u) / √E as ``[n, s, E]`` and (q + v) / √E as ``[h, s·b, E]``."""
        q = block.of(self.query, block.queries).permute(2, 0, 1, 3).to(self.dtype)  # [s, b, h, E]
        content = torch.add(self.u[block.heads], q, alpha=self.scale)
        position = q * self.scale if self.v is None else torch.add(self.v[block.heads], q, alpha=self.scale)
        content, position = content.flatten(1, 2).transpose(0, 1), position.flatten(0, 1).transpose(0, 1)
        return content.contiguous(), position.contiguous()

    def probabilities(self, block: Block, out: Tensor) -> Tensor:
        """The block's probabilities ``[n, s, k]``, those to drop with a minus sign, written to ``out``.
        With dropout, blocks must be asked for in their order."""
        content, position = self.biased_queries(block)
        by_distance, by_key = block.split(self.workspace)
        r = self.r[block.heads, block.distances].transpose(1, 2)
        if self.s is None:
            torch.bmm(position, r, out=by_distance)
        else:
            torch.baddbmm(self.s[block.heads, None, block.distances], position, r, out=by_distance)
        _, _, s, k = block.shape
        end = by_distance.numel()
        self.workspace[end : end + s] = 0.0  # read as future, and −∞ + NaN would stay NaN
        keys = block.pairs(self.key, block.keys).to(self.dtype)
        torch.bmm(content, keys.transpose(1, 2), out=out)
        block.unpair(out).add_(by_key)
        out[:, :, k - s :].add_(self.future[:s, :s])
        torch.softmax(out, dim=-1, out=out)
        if self.generator is not None:  # whole numbers from 0 to 2³¹ − 1 are the cheapest random ones
            numbers = torch.empty_like(out, dtype=torch.int32).random_(generator=self.generator)
            out.copysign_(numbers.sub_(self.dropped_below))
        return out

    def not_dropped(self, probabilities: Tensor) -> Tensor:
        """The probabilities ``[n, s, k]`` with 0 for those that were dropped, not scaled up yet."""
        return probabilities if self.generator is None else probabilities.relu()


def exact(x: Tensor) -> torch.dtype:
    """The dtype of scores, probabilities and sums over many blocks for inputs like ``x``, of any shape:
    float32 for half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def descending(table: Tensor) -> Tensor:
    """A table by distance 0 … K−1, ``[H, K, …]``, as one by descending distance, with a row of zeros for K:
    ``[H, K + 1, …]``."""
    return torch.cat((torch.zeros_like(table[:, :1]), table.flip(1)), dim=1)


def ascending(gradient: Tensor, like: Tensor) -> Tensor:
    """A table by descending distance K … 0, ``[H, K + 1, …]``, as one by distance 0 … K−1, ``[H, K, …]``, in
    the dtype of ``like``."""
    return gradient[:, 1:].flip(1).to(like.dtype)


def sequence_first(x: Tensor) -> Tensor:
    """An empty ``[B, H, T, E]`` like ``x`` whose memory is in the modules' order, ``[T, B, H, E]``."""
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)
