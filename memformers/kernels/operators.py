"""What the kernels share: numbers that are not finite, the order of results in memory, and the derivatives
that PyTorch operators of our own don't have."""

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def finite_part(key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``key`` and ``value [B, H, K, E]`` with 0 in place of numbers that are not finite, and what is to be
    added to all scores of each key, ``[B, H, K]``: NaN if it or its value had such numbers, otherwise 0.

    Scores of hidden keys are replaced, so that such a key reaches nothing; its own numbers would: 0 · NaN is
    NaN in a product with probabilities. If all numbers, those of ``others`` too, are known to be finite, the
    inputs are returned as they are, and None.
    """
    if known_finite(key, value, *others):
        return key, value, None
    poison = (key.detach() * 0).sum(-1) + (value.detach() * 0).sum(-1)
    return key.where(key.isfinite(), 0), value.where(value.isfinite(), 0), poison


def known_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite: a sum with one that isn't is not finite either. It is not
    known on a GPU, which would have to be waited for, and in graphs and ``torch.func``, where numbers can't
    be asked for. Fake tensors stand for finite numbers."""
    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return False
    if any(isinstance(x, FakeTensor) for x in tensors):
        return True
    return not is_transformed(*tensors) and all(math.isfinite(x.detach().sum().item()) for x in tensors)


def sequence_first(x: Tensor) -> Tensor:
    """An empty ``[B, H, T, E]`` like ``x`` whose memory is in the modules' order, ``[T, B, H, E]``."""
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether any of these tensors is within a transformation of ``torch.func``, such as ``vmap``, ``grad``
    or ``jvp``, or carries a forward-mode derivative. A custom operator has no rules for these."""
    if torch.compiler.is_compiling():
        return False
    in_forward_mode = forward_ad._current_level >= 0
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or (in_forward_mode and forward_ad.unpack_dual(x).tangent is not None)
        for x in tensors
        if x is not None
    )


def has_values(x: Tensor) -> bool:
    """Whether the numbers of ``x``, of any shape, may be read at once: a GPU would have to be waited for, and
    in a graph or a transformation there are none."""
    is_real = not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)
    return is_real and x.device.type == "cpu" and not is_transformed(x)


def no_second_derivative(kernel: str) -> Callable[..., NoReturn]:
    """The derivative of a kernel's backward pass: a function that raises an error with advice."""

    def backward(*_: object) -> NoReturn:
        raise NotImplementedError(
            f"kernel={kernel!r}, which kernel='auto' chooses for some sizes, has no second derivative; "
            f"build the model with kernel='naive' to compute one."
        )

    return backward
