"""Linear maps: a layer's norm folded into them, and maps of one or two positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Affine = tuple[Tensor, Tensor]
"""Weight ``[out, in]`` and bias ``[out]``."""


def standardized(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    """x̂: ``x [·, B, D]`` as ``norm`` gives it before its scale and shift; ``x`` itself without a norm."""
    return x if norm is None else F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def fold(norm: nn.LayerNorm | None, linear: nn.Linear) -> Affine:
    """Weight and bias of ``linear`` after the scale and shift of ``norm``, if there is one, in one map."""
    weight, bias = linear.weight, linear.bias
    if norm is None:
        return weight, weight.new_zeros(linear.out_features) if bias is None else bias
    shift = weight @ norm.bias
    return weight * norm.weight, shift if bias is None else shift + bias


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` for ``x [·, in]``, a linear map or any module in its place: ``[·, out]``."""
    if type(module) is nn.Linear and is_worth_cutting(module.weight, x) and not has_hooks(module):
        return affine((module.weight, module.bias), x)
    return module(x)


def has_hooks(module: nn.Module) -> bool:
    """Whether something is to be called with the module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def affine(weights: tuple[Tensor, Tensor | None], x: Tensor) -> Tensor:
    """``x [·, in]`` times the weight, plus the bias, ``[·, out]``; at the speed of memory for few rows.

    PyTorch gives a matrix of one row to one core; as a batch of matrices, the weight is read by all.
    """
    weight, bias = weights
    if not is_worth_cutting(weight, x):
        return F.linear(x, weight, bias)
    (features, inputs), rows = weight.shape, x.numel() // x.shape[-1]
    of_each = x.reshape(rows, inputs).expand(PARTS, rows, inputs)
    # Rows times transposed matrices, [PARTS, rows, out / PARTS].
    out = torch.bmm(of_each, weight.view(PARTS, features // PARTS, inputs).mT)
    out = out.transpose(0, 1).reshape(*x.shape[:-1], features)
    return out if bias is None else out + bias


PARTS = 4
"""How many matrices the weight is cut into for few rows."""
LARGE = 1 << 17
"""Numbers in a weight, from which on that is faster: half a MiB in float32, which no longer stays in a core's
cache from one token to the next."""


def is_worth_cutting(weight: Tensor, x: Tensor) -> bool:
    """Whether a large weight ``[out, in]`` meets only one or two rows ``x [·, in]``, as when text is
    generated, on CPU in float32."""
    if torch.is_grad_enabled() or x.numel() > 2 * x.shape[-1] or weight.numel() < LARGE:
        return False
    return x.device.type == "cpu" and x.dtype == torch.float32 and weight.shape[0] % PARTS == 0
