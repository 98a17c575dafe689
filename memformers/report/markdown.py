"""Pieces of a report in Markdown, and its data as CSV."""

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from memformers.report.page import plain

Cell = str | float | None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that shows the cells as they are."""
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A value in a table, or a dash."""
    return "–" if value is None else f"{value:{form}}{unit}"


def fenced(text: str) -> str:
    """A code block that no text inside can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def pictured(path: Path, title: str, caption: str, folder: Path) -> str:
    """A figure with its caption below; the ``title`` replaces it where it can't be seen."""
    return f"![{title}]({path.relative_to(folder).as_posix()})\n\n{caption}"


def csv_text(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as CSV; None and NaN are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(
            "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell for cell in row
        )
    return text.getvalue()
