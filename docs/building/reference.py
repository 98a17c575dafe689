"""The reference: a page for each public name, one that lists them, and a page for each module."""

import re
from typing import Any

import griffe

import memformers
from docs.building.source import ROOT

PUBLIC = re.compile(r"^!public ([\w ]+)$", re.MULTILINE)
PLAIN = re.compile(r"Literal\[|[-\d.]+$")
HIDDEN = ("__init__", "__main__")
INDEX = "api/index.md"
"""The page that lists the public names."""


def with_public_names(markdown: str) -> str:
    """The page with a table of the names and what each is for each line ``!public NAME NAME``. Raises
    ValueError for a name that ``memformers`` doesn't have."""
    return PUBLIC.sub(lambda found: table_of(found[1].split()), markdown)


def table_of(names: list[str]) -> str:
    rows = [f"| [`{name}`]({name}.md) | {first_sentence(name)} |" for name in names if home(name)]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def first_sentence(name: str) -> str:
    """That of a public name's docstring, without the source in brackets."""
    text = " ".join((getattr(memformers, name).__doc__ or "").split("\n\n")[0].split())
    text = re.sub(r" \(\w+ et al\. \d+, \[arXiv [\d.]+\]\([^)]*\)[^)]*\)", "", text)
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z])", text)[0].rstrip(".:")
    return re.sub(r"\[`(\w+)`\]\[[\w.]*\]", r"`\1`", sentence.replace("``", "`"))


def public_page(name: str) -> str:
    """The page of a public name: how it is imported, where its source is, and its entry."""
    module, title = home(name), f"---\ntitle: {name}\n---\n\n"
    path = module.replace(".", "/") + ".py"
    fields = getattr(memformers, name).__dict__.get("__match_args__", ())  # of a dataclass or named tuple
    filters = ", ".join(f'"{pattern}"' for pattern in ("!^_", *(f"!^{field}$" for field in fields)))
    options = f"show_root_full_path: false, inherited_members: true, filters: [{filters}]"
    return (
        f"{title}::: {module}.{name}\n    options: {{{options}}}\n\n"
        f"Source: `{path}`, on the page of [`{module}`][{module}].\n"
    )


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


def page_of(name: str) -> str:
    return f"api/{name}.md"


def public_navigation() -> list[Any]:
    """The public names in the site's menu, in the order and the groups of the page that lists them."""
    menu: list[Any] = [INDEX]
    for part in (ROOT / "docs" / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]:
        names = [name for line in PUBLIC.findall(part) for name in line.split()]
        menu.append({part.partition("\n")[0]: [{name: page_of(name)} for name in names]})
    return menu


def module_navigation() -> list[Any]:
    """The modules in the site's menu, those of a package together."""
    rooms: dict[str, list[Any]] = {}
    for module in modules():
        room = ".".join(module.split(".")[:2])
        inside = module.removeprefix(f"{room}.")
        rooms.setdefault(room, []).append(page_of(module) if inside == module else {inside: page_of(module)})
    return [{room: pages if len(pages) > 1 else pages[0]} for room, pages in rooms.items()]


class Constructors(griffe.Extension):
    """Signatures that say what a caller has to give: named tuples get the constructor that Python makes of
    their fields; names for a choice of words, such as ``Positions``, or for a default are replaced by what
    they stand for. The fields of a public dataclass or named tuple become the table of its parameters."""

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
                if isinstance(member, griffe.Class) and member.name in memformers.__all__:
                    tell_fields(member)

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


def tell_fields(of: griffe.Class) -> None:
    """Add what the fields of a dataclass or named tuple, also inherited ones, say of themselves to the
    docstring of the class, as arguments."""
    is_tuple = "NamedTuple" in map(str, of.bases)
    if not is_tuple and "dataclass" not in " ".join(str(each.value) for each in of.decorators):
        return
    bases = [] if is_tuple else [base for base in reversed(of.mro()) if isinstance(base, griffe.Class)]
    documented = {}
    for each in [*bases, of]:
        for name, field in each.members.items():
            if not isinstance(field, griffe.Attribute) or "property" in field.labels:
                continue
            if field.annotation and field.docstring:
                documented[name] = " ".join(field.docstring.value.split())
    if documented and of.docstring:
        arguments = "\n".join(f"    {name}: {text}" for name, text in documented.items())
        before, _, after = of.docstring.value.partition("\n\n")
        of.docstring.value = f"{before}\n\nArgs:\n{arguments}\n\n{after}"


def constructor_of_fields(named_tuple: griffe.Class) -> griffe.Function:
    fields = [a for a in named_tuple.members.values() if isinstance(a, griffe.Attribute) and a.annotation]
    kind = griffe.ParameterKind("positional or keyword")
    of_fields = [
        griffe.Parameter(a.name, annotation=a.annotation, kind=kind, default=a.value) for a in fields
    ]
    return griffe.Function(
        "__init__", parameters=griffe.Parameters(griffe.Parameter("self", kind=kind), *of_fields)
    )
