"""What a page may ask for in a line of its own: source lines, and tables of other files.

!source memformers.models.memory_update.cut                 a function, method or class, without its docstring
!source memformers.models.memory_update.cut from "a" to "b"  its lines from the one with a to the one with b
!mark ① "a"                                                 the mark ① at the shown line with a (see marks.py)
!table docs/results/tiny_shakespeare/report.md 2         the second table of a Markdown file
"""

import re
from collections.abc import Mapping

from docs.building.marks import checked, marked
from docs.building.source import ROOT, excerpt

SOURCE = re.compile(r'^!source (\S+)(?: from "([^"]+)")?(?: to "([^"]+)")?((?:\n!mark .*)*)$', re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
TABLE = re.compile(r"^!table (\S+) (\d+)$", re.MULTILINE)


def expanded(markdown: str) -> str:
    """The page with everything that it asks for. Raises ValueError for what is not there."""
    markdown = SOURCE.sub(
        lambda found: shown(found[1], found[2] or "", found[3] or "", found[4]), checked(markdown)
    )
    apart = re.search("^!mark.*", markdown, re.MULTILINE)
    if apart:
        raise ValueError(f"{apart[0]!r} has no code; put it directly below a !source line.")
    return TABLE.sub(lambda found: tables(found[1])[int(found[2]) - 1], markdown)


def shown(name: str, first: str, last: str, marks: str) -> str:
    """Lines of the source, with the lines' ``marks``, as a code block that says where they are from."""
    found = excerpt(name, first, last)
    title = f"{found.path}, lines {found.first_line} to {found.last_line}"
    return f'```python title="{title}"\n{marked(found.code, marks.strip(), name)}\n```'


def tables(path: str) -> list[str]:
    """The tables of a Markdown file, in order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)


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
