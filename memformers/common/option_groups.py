"""Options in groups, which ``--help`` shows one below the other.

tyro shows a group for each dataclass. A command whose options are spread over nested configs is therefore
parsed as another dataclass, made for this purpose, which holds one dataclass for each group. The configs then
get their values from it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints

T = TypeVar("T")
OTHER = "other"


@dataclass(frozen=True)
class Group:
    """A group of options."""

    about: str
    """What the options have in common, in one sentence."""
    names: Sequence[str]
    """The names of the configs' fields; those that a command doesn't have are left out."""


@dataclass(frozen=True)
class Option:
    """A field of a config that can be given on the command line."""

    name: str
    kind: Any
    """Its annotation."""
    meaning: str
    """The docstring below it."""
    default: Any


def options_of(config: Any) -> Iterator[Option]:
    """All fields of the dataclass instance ``config`` and of those in it, with its values as defaults."""
    kinds, meanings = get_type_hints(type(config), include_extras=True), field_docstrings(type(config))
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from options_of(value)
        else:
            yield Option(each.name, kinds[each.name], meanings.get(each.name, ""), value)


def field_docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    return {
        named.target.id: " ".join(said.value.value.split())
        for named, said in zip(body.body, body.body[1:], strict=False)
        if isinstance(named, ast.AnnAssign) and isinstance(named.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
        if isinstance(said.value.value, str)
    }


def grouped(config: Any, first: Sequence[str], groups: Mapping[str, Group]) -> type:
    """A dataclass of all options of ``config``: those called ``first`` on top, then each of ``groups`` under
    its title, then the options that are in none of them."""
    import tyro

    options = {option.name: option for option in options_of(config)}
    named = {name for group in groups.values() for name in group.names} | {*first}
    rest = Group("Further options.", [name for name in options if name not in named])

    def made(name: str) -> tuple[str, Any, Any]:
        option = options[name]
        about = tyro.conf.arg(help=option.meaning, prefix_name=False)
        return name, Annotated[option.kind, about], field(default=option.default)

    parts: list[tuple[str, Any, Any]] = [made(name) for name in first]
    for title, group in {**groups, OTHER: rest}.items():
        members = [made(name) for name in group.names if name in options and name not in first]
        if members:
            part = make_dataclass(title, members, frozen=True, namespace={"__doc__": group.about})
            parts.append((title, part, field(default_factory=part)))
    kind = type(config)
    return make_dataclass(kind.__name__, parts, frozen=True, namespace={"__doc__": kind.__doc__})


def with_values(config: T, parsed: Any) -> T:
    """A copy of ``config`` and of the dataclasses in it, with the values of ``parsed``, which is an instance
    of the class that [`grouped`][] returned. Raises what these dataclasses raise."""
    return _replaced(config, dict(_values(parsed)))


def _values(parsed: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(parsed):
        value = getattr(parsed, each.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield each.name, value


def _replaced(config: Any, values: Mapping[str, Any]) -> Any:
    changes = {}
    for each in fields(config):
        inner = getattr(config, each.name)
        changes[each.name] = _replaced(inner, values) if is_dataclass(inner) else values[each.name]
    return replace(config, **changes)
