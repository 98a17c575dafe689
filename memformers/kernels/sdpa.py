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
    S, K, E = query.shape[2], key.shape[2], query.shape[3]
    # A score is an exponent, so its terms are rounded to half precision only once, and small.
    exact = torch.promote_types(query.dtype, torch.float32)
    q, u, r = query.to(exact), u.to(exact), r.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        position = torch.einsum("bhie,hde->bhid", q if v is None else q + v.to(exact)[:, None], r.flip(1))
    position = position if s is None else position + s.flip(1)[:, None]
    visible = naive.causal_mask(S, K, query.device) if mask is None else mask
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    bias = (naive.relative_shift(position) / math.sqrt(E)).masked_fill(~visible, -math.inf)  # [B, H, S, K]
    if exact != query.dtype:
        bias = bias - bias.detach().amax(-1, keepdim=True)
    with_u, bias = (x.to(query.dtype) for x in (q + u[:, None], bias))
    return F.scaled_dot_product_attention(with_u, key, value, bias, dropout_prob)
