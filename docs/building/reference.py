"""The reference: a page for each public name, one that lists them, and a page for each module."""

import re
from typing import Any

import griffe

import memformers
from docs.building.results import ROOT

PUBLIC = re.compile(r"^!public ([\w ]+)$", re.MULTILINE)
PLAIN = re.compile(r"Literal\[|[-\d.]+$")
INDEX = "api/index.md"
"""The page that lists the public names."""


def with_public_names(markdown: str) -> str:
    """The page with a table of the names and what each is for each line ``!public NAME NAME``. Raises
    ValueError for a name that ``memformers`` doesn't have."""

    def table(line: re.Match[str]) -> str:
        rows = [f"| [`{name}`]({name}.md) | {first_sentence(name)} |" for name in line[1].split()]
        return "\n".join(["| name | what it is |", "|---|---|", *rows])

    return PUBLIC.sub(table, markdown)


def first_sentence(name: str) -> str:
    """That of a public name's docstring, without the source in brackets."""
    if name not in memformers.__all__:
        raise ValueError(f"memformers has no public {name!r}; change the line that asks for it.")
    # The first paragraph, without the source in brackets
    text = " ".join((getattr(memformers, name).__doc__ or "").split("\n\n")[0].split())
    text = re.sub(r" \(\w+ et al\. \d+, \[arXiv [\d.]+\]\([^)]*\)[^)]*\)", "", text)
    # Its first sentence, in which links become code
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z])", text)[0].rstrip(".:")
    return re.sub(r"\[`(\w+)`\]\[[\w.]*\]", r"`\1`", sentence.replace("``", "`"))


def pages() -> dict[str, str]:
    """The pages of the public names and of the modules, by their paths; the search shows their titles."""
    texts = dict(zip(memformers.__all__, map(public_page, memformers.__all__), strict=True))
    for name in modules():
        texts[name] = module_page(name)
    return {f"api/{name}.md": f"---\ntitle: {name}\n---\n\n{text}" for name, text in texts.items()}


def public_page(name: str) -> str:
    """How a public name is imported, where its source is, and its entry."""
    module = home(name)
    # Fields are in the table of parameters.
    fields = fields_of(name)
    options = f"show_root_full_path: false, inherited_members: true, filters: [{without(fields)}]"
    return (
        f"::: {module}.{name}\n    options: {{{options}}}\n\n"
        f"Source: `{module.replace('.', '/')}.py`, on the page of [`{module}`][{module}].\n"
    )


def module_page(module: str) -> str:
    """A module without the public names in it, which have pages."""
    public = [name for name in memformers.__all__ if home(name) == module]
    if not public:
        return f"::: {module}\n"
    links = ", ".join(f"[`{name}`][{module}.{name}]" for name in public)
    filters = f"    options:\n      filters: [{without(public)}]\n"
    return f"::: {module}\n{filters}\nAmong the public names: {links}.\n"


def home(name: str) -> str:
    return str(getattr(memformers, name).__module__)


def fields_of(name: str) -> tuple[str, ...]:
    """The fields of a public dataclass or named tuple."""
    return tuple(getattr(memformers, name).__dict__.get("__match_args__", ()))


def without(names: Any) -> str:
    patterns = ["!^_", *(f"!^{name}$" for name in names)]
    return ", ".join(f'"{pattern}"' for pattern in patterns)


def modules() -> list[str]:
    """All public modules by name, packages before what is in them."""
    names = []
    for path in ROOT.glob("memformers/**/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if "._" not in name:
            names.append(name)
    return sorted(names)


def public_navigation() -> list[Any]:
    """The public names in the site's menu, in the order and the groups of the page that lists them."""
    menu: list[Any] = [INDEX]
    for part in (ROOT / "docs" / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, _ = part.partition("\n")
        names = " ".join(PUBLIC.findall(part)).split()
        menu.append({title: [{name: f"api/{name}.md"} for name in names]})
    return menu


def module_navigation() -> list[Any]:
    """The modules in the site's menu, those of a package together."""
    rooms: dict[str, list[Any]] = {}
    for module in modules():
        room = ".".join(module.split(".")[:2])
        page = f"api/{module}.md"
        rooms.setdefault(room, []).append(page if module == room else {module.removeprefix(f"{room}."): page})
    return [{room: menu if len(menu) > 1 else menu[0]} for room, menu in rooms.items()]


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
                if isinstance(member, griffe.Class):
                    # griffe makes constructors of dataclasses only.
                    if "NamedTuple" in map(str, member.bases):
                        member.set_member("__init__", constructor_of_fields(member))
                    if member.name in memformers.__all__:
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


def tell_fields(cls: griffe.Class) -> None:
    """Add what the fields of a class, also inherited ones, say of themselves to its docstring, as
    arguments."""
    arguments = []
    for name in fields_of(cls.name):
        text = cls.all_members[name].docstring
        if text:
            arguments.append(f"    {name}: {' '.join(text.value.split())}")
    if arguments and cls.docstring:
        # Arguments stand below the first paragraph.
        summary, _, rest = cls.docstring.value.partition("\n\n")
        cls.docstring.value = "\n".join([f"{summary}\n\nArgs:", *arguments, f"\n{rest}"])


def constructor_of_fields(named_tuple: griffe.Class) -> griffe.Function:
    fields = [a for a in named_tuple.members.values() if isinstance(a, griffe.Attribute) and a.annotation]
    kind = griffe.ParameterKind("positional or keyword")
    parameters = [
        griffe.Parameter(a.name, annotation=a.annotation, kind=kind, default=a.value) for a in fields
    ]
    return griffe.Function(
        "__init__", parameters=griffe.Parameters(griffe.Parameter("self", kind=kind), *parameters)
    )
