"""What the kernels share: numbers that are not finite, memory order, and derivatives that don't exist."""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def all_finite(*tensors: Tensor) -> bool:
    """Whether all numbers of ``tensors``, of any shape, are known to be finite; fake tensors' are."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" if isinstance(x, FakeTensor) else has_values(x) and x.detach().sum().isfinite()
        for x in tensors
    )


def finite_part(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``key`` and ``value [B, H, K, E]`` with 0 in place of numbers that are not finite, and what is to be
    added to all scores of each key, ``[B, H, K]``: NaN if it or its value had such numbers, otherwise 0.
    A hidden key's numbers must go, since 0 · NaN is NaN in a product with probabilities."""
    poison = (key.detach() * 0).sum(-1) + (value.detach() * 0).sum(-1)
    return key.where(key.isfinite(), 0), value.where(value.isfinite(), 0), poison


def sequence_first(x: Tensor) -> Tensor:
    """An empty ``[B, H, T, E]`` like ``x`` whose memory is in the modules' order, ``[T, B, H, E]``."""
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether any of these tensors is within a transformation of ``torch.func``, such as ``vmap``, ``grad``
    or ``jvp``, or carries a forward-mode derivative. A custom operator has no rules for these."""
    return not torch.compiler.is_compiling() and any(
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None)
        for x in tensors
        if x is not None
    )


def has_values(x: Tensor) -> bool:
    """Whether the numbers of ``x``, of any shape, may be read at once: a GPU would have to be waited for, and
    in a graph or a transformation there are none."""
    no_values = torch.compiler.is_compiling() or isinstance(x, FakeTensor) or is_transformed(x)
    return not no_values and x.device.type == "cpu"


def no_second_derivative(kernel: str) -> Callable[..., NoReturn]:
    """The derivative of a kernel's backward pass: a NotImplementedError."""

    def backward(*_: object) -> NoReturn:
        raise NotImplementedError(
            f"kernel={kernel!r}, which kernel='auto' chooses for some sizes, has no second derivative; "
            f"build the model with kernel='naive' to compute one."
        )

    return backward
