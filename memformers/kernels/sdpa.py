"""Relative attention by PyTorch's ``scaled_dot_product_attention``, with the shifted position scores as its
additive bias: for every device but a CPU. The bias takes memory, B·H·S·K numbers in the dtype of the queries;
PyTorch needs its gradient too, and chooses the backend (flash kernels take no such bias)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, v: Tensor | None = None,
    s: Tensor | None = None, mask: Tensor | None = None, key_start: Tensor | None = None,
    dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][], with the same arguments: ``[B, H, S, E]``."""
    S, E = query.shape[2:]
    K = key.shape[2]

    # Position scores in float32: a score is an exponent, and 8 bits of it would be too few.
    exact = torch.promote_types(query.dtype, torch.float32)
    q = query.to(exact)
    u = u.to(exact)
    r = r.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        with_v = q if v is None else q + v.to(exact)[:, None]
        position = torch.einsum("bhie,hde->bhid", with_v, r.flip(1))  # by descending distance
    if s is not None:
        position = position + s.flip(1)[:, None]
    bias = naive.relative_shift(position) / math.sqrt(E)  # [B, H, S, K]

    # Hidden keys.
    visible = naive.causal_mask(S, K, query.device) if mask is None else mask
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    bias = bias.masked_fill(~visible, -math.inf)

    # Subtracting a constant from all scores of a query changes no probability. Without the largest, the
    # scores that matter are small, and rounding them to half precision loses least.
    if exact != query.dtype:
        bias = bias - bias.detach().amax(-1, keepdim=True)
    with_u = (q + u[:, None]).to(query.dtype)
    return F.scaled_dot_product_attention(with_u, key, value, bias.to(query.dtype), dropout_prob)
