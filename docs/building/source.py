"""Lines of the package by the name of what they belong to, for pages that explain them.

pymdownx.snippets finds lines by number or by marker comments in the source; these are found by name, so that
the source needs no markers and a page can't show other lines than it means.
"""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Excerpt:
    """Consecutive lines of a source file."""

    path: str
    """From the repository's root."""
    first_line: int
    last_line: int
    code: str
    """Without the indentation that all lines share."""


def excerpt(name: str, first: str = "", last: str = "") -> Excerpt:
    """The function, method or class called ``name``, such as
    ``memformers.models.memory.truncate_memory``, with its head and without its docstring; or
    only its lines from the first that contains ``first`` to the next that contains ``last``.

    Raises ValueError for a name or a text that is not there, so that a page can't outlive its code.
    """
    path, inside = find_module(name)
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    node = find_definition(ast.parse(source), inside, name)
    numbers = [n for n in range(node.lineno, (node.end_lineno or 0) + 1) if n not in docstring_lines(node)]
    if first:
        start = index_of(first, [lines[n - 1] for n in numbers], name)
        end = start + index_of(last or first, [lines[n - 1] for n in numbers[start:]], name)
        numbers = numbers[start : end + 1]
    code = textwrap.dedent("\n".join(lines[n - 1] for n in numbers))
    return Excerpt(path.relative_to(ROOT).as_posix(), numbers[0], numbers[-1], code)


def find_module(name: str) -> tuple[Path, list[str]]:
    """The file that ``name`` is in, and the names inside that file that lead to it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:end])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path, parts[end:]
    raise ValueError(f"{name} is in no module here; give its full name, memformers.module.name.")


def find_definition(tree: ast.Module, inside: list[str], name: str) -> Definition:
    """The class, function or method that the names ``inside`` lead to; else ValueError."""
    node: ast.Module | Definition = tree
    for part in inside:
        found = [n for n in node.body if isinstance(n, Definition) and n.name == part]
        if not found:
            raise ValueError(f"{name} is not defined: there is no {part!r} where it should be.")
        node = found[0]
    if isinstance(node, ast.Module):
        raise ValueError(f"{name} is a module; name something in it.")
    return node


def docstring_lines(node: Definition) -> range:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return range(0)
    return range(first.lineno, (first.end_lineno or 0) + 1)


def index_of(text: str, lines: list[str], name: str) -> int:
    """The first of ``lines`` that contains ``text``; else ValueError."""
    for i, line in enumerate(lines):
        if text in line:
            return i
    raise ValueError(f"{name} has no line with {text!r} any more; change the page that shows it.")
