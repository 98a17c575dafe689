"""What the kernels that are PyTorch operators of their own share: the order of results in memory, and which
derivatives they don't have."""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


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
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed(x)


def no_second_derivative(kernel: str) -> Callable[..., NoReturn]:
    """The derivative of a kernel's backward pass: a function that raises an error with advice."""

    def backward(*_: object) -> NoReturn:
        raise NotImplementedError(
            f"kernel={kernel!r}, which kernel='auto' chooses for some sizes, has no second derivative; "
            f"build the model with kernel='naive' to compute one."
        )

    return backward
