"""Docstrings as the reference shows them; a griffe extension that mkdocs.yml names."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Turns roles such as ``:class:`Memory```, by names that hold where they stand, into links."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when all modules were read."""
        link_roles(pkg)


def link_roles(obj: griffe.Object) -> None:
    """Of an object's docstring and those of all that is in it."""
    if obj.docstring:
        obj.docstring.value = linked(obj.docstring.value, obj)
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            link_roles(member)


def linked(docstring: str, obj: griffe.Object) -> str:
    """The docstring of ``obj`` with its roles as links. Raises ValueError for a name that is not there."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        if name.startswith(f"{obj.package.path}."):
            return f"[`{name.rpartition('.')[2]}`][{name}]"
        first, dot, rest = name.partition(".")
        try:
            return f"[`{name}`][{obj.resolve(first)}{dot}{rest}]"
        except griffe.NameResolutionError:
            raise ValueError(f"the docstring of {obj.path} names {name}, which is not known there.") from None

    return ROLE.sub(link, docstring)
