"""A layer's norm and its linear maps, brought together in one map."""

import torch.nn.functional as F
from torch import Tensor, nn

Affine = tuple[Tensor, Tensor]
"""Weight ``[out, in]`` and bias ``[out]``."""


def standardized(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    """x̂: ``x [·, B, D]`` as ``norm`` gives it before its scale and shift; ``x`` itself without a norm."""
    return x if norm is None else F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def fold(norm: nn.LayerNorm | None, linear: nn.Linear) -> Affine:
    """Weight and bias of ``linear`` after the scale and shift of ``norm``, if there is one, in one map."""
    if norm is None:
        none = linear.weight.new_zeros(linear.out_features)
        return linear.weight, none if linear.bias is None else linear.bias
    bias = linear.weight @ norm.bias
    return linear.weight * norm.weight, bias if linear.bias is None else bias + linear.bias
