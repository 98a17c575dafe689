"""The reference: a page of the public names, and a page for each module."""

import re
from typing import Any

import griffe

import memformers
from docs.building.source import ROOT

PUBLIC = re.compile(r"^!public (\w+)$", re.MULTILINE)
PLAIN = re.compile(r"Literal\[|[-\d.]+$")
HIDDEN = ("__init__", "__main__")
INDEX = "api/index.md"
"""The page of the public names."""


def with_public_names(markdown: str) -> str:
    """The page with an entry of the reference for each line ``!public NAME``. Raises ValueError for a name
    that ``memformers`` doesn't have."""
    return PUBLIC.sub(lambda found: entry(found[1]), markdown)


def entry(name: str) -> str:
    """What mkdocstrings takes for a public name, below a heading of the second level."""
    options = "heading_level: 3, show_root_full_path: false, inherited_members: true"
    return f"::: {home(name)}.{name}\n    options: {{{options}}}"


def home(name: str) -> str:
    """The module that defines a public name; else ValueError."""
    if name not in memformers.__all__:
        raise ValueError(f"memformers has no public {name!r}; change the line that asks for it.")
    module: str = getattr(memformers, name).__module__
    return module


def module_page(module: str) -> str:
    """A module's page, without the public names in it, which are on the page of these."""
    public = [name for name in memformers.__all__ if home(name) == module]
    title = f"---\ntitle: {module}\n---\n\n"  # the search shows it, and the menu only the last part
    if not public:
        return f"{title}::: {module}\n"
    filters = ", ".join(f'"{pattern}"' for pattern in ("!^_", *(f"!^{name}$" for name in public)))
    links = ", ".join(f"[`{name}`][{module}.{name}]" for name in public)
    return (
        f"{title}::: {module}\n    options:\n      filters: [{filters}]\n\nAmong the public names: {links}.\n"
    )


def modules() -> list[str]:
    """All public modules by name, packages before what is in them."""
    paths = sorted(ROOT.glob("memformers/**/*.py"), key=lambda path: path.with_suffix("").parts)
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    packages = [name.removesuffix(".__init__") for name in names if name.endswith(".__init__")]
    return sorted(
        [name for name in names if name.rpartition(".")[2] not in HIDDEN and "._" not in name] + packages
    )


def page_of(module: str) -> str:
    """Where its page is."""
    return f"api/{module}.md"


def navigation() -> list[Any]:
    """The reference in the site's menu: the public names, then the modules, those of a package together."""
    rooms: dict[str, list[Any]] = {}
    for module in modules():
        room = ".".join(module.split(".")[:2])
        inside = module.removeprefix(f"{room}.")
        rooms.setdefault(room, []).append(page_of(module) if inside == module else {inside: page_of(module)})
    menu = [{room: pages if len(pages) > 1 else pages[0]} for room, pages in rooms.items()]
    return [{"Public names": INDEX}, *menu]


class Constructors(griffe.Extension):
    """Signatures that say what a caller has to give: named tuples get the constructor that Python makes of
    their fields; names for a choice of words, such as ``Positions``, or for a default are replaced by what
    they stand for."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the whole package, once it is read and before dataclasses get their constructors."""
        self.complete(pkg)

    def complete(self, parent: griffe.Module | griffe.Class) -> None:
        """Complete all that is defined in a module or class."""
        for member in list(parent.members.values()):
            if isinstance(member, griffe.Attribute):
                member.annotation = self.spelled_out(member.annotation, member)
            elif isinstance(member, griffe.Function):
                for parameter in member.parameters:
                    parameter.annotation = self.spelled_out(parameter.annotation, member)
                    parameter.default = self.spelled_out(parameter.default, member)
            elif isinstance(member, griffe.Module | griffe.Class):
                self.complete(member)
                if isinstance(member, griffe.Class) and "NamedTuple" in map(str, member.bases):
                    member.set_member("__init__", constructor_of_fields(member))

    def spelled_out(self, expression: Any, where: griffe.Object) -> Any:
        """The choice of words, or the plain value, that an expression names; any other one as it is."""
        if isinstance(expression, griffe.ExprName):
            try:
                named = where.modules_collection[expression.canonical_path]
            except KeyError:
                return expression
            if named.is_attribute and PLAIN.match(str(named.value)):
                return named.value
        return expression


def constructor_of_fields(named_tuple: griffe.Class) -> griffe.Function:
    """What Python makes of a named tuple's fields."""
    fields = [a for a in named_tuple.members.values() if isinstance(a, griffe.Attribute) and a.annotation]
    kind = griffe.ParameterKind("positional or keyword")
    of_fields = [
        griffe.Parameter(a.name, annotation=a.annotation, kind=kind, default=a.value) for a in fields
    ]
    return griffe.Function(
        "__init__", parameters=griffe.Parameters(griffe.Parameter("self", kind=kind), *of_fields)
    )
