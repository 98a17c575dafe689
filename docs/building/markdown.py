"""What is written into the pages of docs/, so that they read well in the repository too.

A page says in a comment what it wants; ``python -m docs.building`` writes it below, up to the next one:

<!-- table reach -->                              a table of results (see TABLES)
<!-- run recall_two_layers -->                    the command of an experiment of experiments.csv
<!-- source memformers.models.memory.cut          a function, method or class without its docstring, or
     from "a" to "b"                              its lines from the first with a to the next with b;
     ① "c" -->                                    and the mark ① at the line with c
<!-- end -->

A mark ① to ⑨ is at an equation or a sentence of a page, and at the lines that compute it. A mark may have
several lines, and a line several marks. The text and its lines are in one ``<div class="beside" markdown>``;
each of these counts from ① again.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

from docs.building.results import ROOT, experiments
from docs.building.tables import TABLES

COMMENT = re.compile(r"^<!-- (?:table|run|source|end)\b.*?-->$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^<!-- (table|run|source) (.*?)\s*-->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r'(\S+)(?:\s+from "([^"]+)")?(?:\s+to "([^"]+)")?((?:\s+\S+ "[^"]+")*)', re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
MARKS = "①②③④⑤⑥⑦⑧⑨"
MARK = re.compile(r'(\S+) "([^"]+)"')
PAIR = re.compile(r'^<div class="beside" markdown>\n.*?^</div>\n</div>$', re.MULTILINE | re.DOTALL)


sys.path.append(str(ROOT / "docs/plain"))  # whose files import each other by name


def filled(markdown: str) -> str:
    """The page with everything that it asks for, anew. Raises ValueError for what is not there."""
    unfilled = re.search(r"^<!-- (?:table|run|source) .*", BLOCK.sub("", markdown), re.MULTILINE)
    if unfilled:
        raise ValueError(f"{unfilled[0]!r} has no end; add a line: <!-- end -->")
    for pair in PAIR.findall(markdown):
        check_marks(pair)
    return BLOCK.sub(filled_block, markdown)


def filled_block(block: re.Match[str]) -> str:
    kind, asked = block.groups()
    write = {"table": table, "run": command, "source": source}[kind]
    comment, _, _ = block[0].partition("-->")
    return f"{comment}-->\n\n{write(asked)}\n\n<!-- end -->"


def check_marks(pair: str) -> None:
    """ValueError for a mark in a text without a mark in the code beside it, or the other way round."""
    text = BLOCK.sub("", pair)
    asked = " ".join(asked for _, asked in BLOCK.findall(pair))
    unpaired = {*MARKS} & ({*text} ^ {*asked})
    if unpaired:
        mark = min(unpaired)
        source_name = asked.split(maxsplit=1)[0]
        raise ValueError(f'{mark} needs both a text and a line, {mark} "its code", beside {source_name!r}.')


def table(asked: str) -> str:
    name, *arguments = asked.split(" ", 1) if asked.startswith("recipes") else asked.split()
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name](*arguments)


def command(name: str) -> str:
    if name not in experiments():
        raise ValueError(f"experiments.csv has no {name!r}; there are {', '.join(experiments())}.")
    return f"```sh\n{experiments()[name]['command']}\n```"


def source(asked: str) -> str:
    """Lines of the source, with their marks as comments, in a code block that says where they are from."""
    parts = SOURCE.fullmatch(asked)
    if parts is None:
        raise ValueError(f'{asked!r} is not understood; write: source NAME from "text" to "text" ① "text"')
    # The lines
    name, first, last, asked_marks = parts.groups()
    path, lines = excerpt(name, first or "", last or "")
    # A mark is at the one line that has its text.
    marks = [""] * len(lines)
    for mark, text in MARK.findall(asked_marks):
        numbers = [number for number, line in enumerate(lines) if text in line]
        if mark not in MARKS:
            raise ValueError(f'{mark!r} is not understood; write ① "text in the line", with ① to ⑨.')
        if len(numbers) != 1:
            raise ValueError(f"{name} has {text!r} in {len(numbers)} lines; {mark} needs a text of one line.")
        marks[numbers[0]] += mark
    # The code, with marks as comments
    marked = []
    for line, note in zip(lines, marks, strict=True):
        marked.append(f"{line}  # {note}" if note else line)
    code = "\n".join(marked)
    return f'```python title="{path}"\n{code}\n```'


def excerpt(name: str, first: str = "", last: str = "") -> tuple[str, list[str]]:
    """The path of the function, method or class called ``name``, and its lines without its docstring; or
    only those from the first that contains ``first`` to the next that contains ``last``.

    Raises ValueError for a name or a text that is not there, so that a page can't outlive its code.
    """
    try:
        shown = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} is not there any more: {error}") from None
    shown = shown.fget if isinstance(shown, property) else shown
    if not (inspect.isclass(shown) or inspect.isroutine(shown)):
        raise ValueError(f"{name} is no function and no class; name one.")
    # The source, without docstring and decorators
    code = textwrap.dedent(inspect.getsource(shown))
    [node] = ast.parse(code).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = code.splitlines()
    if ast.get_docstring(node) is not None:
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    lines = lines[node.lineno - 1 :]  # without decorators
    # The lines that are asked for
    if first:
        start = index_of(first, lines, name)
        lines = lines[start : start + index_of(last or first, lines[start:], name) + 1]
    path = Path(inspect.getfile(inspect.unwrap(shown))).relative_to(ROOT)
    return path.as_posix(), textwrap.dedent("\n".join(lines)).splitlines()


def index_of(text: str, lines: list[str], name: str) -> int:
    for i, line in enumerate(lines):
        if text in line:
            return i
    raise ValueError(f"{name} has no line with {text!r} any more; change the page that shows it.")


def relinked(markdown: str, file: str, pages: Mapping[str, str]) -> str:
    """The text of a ``file`` of the repository as a page of the site: a link to one of the files in ``pages``
    leads to its page, and one that the site can't lead to becomes the name of what it leads to."""

    def link(match: re.Match[str]) -> str:
        target = (
            (ROOT / file)
            .parent.joinpath(match[2].partition("#")[0])
            .resolve()
            .relative_to(ROOT.resolve())
            .as_posix()
        )
        if target in pages:
            return f"[{match[1]}]({pages[target]})"
        if not target.startswith("docs/"):
            return f"`{target}`"
        return match[0] if file.startswith("docs/") else match[0].replace("](docs/", "](")

    return LINK.sub(link, markdown)
