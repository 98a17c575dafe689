"""Settings and arguments that are checked against their annotations: their type, and a range beside it."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from memformers.common.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
NAMES = {
    int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None",
    Any: "present",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The range of a number in a config, as a part of its annotation. NaN is in no range; ``below=math.inf``
    is for finite numbers.

    Examples:
        >>> from typing import Annotated
        >>> from memformers import Range
        >>> Share = Annotated[float, Range(0, below=1)]  # 0 ≤ x < 1
        >>> 0.0 in Range(0, below=1), 1.0 in Range(0, below=1)
        (True, False)
    """

    least: float = -math.inf
    """The smallest number in the range."""
    most: float = math.inf
    """The largest number in the range."""
    above: float | None = None
    """Numbers in the range are greater; None for no such bound."""
    below: float | None = None
    """Numbers in the range are less; None for no such bound."""

    def __contains__(self, number: float) -> bool:
        inside = self.above is None or number > self.above
        return inside and self.least <= number <= self.most and (self.below is None or number < self.below)

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        parts = [f"{word} {x:,}" for word, x in bounds.items() if x is not None and math.isfinite(x)]
        return " and ".join(parts + ["finite"] * (self.below == math.inf))


Count = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Probability = Annotated[float, Range(0, below=1)]
Positive = Annotated[float, Range(above=0)]


def check_fields(config: Any) -> None:
    """Raise UserError for the first field of the dataclass instance ``config`` whose value is not of its
    type, not among its choices, or outside its range."""
    kinds = annotations_of(config.__class__)
    for field in fields(config):
        check_value(field.name, getattr(config, field.name), kinds[field.name])


class Checked:
    """A dataclass whose fields are checked when it is built."""

    __post_init__ = check_fields


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, whose arguments are first checked as the fields of a config in [`check_fields`][]."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        kinds = annotations_of(function)
        # Only what is passed: defaults are right.
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check_value(name, value, kinds.get(name, Any))
        return function(*args, **kwargs)

    return checked


def check_value(name: str, value: object, kind: Any) -> None:
    if not matches(value, kind):
        raise UserError(f"expected {name} to be {describe_type(kind)}, got {name}={value!r}.")


def replace_nested(config: T, **settings: Any) -> T:
    """A copy of the dataclass instance ``config`` with other values of these ``settings``, fields of it or
    of a dataclass in it."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    # Settings of groups first: each group is built once, with all of its changes.
    for name, group in values.items():
        if is_dataclass(group):
            inner = {field.name for field in fields(group)} & settings.keys() - values.keys()
            if changes := {setting: settings.pop(setting) for setting in inner}:
                settings[name] = replace_nested(settings.get(name, group), **changes)
    return replace(config, **settings)  # type: ignore[type-var]


def check_keys(data: Mapping[str, Any], kinds: Mapping[str, Any], source: str) -> None:
    """Raise UserError, which names the ``source``, unless ``data`` has values of these ``kinds``."""
    for name, kind in kinds.items():
        if name not in data or not matches(data[name], kind):
            got = reprlib.repr(data[name]) if name in data else "nothing"
            raise UserError(f"{source} is broken: expected {name} to be {describe_type(kind)}, got {got}.")


@cache
def annotations_of(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


def matches(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of this ``kind``. Kinds that no config has, such as modules, match everything."""
    origin = get_origin(kind)
    args = get_args(kind)
    # Parts of an annotation.
    if origin is Annotated:
        return matches(value, args[0]) and all(value in x for x in args if isinstance(x, Range))
    if origin in (Union, UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    # Containers.
    if origin is list or (origin is tuple and args[1:] == (...,)):
        return isinstance(value, origin) and all(matches(x, args[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(matches(x, args[1]) for x in value.values())
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(
            name in value and matches(value[name], inner) for name, inner in kind.items()
        )
    # Plain values: True is no number, and a whole number is a number.
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    checked = kind in (str, bool, NoneType, Path) or (isinstance(kind, type) and is_dataclass(kind))
    return isinstance(value, kind) if checked else True


def describe_type(kind: Any) -> str:
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        return ", ".join([describe_type(args[0]), *(str(x) for x in args if isinstance(x, Range))])
    if origin in (Union, UnionType):
        described = []
        for arg in args:
            is_several = arg == tuple[args[0], ...]  # type: ignore[valid-type]
            described.append("a tuple of these" if is_several else describe_type(arg))
        return ", or ".join(described)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple, each {describe_type(args[0])}"
    return NAMES.get(kind, f"of type {getattr(kind, '__name__', kind)}")
