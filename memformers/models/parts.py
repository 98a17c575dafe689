"""Parts of your own: modules that a setting such as ``gate`` names, and first weights of all modules."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.models.registry import lookup


def build_part(setting: str, name: str, *arguments: Any) -> nn.Module:
    """An instance of the class of your own that a ``setting`` calls so."""
    part: nn.Module = (build := partial(lookup(setting, name), *arguments))()
    part.build_again = build  # type: ignore[assignment]
    return part


def output_of(part: nn.Module, shape: Sequence[int], *given: Any) -> Tensor:
    """What a ``part`` of your own returns for ``given``, a tensor ``[*shape]``; else UserError."""
    check_returned(type(part), "forward", output := part(*given), shape)
    return output


def check_returned(kind: type, method: str, output: Any, shape: Sequence[int]) -> None:
    """Raise UserError unless a ``method`` of a class of your own returned a tensor of this ``shape``."""
    if not isinstance(output, Tensor) or output.shape != tuple(shape):
        came = list(output.shape) if isinstance(output, Tensor) else repr(output)
        raise UserError(f"{kind.__qualname__}.{method} returned {came}, expected a tensor {list(shape)}.")


def reset_parameters(modules: Sequence[nn.Module]) -> None:
    """Let each module with a ``reset_parameters`` draw its weights anew. A part of your own without one is
    built again, since its constructor may have set weights of the modules in it."""
    for module in modules:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        elif is_built_whole(module):
            module.load_state_dict(module.build_again().state_dict())  # type: ignore[operator]


def is_built_whole(module: nn.Module) -> bool:
    """Whether the weights of all modules within ``module`` are as its constructor leaves them."""
    return hasattr(module, "build_again") and not hasattr(module, "reset_parameters")


def children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules within ``module``, by name, and then itself: its ``reset_parameters`` has the last word."""
    for child_name, child in () if is_built_whole(module) else module.named_children():
        yield from children_first(child, f"{name}.{child_name}")
    yield name, module
