"""Small attention on a CPU, where calling an operator costs more than its arithmetic: the naive kernel's
products and sums, in the same order and so with the same bits, in fewer operators. Attention and its gradient
take 0.7 of the time (one core of an Intel Xeon with AVX-512, S = 8, K = 16, B = 32, E = 32)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from memformers.kernels import naive

_HIDDEN: dict[tuple[int, int], Tensor] = {}
"""Boolean ``[S, K]``, the keys that causality hides, for each size that was asked for in this process."""


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, key_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], causal and without dropout: the same arguments,
    result ``[B, H, S, E]`` and gradients."""
    return SmallAttention.apply(query, key, value, r, u, v, s, key_start)


def can_compute(*inputs: Tensor | None) -> bool:
    """Whether the ``inputs`` have one dtype, which is exact enough for scores, and nothing transforms or
    traces the computation: an operator with its own gradient supports neither."""
    dtypes = {x.dtype for x in inputs if x is not None}
    is_exact = dtypes in ({torch.float32}, {torch.float64}) and not torch.is_autocast_enabled("cpu")
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return is_exact and not is_transformed and not torch._C._is_tracing()


def hidden_keys(S: int, K: int, key_start: Tensor | None) -> Tensor:
    """Boolean ``[S, K]``, or with ``key_start [B, S]`` ``[B, 1, S, K]``: the keys that a query doesn't
    see."""
    hidden = _HIDDEN.get((S, K))
    if hidden is None:
        # Outside of inference mode, since its tensors can't be used in training.
        with torch.inference_mode(False):
            hidden = ~naive.causal_mask(S, K, torch.device("cpu"))
        _HIDDEN[S, K] = hidden
    return hidden if key_start is None else hidden | ~naive.from_key_start(key_start, K)


class SmallAttention(torch.autograd.Function):
    """The operator and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor | None,
        s: Tensor | None, key_start: Tensor | None,
    ) -> Tensor:  # fmt: skip
        B, H, S, E = query.shape
        K = key.shape[2]

        # Terms (a) and (c), by key: [B·H, S, K].
        with_u = (query + u[:, None]).flatten(0, 1)  # [B·H, S, E]
        content = torch.bmm(with_u, key.flatten(0, 1).mT)

        # Terms (b) and (d), by descending distance K−1 … 0: [H, B·S, K].
        with_v = query if v is None else query + v[:, None]
        with_v = with_v.transpose(0, 1).reshape(H, B * S, E)
        vectors = r.flip(1)  # [H, K, E]
        position = torch.bmm(with_v, vectors.mT)
        if s is not None:
            position.add_(s.flip(1)[:, None])

        # Re-indexed by key, each row begins one number earlier. Entries of the future are other rows'.
        by_key = position.as_strided((B, H, S, K), (S * K, B * S * K, K - 1, 1), S - 1)
        scores = content.view(B, H, S, K).add_(by_key).div_(math.sqrt(E))
        hidden = hidden_keys(S, K, key_start)
        probabilities = scores.masked_fill_(hidden, -math.inf).softmax(dim=-1)
        attended = torch.bmm(probabilities.flatten(0, 1), value.flatten(0, 1))  # [B·H, S, E]

        ctx.save_for_backward(
            query, key, value, r, u, v, s, key_start, with_u, with_v, vectors, hidden, probabilities
        )
        return attended.view(B, H, S, E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them only once
        inputs = saved[:8]
        if torch.is_grad_enabled():
            return differentiable_gradients(grad, *inputs)

        _, key, value, _, _, v, s, _ = inputs
        with_u, with_v, vectors, hidden, probabilities = saved[8:]
        B, H, S, K = probabilities.shape
        E = key.shape[3]
        grad = grad.flatten(0, 1)  # [B·H, S, E]

        # Values.
        d_value = torch.bmm(probabilities.flatten(0, 1).mT, grad)  # [B·H, K, E]

        # Softmax: dS = P ∘ (dP − rowsum(dP ∘ P)).
        d_probabilities = torch.bmm(grad, value.flatten(0, 1).mT).view(B, H, S, K)
        d_scores = torch._softmax_backward_data(d_probabilities, probabilities, -1, grad.dtype)
        d_scores.masked_fill_(hidden, 0).div_(math.sqrt(E))

        # By descending distance, each row begins one number later.
        padded = grad.new_empty(B, H, S * (K + 1))
        padded[..., :S].zero_()
        padded[..., S:].view(B, H, S, K).copy_(d_scores)
        by_distance = padded.view(B, H, S, K + 1)[..., 1:]  # [B, H, S, K]

        # Vectors and scalars of distances, and queries as far as they meet these.
        d_s = None if s is None else by_distance.sum((0, 2)).flip(1)
        rows = by_distance.transpose(0, 1).reshape(H, B * S, K)
        d_r = torch.bmm(with_v.mT, rows).mT.flip(1)  # [H, K, E]
        d_position = torch.bmm(rows, vectors).view(H, B, S, E).transpose(0, 1)  # [B, H, S, E]
        d_v = None if v is None else d_position.sum((0, 2))

        # Keys, and queries as far as they meet these.
        d_scores = d_scores.flatten(0, 1)
        d_key = torch.bmm(d_scores.mT, with_u)  # [B·H, K, E]
        d_content = torch.bmm(d_scores, key.flatten(0, 1)).view(B, H, S, E)
        d_u = d_content.sum((0, 2))
        d_query = d_content + d_position
        return d_query, d_key.view(B, H, K, E), d_value.view(B, H, K, E), d_r, d_u, d_v, d_s, None


def differentiable_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor | None,
    s: Tensor | None, key_start: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients that belong to ``grad [B, H, S, E]``, with a gradient themselves: the reference's."""
    attended = naive.relative_attention(query, key, value, r, u=u, v=v, s=s, key_start=key_start)
    inputs = (query, key, value, r, u, v, s)
    learning = [x for x in inputs if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(attended, learning, grad, create_graph=True))
    by_input = [next(gradients) if x is not None and x.requires_grad else None for x in inputs]
    return *by_input, None
