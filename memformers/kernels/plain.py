"""Attention on a CPU, block by block, to keys that are widened by the features of a table.

Unlike in PyTorch's flash kernel for CPUs, values may be narrower than keys, and the backward pass reuses the
probabilities of the forward pass: five products of E or E + P features in place of seven of E + P, and in
half precision, larger ones. Attention takes 0.6 to 0.8 of the time.
"""

import math
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from memformers.kernels.blocked import MAX_KEPT, sequence_first

WORKSPACE = 1 << 18
"""The most scores in a block, 1 MiB in float32, about a core's cache; more only if two pairs of head and
stream have more."""
QUERIES = 128
"""The most queries in a block: few, so that few scores that the causal mask hides are computed."""


def attention(query: Tensor, key: Tensor, value: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of ``query [B, H, S, E + P]`` to ``key [B, H, K, E]`` beside ``table [K, P]``, and ``value
    [B, H, K, E]``, with ``bias [S, K]`` or ``[B or 1, H or 1, S, K]``, None for causal: ``[B, H, S, E]``.

    Query and table are in float32 for keys in half precision: a score is an exponent, and 8 bits of it would
    be too few. Keys and values must be finite, hidden ones too."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        raise NotImplementedError("kernel='flash' has no forward-mode derivative; use kernel='naive'.")
    will_learn = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    n_scores = query.shape[:3].numel() * key.shape[2]
    keep = will_learn and n_scores <= MAX_KEPT
    return plain_attention(query, key, value, table, bias, keep)[0]


# Blocks: some queries of some pairs of stream and head.


def pair_groups(B: int, H: int, S: int, K: int) -> Iterator[tuple[slice, slice]]:
    """The streams and heads of each group of blocks, the largest group first: all heads of some streams, or
    some heads of one, so that a group's part of a tensor in the order of ``[B, H, …]`` is one piece; 2, 4,
    8 … pairs, which threads share evenly."""
    scores_per_pair = min(S, QUERIES) * K
    # The largest power of 2 that fits into the workspace, but at least 2.
    max_pairs = 1 << max((WORKSPACE // scores_per_pair).bit_length() - 1, 1)
    n_heads = min(H, max_pairs)
    n_streams = max(min(B, max_pairs // H), 1)
    for stream in range(0, B, n_streams):
        for head in range(0, H, n_heads):
            yield slice(stream, min(stream + n_streams, B)), slice(head, min(head + n_heads, H))


def query_blocks(S: int) -> Iterator[slice]:
    """The queries of each block of a group, the last ones first: they see all keys, so their gradients of
    keys and values come first, and are written, not added."""
    for stop in range(S, 0, -QUERIES):
        yield slice(max(stop - QUERIES, 0), stop)


def count_visible_keys(K: int, S: int, queries: slice, bias: Tensor | None) -> int:
    """How many of K keys, from the first, a block's ``queries`` are multiplied with: up to its last query's
    own, or, with a ``bias``, which says what they see, all."""
    return K if bias is not None else K - S + queries.stop


def concat_table(key: Tensor, table: Tensor) -> Tensor:
    """``key [b, h, K, E]`` beside ``table [K, P]``, by pairs of stream and head, n = b·h: ``[n, K, E +
    P]``."""
    return torch.cat((key, table.expand(*key.shape[:2], -1, -1)), dim=-1).flatten(0, 1)


def bias_of_block(bias: Tensor | None, streams: slice, heads: slice, queries: slice) -> Tensor | None:
    """The part of the ``bias``, ``[S, K]`` or ``[B or 1, H or 1, S, K]``, for a block: ``[s, K]`` or ``[b or
    1, h or 1, s, K]``."""
    if bias is None:
        return None
    bias = bias[..., queries, :]
    if bias.dim() == 2:
        return bias
    bias = bias[streams] if bias.shape[0] > 1 else bias
    return bias[:, heads] if bias.shape[1] > 1 else bias


def new_workspace(query: Tensor, K: int) -> Tensor:
    """Space for the scores of any block, ``[·]``: new memory for each would be slow, and much of it would
    wait to be used again."""
    B, H, S, _ = query.shape
    streams, heads = next(pair_groups(B, H, S, K))  # the largest
    n = (streams.stop - streams.start) * (heads.stop - heads.start)
    return query.new_empty(n * min(S, QUERIES) * K)


def scores_in(workspace: Tensor, block_query: Tensor, k: int) -> Tensor:
    """The part of the workspace for the scores of ``block_query [b, h, s, ·]`` and ``k`` keys: ``[n, s,
    k]``."""
    b, h, s, _ = block_query.shape
    return workspace[: b * h * s * k].view(b * h, s, k)


def write_probabilities(out: Tensor, block_query: Tensor, keys: Tensor, bias: Tensor | None) -> None:
    """Write attention of a ``block_query [b, h, s, E + P]``, over √E, to ``keys [n, k, E + P]`` to ``out
    [n, s, k]``: causal, or with the ``bias`` of ``[b, h, s, k]`` scores."""
    b, h, s, _ = block_query.shape
    k = keys.shape[1]
    torch.bmm(block_query.flatten(0, 1), keys.mT, out=out)  # with out, autocast doesn't round it
    if bias is None:
        # The block's queries have the last s keys; of these, each sees those up to its own.
        is_future = torch.ones(s, s, dtype=torch.bool).triu_(1)
        out[:, :, k - s :].masked_fill_(is_future, -math.inf)
    else:
        out.view(b, h, s, k).add_(bias)
    torch.softmax(out, dim=-1, out=out)


# The operator and its gradient.


@torch.library.custom_op("memformers::plain_attention", mutates_args=(), device_types="cpu")
def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """The result of [`attention`][] and, if ``keep``, each block's probabilities, ``[n, s, k]``."""
    B, H, S, _ = query.shape
    K, E = key.shape[2:]
    output = sequence_first(value[:, :, K - S :])  # [B, H, S, E]
    kept: list[Tensor] = []
    workspace = query.new_empty(0) if keep else new_workspace(query, K)
    for streams, heads in pair_groups(B, H, S, K):
        keys = concat_table(key[streams, heads].to(query.dtype), table)  # [n, K, E + P]
        values = value[streams, heads].flatten(0, 1)  # [n, K, E]
        for queries in query_blocks(S):
            k = count_visible_keys(K, S, queries, bias)
            block_query = query[streams, heads, queries] / math.sqrt(E)  # [b, h, s, E + P]
            b, h, s, _ = block_query.shape

            # Scores, and in their place probabilities: [n, s, k].
            if keep:
                probabilities = query.new_empty(b * h, s, k)
                kept.append(probabilities)
            else:
                probabilities = scores_in(workspace, block_query, k)
            block_bias = bias_of_block(bias, streams, heads, queries)
            write_probabilities(probabilities, block_query, keys[:, :k], block_bias)

            attended = torch.bmm(probabilities.to(value.dtype), values[:, :k])  # [n, s, E]
            output[streams, heads, queries] = attended.view(b, h, s, E)
    return output, kept


@torch.library.custom_op("memformers::plain_attention_backward", mutates_args=(), device_types="cpu")
def plain_attention_backward(
    grad: Tensor, kept: list[Tensor], query: Tensor, key: Tensor, value: Tensor, table: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, in their shapes, from that of the output, ``[B, H, S, E]``, and
    the probabilities that were ``kept``, each block's ``[n, s, k]``; none: they are computed again."""
    B, H, S, _ = query.shape
    K, E = key.shape[2:]
    d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    d_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    d_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    kept_by_block = iter(kept)
    workspace = query.new_empty(0) if kept else new_workspace(query, K)
    gradient_workspace = new_workspace(query, K)
    for streams, heads in pair_groups(B, H, S, K):
        # In half precision, scores and what is summed to them are exact; products with gradients are rounded.
        exact_keys = concat_table(key[streams, heads].to(query.dtype), table)  # [n, K, E + P]
        rounded_keys = exact_keys.to(key.dtype)
        exact_values = value[streams, heads].flatten(0, 1).to(query.dtype)  # [n, K, E]

        # Views, into which blocks write: a group's pairs are one piece of memory.
        d_keys = d_key[streams, heads].flatten(0, 1)  # [n, K, E]
        d_values = d_value[streams, heads].flatten(0, 1)  # [n, K, E]
        for queries in query_blocks(S):
            is_first = queries.stop == S
            k = count_visible_keys(K, S, queries, bias)
            block_query = query[streams, heads, queries] / math.sqrt(E)  # [b, h, s, E + P]

            # Probabilities of the forward pass: [n, s, k].
            if kept:
                probabilities = next(kept_by_block)
            else:
                probabilities = scores_in(workspace, block_query, k)
                block_bias = bias_of_block(bias, streams, heads, queries)
                write_probabilities(probabilities, block_query, exact_keys[:, :k], block_bias)

            # Values. Contiguous, since products of transposed matrices are slower if rows are far apart.
            d_output = grad[streams, heads, queries].flatten(0, 1).contiguous()  # [n, s, E]
            accumulate(d_values[:, :k], probabilities.to(value.dtype), d_output, is_first)

            # Softmax: dS = P ∘ (dP − rowsum(dP ∘ P)).
            d_scores = scores_in(gradient_workspace, block_query, k)  # [n, s, k]
            torch.bmm(d_output.to(query.dtype), exact_values[:, :k].mT, out=d_scores)
            torch._softmax_backward_data(d_scores, probabilities, -1, query.dtype, grad_input=d_scores)

            # Keys and queries. The table is no parameter and has no gradient.
            d_scores = d_scores.to(key.dtype)
            content = block_query[..., :E].to(key.dtype).flatten(0, 1)  # [n, s, E]
            accumulate(d_keys[:, :k], d_scores, content, is_first)
            d_block_query = torch.bmm(d_scores, rounded_keys[:, :k])  # [n, s, E + P]
            d_query[streams, heads, queries] = d_block_query.view(block_query.shape)
    # Scores have queries over √E, and so do the gradients of keys; those of queries are divided now.
    return d_query.div_(math.sqrt(E)), d_key, d_value


def accumulate(target: Tensor, scores: Tensor, x: Tensor, is_first: bool) -> None:
    """Add the product of ``scores [n, s, k]`` and ``x [n, s, E]`` over queries to ``target [n, k, E]``, which
    the first block, of all keys, writes."""
    if is_first:
        torch.bmm(scores.mT, x, out=target)
    else:
        target += torch.bmm(scores.mT, x)


@plain_attention.register_fake
def _(query, key, value, table, bias, keep):  # type: ignore[no-untyped-def]
    B, H, S, _ = query.shape
    K = key.shape[2]
    kept = []
    for streams, heads in pair_groups(B, H, S, K) if keep else ():
        n = (streams.stop - streams.start) * (heads.stop - heads.start)
        for queries in query_blocks(S):
            s = queries.stop - queries.start
            kept.append(query.new_empty(n, s, count_visible_keys(K, S, queries, bias)))
    return sequence_first(value[:, :, K - S :]), kept


@plain_attention_backward.register_fake
def _(grad, kept, query, key, value, table, bias):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as all scores
    ctx.save_for_backward(*inputs[:5], *output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    query, key, value, table, bias, *kept = ctx.saved_tensors
    gradients = plain_attention_backward(grad, kept, query, key, value, table, bias)
    return *gradients, None, None, None


def _no_second_derivative(*_: object) -> NoReturn:
    raise NotImplementedError(
        "the flash kernel, which kernel='auto' chooses for some sizes, has no second derivative; build the "
        "model with kernel='naive' to compute one."
    )


plain_attention.register_autograd(_backward, setup_context=_setup_context)
plain_attention_backward.register_autograd(_no_second_derivative)
