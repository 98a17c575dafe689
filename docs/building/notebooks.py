"""What mkdocs-jupyter leaves to do on a notebook's page: links, a download, and what figures show."""

import re
from html import escape
from pathlib import Path

import nbformat

LINK = re.compile(r'(href="\w+)\.ipynb(?=")')
UNDESCRIBED = 'alt="No description has been provided for this image"'


def for_the_site(html: str, path: Path) -> str:
    """The page ``html`` of the notebook at ``path``, whose links to other notebooks lead to their pages,
    whose figures are described by the comments that begin their cells, and which offers the notebook itself.

    Raises ValueError for a figure whose cell doesn't begin with a comment.
    """
    html = LINK.sub(r"\1.html", html)
    for description in descriptions(path):
        html = html.replace(UNDESCRIBED, f'alt="{escape(description)}"', 1)
    return f'<p><a href="{path.name}" download>Download this notebook</a></p>\n{html}'


def descriptions(path: Path) -> list[str]:
    """What the figures of a notebook show, in their order."""
    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                first = cell.source.partition("\n")[0]
                if not first.startswith("# "):
                    raise ValueError(f"the cell of a figure must begin with a comment; {first!r} came.")
                found.append(first.removeprefix("# "))
    return found
