"""Whether a call of a module computes what its class and its weights say. Only then may a fast path read the
weights instead of calling the module."""

from typing import TypeGuard, TypeVar

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

M = TypeVar("M", bound=nn.Module)
PLAIN_WEIGHTS = frozenset({Tensor, nn.Parameter, type(None)})
"""The classes of plain weights, and of a missing one. Quantized and sharded weights have other classes; for
these, only a call of their module is safe."""


def is_unmodified(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether ``module`` is exactly of this ``kind`` and calling it computes what its weights say: it has no
    hooks, nor are there global ones, its ``forward`` was not replaced, and its weights are plain tensors.
    Wrapped and parametrized modules are of another kind; weight norm and pruning are hooks; quantized and
    sharded modules are of another kind or have other tensors."""
    if type(module) is not kind or is_hooked(module):
        return False
    for weight in module._parameters.values():
        # torch.export traces with fake tensors, which stand for plain ones.
        if type(weight) not in PLAIN_WEIGHTS and not isinstance(weight, FakeTensor):
            return False
    return True


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its class says, or something else observes it."""
    state = module.__dict__
    return bool(
        "forward" in state
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _has_any_global_hook()
    )
