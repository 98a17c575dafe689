"""What is written into the pages of docs/, so that they read well in the repository too.

A page says in a comment what it wants; ``python -m docs.building`` writes it below, up to the next one:

<!-- table reach -->                              a table of results (see TABLES)
<!-- run recall_two_layers -->                    the command of an experiment of experiments.csv
<!-- source memformers.models.memory.cut          a function, method or class without its docstring, or
     from "a" to "b"                              its lines from the first with a to the next with b;
     ① "c" -->                                    and the mark ① at the line with c (see marks.py)
<!-- end -->
"""

import re
from collections.abc import Mapping

from docs.building.marks import checked, marked
from docs.building.results import experiments
from docs.building.source import ROOT, excerpt
from docs.building.tables import TABLES

COMMENT = re.compile(r"^<!-- (?:table|run|source|end)\b.*?-->$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^<!-- (table|run|source) (.*?)\s*-->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r'(\S+)(?:\s+from "([^"]+)")?(?:\s+to "([^"]+)")?((?:\s+\S+ "[^"]+")*)', re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def filled(markdown: str) -> str:
    """The page with everything that it asks for, anew. Raises ValueError for what is not there."""

    def block(found: re.Match[str]) -> str:
        kind, asked = found.groups()
        write = {"table": table, "run": command, "source": shown}[kind]
        return f"{found[0].partition('-->')[0]}-->\n\n{write(asked)}\n\n<!-- end -->"

    unfilled = re.search(r"^<!-- (?:table|run|source) .*", BLOCK.sub("", markdown), re.MULTILINE)
    if unfilled:
        raise ValueError(f"{unfilled[0]!r} has no end; add a line: <!-- end -->")
    return BLOCK.sub(block, checked(markdown, BLOCK))


def table(asked: str) -> str:
    name, *arguments = asked.split(" ", 1) if asked.startswith("recipes") else asked.split()
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    made: str = TABLES[name](*arguments)
    return made


def command(name: str) -> str:
    if name not in experiments():
        raise ValueError(f"experiments.csv has no {name!r}; there are {', '.join(experiments())}.")
    return f"```sh\n{experiments()[name]['command']}\n```"


def shown(asked: str) -> str:
    """Lines of the source, with their marks, as a code block that says where they are from."""
    found = SOURCE.fullmatch(asked)
    if found is None:
        raise ValueError(f'{asked!r} is not understood; write: source NAME from "text" to "text" ① "text"')
    name, first, last, marks = found.groups()
    lines = excerpt(name, first or "", last or "")
    return f'```python title="{lines.path}"\n{marked(lines.code, marks.strip(), name)}\n```'


def named(markdown: str, page: str) -> str:
    """The page, whose path in docs/ is ``page``, with the names of files instead of links to those that are
    not part of the site: they lie in the repository, which the site can't lead to."""
    here, root = (ROOT / "docs" / page).parent, ROOT.resolve()

    def link(found: re.Match[str]) -> str:
        path = (here / found[2].partition("#")[0]).resolve()
        if not path.is_relative_to(root) or path.is_relative_to(root / "docs"):
            return found[0]
        return f"`{path.relative_to(root).as_posix()}`"

    return LINK.sub(link, markdown)


def relinked(markdown: str, pages: Mapping[str, str]) -> str:
    """A file of the repository as a page of the site: of its links to other files, those in ``pages`` lead
    to their page, and the rest become plain text."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        return f"[{text}]({pages[target]})" if target in pages else text

    return LINK.sub(link, markdown)
