"""Chooses the kernel of an attention: the one that is named, or the fastest that can compute it."""

import importlib.util
import math
import os
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memformers.kernels import blocked, naive
from memformers.kernels.operators import is_transformed
from memformers.kernels.self_test import is_proven

KernelName = Literal["auto", "naive", "blocked", "fused"]

WORTH_BLOCKING = 1 << 19
"""The number of scores, over all heads and streams, from which the blocked kernel is faster in whole training
steps: with fewer, less than 2 MiB in float32, the naive kernel's temporaries fit into the cache."""


class Support(NamedTuple):
    """What a kernel can compute; None and ∞: no limit."""

    mask: bool = True  # an explicit one
    transforms: bool = True  # torch.func (vmap, grad, jvp) and forward mode
    device: str | None = None  # the type of the only one
    dtypes: tuple[torch.dtype, ...] | None = None
    d_head: float = math.inf  # the greatest, in half precision
    package: str | None = None  # to be installed for it

    def widest(self, dtype: torch.dtype) -> float:
        """The greatest width of a head in ``dtype``: in float32, registers hold half as much."""
        return self.d_head / 2 if dtype == torch.float32 else self.d_head


HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
SUPPORT: dict[KernelName, Support] = {
    "naive": Support(),
    "blocked": Support(mask=False, transforms=False, device="cpu"),
    "fused": Support(False, False, device="cuda", dtypes=HALF_OR_SINGLE, d_head=256, package="triton"),
}
"""Every kernel; all take ``key_start``, dropout, both forms of positions, and tensors of any memory order."""


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, mask: Tensor | None = None, key_start: Tensor | None = None,
    dropout_prob: float = 0.0, kernel: KernelName = "auto",
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], ``[B, H, S, E]``, computed by ``kernel``, which must
    have no [`unsupported_reason`][]; ``"auto"`` is the [`fastest`][]."""
    if kernel == "auto":
        kernel = fastest(mask, query, key, value, r, u, v, s)
    options: dict[str, Any] = {"u": u, "v": v, "s": s, "key_start": key_start, "dropout_prob": dropout_prob}
    if kernel == "naive":
        return naive.relative_attention(query, key, value, r, mask=mask, **options)
    if kernel == "blocked":
        return blocked.relative_attention(query, key, value, r, **options)
    from memformers.kernels import fused  # here, since not every machine has Triton

    return fused.relative_attention(query, key, value, r, **options)


def fastest(mask: Tensor | None, query: Tensor, key: Tensor, *others: Tensor | None) -> KernelName:
    """The fastest kernel for attention of ``query [B, H, S, E]`` to ``key [B, H, K, E]`` that can compute it:
    on a GPU the fused one, if it has been proven there ([`is_proven`][])."""
    large = query.shape[:3].numel() * key.shape[2] >= WORTH_BLOCKING
    if large and not unsupported_reason("blocked", mask, query, key, *others):
        return "blocked"
    on_gpu = query.device.type == SUPPORT["fused"].device
    if on_gpu and not unsupported_reason("fused", mask, query, key, *others):
        return "fused" if is_proven(query.device, query.dtype, query.shape[-1]) else "naive"
    return "naive"


def unsupported_reason(kernel: KernelName, mask: Tensor | None, query: Tensor, *others: Tensor | None) -> str:
    """Why ``kernel`` can't compute attention of ``query [B, H, S, E]``, in words; empty if it can."""
    can = SUPPORT[kernel]
    if mask is not None and not can.mask:
        return "is causal and takes no explicit mask"
    if not can.transforms and is_transformed(query, *others):
        return "can't run within torch.func (vmap, grad, jvp), nor in forward mode"
    if can.package and importlib.util.find_spec(can.package) is None:
        return f"needs {can.package}, which is not installed (pip install {can.package})"
    interpreted = can.package == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if can.device not in (None, query.device.type) and not interpreted:
        return f"runs on {can.device}, but the model is on {query.device}"
    if can.dtypes and query.dtype not in can.dtypes:
        return f"takes {', '.join(map(str, can.dtypes))}, but the model works in {query.dtype}"
    if query.shape[-1] > (widest := can.widest(query.dtype)):
        return f"takes d_head up to {widest:g} in {query.dtype}, but d_head={query.shape[-1]}"
    return ""
