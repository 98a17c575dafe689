"""Which kernel computes an attention: the one that was named, or the fastest that can."""

from typing import Literal, get_args

from torch import Tensor

from memformers.kernels import blocked, naive

KernelName = Literal["auto", "naive", "blocked"]

WORTH_BLOCKING = 1 << 21
"""Scores, over all heads and streams, from which on the blocked kernel is the faster: 8 MiB in
float32. Below, the naive kernel's temporaries fit the cache, and it takes fewer calls."""


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
    dropout_prob: float = 0.0,
    kernel: KernelName = "auto",
) -> Tensor:
    """:func:`memformers.kernels.naive.relative_attention` by ``kernel``; ``"auto"`` picks by device,
    size and what is asked. Raises ValueError for a named kernel that can't do it."""
    obstacle = what_blocked_lacks(query, mask, dropout_prob)
    if kernel == "blocked" and obstacle:
        raise ValueError(f"kernel='blocked' {obstacle}; use kernel='auto' or 'naive'.")
    scores = query.shape[:3].numel() * key.shape[2]
    if kernel == "blocked" or (kernel == "auto" and not obstacle and scores >= WORTH_BLOCKING):
        return blocked.relative_attention(query, key, value, r, u=u, v=v, s=s)
    return naive.relative_attention(query, key, value, r, u=u, v=v, s=s, mask=mask, dropout_prob=dropout_prob)


def what_blocked_lacks(query: Tensor, mask: Tensor | None, dropout_prob: float) -> str:
    """Why the blocked kernel can't compute this, in words, or an empty string."""
    if query.device.type != "cpu":
        return f"runs on CPU, and the model is on {query.device}"
    if mask is not None:
        return "is causal and takes no explicit mask"
    if dropout_prob:
        return f"can't drop attention probabilities, and dropout_prob={dropout_prob}"
    return ""


def check_kernel(kernel: str) -> None:
    """Raise ValueError for a kernel of another name."""
    if kernel not in get_args(KernelName):
        names = ", ".join(get_args(KernelName))
        raise ValueError(f"kernel={kernel!r} is unknown; use one of {names}.")
