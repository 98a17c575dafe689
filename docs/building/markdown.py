"""What is written into the pages of docs/, so that they read well in the repository too.

A page says in a comment what it wants; ``python -m docs.building`` writes it below, up to the next one:

<!-- table reach -->                              a table of results (see TABLES)
<!-- run recall_two_layers -->                    the command of an experiment of experiments.csv
<!-- source memformers.models.memory_update.cut   a function, method or class without its docstring, or
     from "a" to "b"                              its lines from the first with a to the next with b;
     ① "c" -->                                    and the mark ① at the line with c (see marks.py)
<!-- end -->
"""

import re
from collections.abc import Callable, Mapping

from docs.building.marks import checked, marked
from docs.building.other_tables import (
    agents,
    commands,
    compression,
    data,
    gates,
    large_text,
    memories,
    of_file,
)
from docs.building.recall_tables import both_losses, reach, slot_settings, slots
from docs.building.results import experiments
from docs.building.source import ROOT, excerpt
from docs.building.text_tables import (
    far_memory,
    growth,
    long_text,
    longer_training,
    recipes,
    text_distances,
    text_variants,
    tiny_shakespeare,
)

COMMENT = re.compile(r"^<!-- (?:table|run|source|end)\b.*?-->$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^<!-- (table|run|source) (.*?)\s*-->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r'(\S+)(?:\s+from "([^"]+)")?(?:\s+to "([^"]+)")?((?:\s+\S+ "[^"]+")*)', re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
TABLES: dict[str, Callable[..., str]] = {
    "reach": reach, "slots": slots, "slot_settings": slot_settings, "both_losses": both_losses,
    "long_text": long_text, "text_distances": text_distances, "text_variants": text_variants,
    "far_memory": far_memory,
    "longer_training": longer_training, "tiny_shakespeare": tiny_shakespeare, "growth": growth,
    "recipes": recipes, "compression": compression, "gates": gates, "agents": agents, "memories": memories,
    "large_text": large_text, "data": data, "commands": commands, "file": of_file,
}  # fmt: skip


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
    """The table of that name, and of what stands after it."""
    name, *arguments = asked.split(" ", 1) if asked.startswith("recipes") else asked.split()
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name](*arguments)


def command(name: str) -> str:
    """How an experiment is run."""
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
