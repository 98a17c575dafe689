"""For type checkers alone: types that PyTorch leaves open."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def typed_like(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """A decorator that gives a function the types of ``function``, its overloads too. A module's ``__call__``
    has so the arguments and the result of its ``forward``; an assignment would be Any to pyright."""
    raise NotImplementedError  # modules use it only where TYPE_CHECKING is true
