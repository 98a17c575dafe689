"""Relative attention as pure functions of tensors, and the choice between them.

The letters and axes of this project, used everywhere and explained only here:

| letter | meaning |
|---|---|
| S | tokens in the segment being processed (the queries) |
| M | memory: past layer inputs, uncompressed |
| C | compressed memory: each slot summarizes ``compression_rate`` (c) positions |
| K | keys in order of time, ``K = C + M + S`` |
| B | batch: parallel streams of text |
| H | heads |
| D | ``d_model``, the width of the model |
| E | ``d_head = D / H`` |

Modules take and return ``[S, B, D]``; kernels take and return ``[B, H, S, E]`` (queries) and
``[B, H, K, E]`` (keys, values), like ``torch.nn.functional.scaled_dot_product_attention``.
The order changes only in [`memformers.models.attention`][].
"""

from typing import Literal

import torch
from torch import Tensor

from memformers.kernels import blocked, naive, sdpa

KernelName = Literal["auto", "naive", "blocked", "sdpa", "flash"]

MIN_SCORES_FOR_BLOCKED = 1 << 19
"""Scores, over all streams and heads, from which the blocked kernel makes a training step faster: with fewer,
less than 2 MiB in float32, the naive kernel's temporaries fit into the cache."""

MIN_QUERIES_FOR_FLASH = 32
"""Queries from which the flash kernel makes a training step faster: with fewer, copying keys beside their
position features costs more than it saves."""


def is_flash_faster(query: Tensor, position_features: int) -> bool:
    """Whether [`memformers.kernels.flash`][] computes attention of ``query [B, H, S, E]`` with so many
    position features faster than other kernels. It was measured on CPUs only."""
    # Beyond E / 2 features, the longer product costs more than the shift and the bias that it saves.
    S, E = query.shape[2:]
    is_half = query.dtype.itemsize < 4
    most_features = E // 2 if is_half else E  # scores are in float32, all other products are faster
    return query.device.type == "cpu" and S >= MIN_QUERIES_FOR_FLASH and position_features <= most_features


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, mask: Tensor | None = None, key_start: Tensor | None = None,
    dropout_prob: float = 0.0, kernel: KernelName = "auto",
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], ``[B, H, S, E]``, computed by ``kernel``. ``"auto"``
    takes blocked for large attention on a CPU, naive for small, and sdpa on all other devices. The blocked
    kernel takes no ``mask`` and runs on a CPU only; [`memformers.kernels.flash`][] takes other arguments."""
    # The fastest kernel that takes r itself.
    if kernel == "auto":
        n_scores = query.shape[:3].numel() * key.shape[2]
        if query.device.type != "cpu":
            kernel = "sdpa"
        elif mask is None and n_scores >= MIN_SCORES_FOR_BLOCKED:
            kernel = "blocked"
        else:
            kernel = "naive"

    if kernel == "blocked":
        return blocked.relative_attention(
            query, key, value, r, u=u, v=v, s=s, key_start=key_start, dropout_prob=dropout_prob
        )
    assert kernel != "flash", "the flash kernel takes the factors of r"
    compute = sdpa.relative_attention if kernel == "sdpa" else naive.relative_attention
    return compute(
        query, key, value, r, u=u, v=v, s=s, mask=mask, key_start=key_start, dropout_prob=dropout_prob
    )


def is_concrete_cpu(x: Tensor) -> bool:
    """Whether the numbers of ``x`` can be read now without waiting for a device."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()
