"""Relative attention on CPU, block by block, with small temporaries that are read and written few times.

The naive kernel's large temporaries, each newly allocated, cost more than its arithmetic. Here a block uses a
few workspaces of 8 MiB, matrix products read queries, keys and values without copies, and the relative shift
costs nothing ([`memformers.kernels.blocked.tiling`][]).
"""

from typing import Any

import torch
from torch import Tensor

from memformers.kernels.blocked.terms import Terms
from memformers.kernels.blocked.tiling import blocks
from memformers.kernels.operators import all_finite, finite_part, no_second_derivative, sequence_first

KEPT = 1 << 24
"""The most probabilities that are kept for the backward pass: 64 MiB in float32. If there are more, each
block's are computed again, and memory does not grow with the number of scores."""


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], causal: the same arguments, result ``[B, H, S, E]``
    and gradients. Dropout draws other random numbers, by a seed from torch's generator."""
    inputs = [x for x in (query, key, value, r, u, v, s) if x is not None]
    will_learn = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    keep = will_learn and query.shape[:3].numel() * key.shape[2] <= KEPT
    seed = torch.randint(1 << 62, ()) if dropout_prob else None
    return blocked_attention(query, key, value, r, u, v, s, key_start, seed, dropout_prob, keep)[0]


@torch.library.custom_op("memformers::blocked_attention", mutates_args=(), device_types="cpu")
def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None,
    key_start: Tensor | None, seed: Tensor | None, dropout_prob: float, keep: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output ``[B, H, S, E]``, and what the backward pass reads again: a tensor that is empty if all
    numbers were finite, and, if ``keep``, each block's probabilities ``[n, s, k]``, with a minus sign if
    dropped, in a tensor ``[·]`` as long as it would be without ``key_start``."""
    how: tuple[Any, ...] = query, r, u, v, s, key_start, seed, dropout_prob, keep
    finite = all_finite(key)
    out, kept = attend(key, value, None, *how) if finite else (query, [])
    # What isn't finite in a query, or in a value, seen or hidden (0 · NaN is NaN), has reached the output.
    if not (finite := finite and all_finite(out)):
        out, kept = attend(*finite_part(key, value), *how)
    return out, [query.new_empty(0 if finite else 1), *kept]


def attend(
    key: Tensor, value: Tensor, poison: Tensor | None,
    query: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None, key_start: Tensor | None,
    seed: Tensor | None, dropout_prob: float, keep: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The output and the probabilities that are kept, of finite keys and values ``[B, H, K, E]`` and, where
    some were not, ``poison [B, H, K]``."""
    out = sequence_first(query)
    terms = Terms(query, key, r, u, v, s, key_start, seed, dropout_prob, poison)
    kept = []
    scores = terms.workspace.new_empty(0 if keep else len(terms.workspace))
    for block in blocks(query, key, key_start):
        if keep:  # in a tensor for each block: a single large one would be new memory of the system, slow
            kept.append(scores.new_empty(block.room))
        probabilities = terms.probabilities(block, block.scores(kept[-1] if keep else scores))  # [n, s, k]
        used = terms.not_dropped(probabilities).to(query.dtype)
        context = torch.bmm(used, block.columns(value).mT)  # [n, s, E]
        block.rows(out).copy_(block.unpair(context))
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
    were_not_finite, *kept = kept
    poison = None
    if len(were_not_finite) or not all_finite(grad):
        key, value, poison = finite_part(key, value)
    terms = Terms(query, key, r, u, v, s, key_start, seed, dropout_prob, poison)
    K, E = key.shape[2:]
    d_query = sequence_first(query)
    fresh = torch.empty_like if key_start is None else torch.zeros_like  # for keys that no query sees
    d_key, d_value = (fresh(x, memory_format=torch.contiguous_format) for x in (key, value))
    vectors = terms.table[:, :E]  # r by descending distance
    d_vectors, d_u, d_s = (torch.zeros_like(x) for x in (vectors, terms.u, vectors[:, 0]))
    rounded = vectors.to(query.dtype)
    grad = grad * terms.scale_up if dropout_prob else grad
    gradients = torch.empty_like(terms.workspace)
    workspace = torch.empty_like(terms.workspace, dtype=query.dtype)
    scores = terms.workspace.new_empty(0 if kept else len(terms.workspace))
    before = None
    for i, block in enumerate(blocks(query, key, key_start)):
        content, position = (x.to(query.dtype) for x in terms.biased_queries(block))  # [n, s, E], [h, s·b, E]
        h, b, queries, _, w = block.shape
        probabilities = block.scores(kept[i] if kept else scores)
        if not kept:
            terms.probabilities(block, probabilities)
        # Contiguous, since the transposed products below are a fifth slower if rows are far apart.
        d_context = block.rows(grad).flatten(0, 1).contiguous()  # [n, s, E]
        block.accumulate(d_value, terms.not_dropped(probabilities).to(query.dtype), d_context)

        # Softmax: dS = P ∘ (dP − rowsum(dP ∘ P)).
        d_scores = block.scores(gradients)  # [n, s, k]
        torch.bmm(d_context.to(terms.dtype), block.columns(value).to(terms.dtype), out=d_scores)
        if dropout_prob:
            d_scores.mul_(probabilities > 0)
            probabilities = probabilities.abs()
        torch._softmax_backward_data(d_scores, probabilities, -1, terms.dtype, grad_input=d_scores)
        if poison is not None:
            terms.hide(block, d_scores, 0.0)
        by_distance, by_key = block.split(workspace, b)  # [h, s·b, w], [b, h, s, k]
        if block.shape != before:  # entries outside of the view by key stay 0
            by_distance.zero_()
            before = block.shape
        by_key.copy_(block.unpair(d_scores))

        # u, v and s are added to the scores of every query, so their gradients are sums over all queries,
        # for which half precision is not exact enough.
        at_keys, keys = d_scores.sum(1, keepdim=True), block.columns(key).to(terms.dtype)
        d_u[block.heads] += block.unpair(torch.bmm(at_keys, keys.mT)).sum((0, 2))
        of_all, of_all_by_key = block.split(d_scores.new_zeros(h * queries * w), 1)  # [h, s, w], [1, h, s, k]
        of_all_by_key[0] = block.unpair(d_scores).sum(0)
        d_s[block.heads, block.distances] += of_all.sum(1)

        d_scores = d_scores.to(query.dtype)
        block.accumulate(d_key, d_scores, content)
        d_vectors[block.heads, :, block.distances] += torch.bmm(position[..., :E].mT, by_distance)
        d_content = block.unpair(torch.bmm(d_scores, block.columns(key).mT))
        d_position = torch.bmm(by_distance, rounded[block.heads, :, block.distances].mT)  # [h, s·b, E]
        d_position = d_position.unflatten(1, (queries, b)).permute(2, 0, 1, 3)  # [b, h, s, E]
        block.rows(d_query).copy_(d_content.add_(d_position))
    d_v = torch.einsum("hd,hed->he", d_s, vectors)
    d_r, d_s = (x[..., -K:].flip(-1) for x in (d_vectors, d_s * terms.scale))  # by ascending distance
    return (
        d_query.mul_(terms.scale),
        d_key,
        d_value,
        d_r.mT.to(r.dtype).contiguous(),
        (d_u * terms.scale).to(u.dtype),
        u.new_empty(0) if v is None else (d_v * terms.scale).to(v.dtype),
        r.new_empty(0) if s is None else d_s.to(s.dtype),
    )


@blocked_attention.register_fake
def _(query, key, value, r, u, v, s, key_start, seed, dropout_prob, keep):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(query.dtype, torch.float32)
    kept = [query.new_empty(block.room, dtype=dtype) for block in blocks(query, key)] if keep else []
    return sequence_first(query), [query.new_empty(0), *kept]


@blocked_attention_backward.register_fake
def _(grad, kept, query, key, value, r, u, v, s, *_):  # type: ignore[no-untyped-def]
    rest = (u.new_empty(0) if x is None else x.new_empty(x.shape) for x in (key, value, r, u, v, s))
    return sequence_first(query), *rest


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.dropout_prob, _ = inputs
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as all scores
    ctx.save_for_backward(*tensors, *output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    *inputs, key_start, seed = ctx.saved_tensors[:9]
    kept = list(ctx.saved_tensors[9:])
    grads = blocked_attention_backward(grad, kept, *inputs, key_start, seed, ctx.dropout_prob)
    return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None, None, None


blocked_attention.register_autograd(_backward, setup_context=_setup_context)
blocked_attention_backward.register_autograd(no_second_derivative("blocked"))
