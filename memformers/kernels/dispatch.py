"""Chooses the kernel of an attention: the one that is named, or the fastest that can compute it."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from memformers.kernels import blocked, naive
from memformers.kernels.transforms import is_transformed

KernelName = Literal["auto", "naive", "blocked", "fused", "augmented"]

WORTH_BLOCKING = 1 << 19
"""The number of scores, over all heads and streams, from which the blocked kernel is faster in whole
training steps: 2 MiB in float32. With fewer, the naive kernel's temporaries fit into the cache, and it needs
fewer calls."""


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    mask: Tensor | None = None,
    key_start: Tensor | None = None,
    dropout_prob: float = 0.0,
    kernel: KernelName = "auto",
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][] computed by ``kernel``; ``"auto"`` chooses one by
    device, size and arguments. Its arguments and its result, ``[B, H, S, E]``, are the same. Raises
    ValueError for a named kernel that can't compute this, such as ``"augmented"``, which takes sinusoids and
    W_R instead of r and is called by the attention module."""
    transformed = is_transformed(query, key, value, r, u, v, s)
    if kernel == "auto":
        kernel = "naive" if transformed else fastest(query, key, mask, dropout_prob)
    if kernel == "naive":
        return naive.relative_attention(
            query, key, value, r, u=u, v=v, s=s, mask=mask, key_start=key_start, dropout_prob=dropout_prob
        )
    reason = obstacle(kernel, query, mask, dropout_prob)
    if transformed and kernel != "augmented":
        reason = "can't run within torch.func (vmap, grad, jvp), nor in forward mode"
    if reason:
        raise ValueError(f"kernel='{kernel}' {reason}; use kernel='auto' or 'naive'.")
    if kernel == "augmented":
        raise ValueError(
            "kernel='augmented' needs sinusoids instead of r; choose it when you build the attention."
        )
    if kernel == "blocked":
        return blocked.relative_attention(
            query, key, value, r, u=u, v=v, s=s, key_start=key_start, dropout_prob=dropout_prob
        )
    from memformers.kernels import fused  # here, since not every machine has Triton

    return fused.relative_attention(query, key, value, r, u=u, v=v, s=s, key_start=key_start)


def fastest(query: Tensor, key: Tensor, mask: Tensor | None, dropout_prob: float) -> KernelName:
    """The kernel that ``"auto"`` chooses for ``query [B, H, S, E]`` and ``key [B, H, K, E]``. On a GPU this
    is the naive one: the fused kernel is correct in Triton's interpreter, but has not been measured yet, so
    it runs only if it is named."""
    scores = query.shape[:3].numel() * key.shape[2]
    if scores >= WORTH_BLOCKING and not obstacle("blocked", query, mask, dropout_prob):
        return "blocked"
    return "naive"


def obstacle(kernel: KernelName, query: Tensor, mask: Tensor | None, dropout_prob: float) -> str:
    """Why a fast kernel can't compute this for ``query [B, H, S, E]``, in words, or an empty string."""
    if mask is not None:
        return "is causal and takes no explicit mask"
    if kernel == "fused":
        return what_fused_lacks(query, dropout_prob)
    if kernel == "augmented" or query.device.type == "cpu":
        return ""
    return f"runs on CPU, but the model is on {query.device}"


def what_fused_lacks(query: Tensor, dropout_prob: float) -> str:
    """Why the fused kernel can't take ``query [B, H, S, E]``, in words, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install triton)"
    if dropout_prob:
        return f"can't drop attention probabilities, but dropout_prob={dropout_prob}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if query.device.type != "cuda" and not interpreted:
        return f"runs on a GPU, but the model is on {query.device}"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"takes float32, float16 and bfloat16, but the model works in {query.dtype}"
    return "" if query.shape[-1] <= 128 else f"takes d_head up to 128, but d_head={query.shape[-1]}"
