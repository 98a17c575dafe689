"""Pieces of a report in Markdown, its prose, and what a terminal shows of it."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

from memformers.common.intervals import Mean

DASH = "–"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip


class Markup(str):
    """A text that is Markdown already."""


def plain(text: str) -> str:
    """Markdown that shows ``text`` unchanged, so that names and settings don't become markup."""
    if isinstance(text, Markup):
        return text
    marks = r"([\\`*\[\]<>|]|\b_+|_+\b|&(?=#?\w+;))"
    return re.sub(marks, lambda found: "".join(f"\\{c}" for c in found[0]), " ".join(text.splitlines()))


def prose(name: str, **values: Any) -> Markup:
    """The paragraph ``name`` of ``prose.md``, with these ``values``, on one line."""
    text = getattr(TEMPLATES.get_template("prose.md").module, name)(**values)
    return Markup(re.sub(r"[ \n]+", " ", text).strip())


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table that shows the cells as they are; ``numbers``, below all heads but the first, are
    aligned on their right."""
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---", *["---:" if numbers else "---"] * (len(head) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(
    value: Mean | float | None, form: str, unit: str = "", *, scale: float = 1.0, signed: bool = False
) -> str:
    """``value · scale`` in the format ``form``, with its interval if it has one; a dash for None."""
    if value is None:
        return DASH
    mean, half = (value.mean, value.half_width) if isinstance(value, Mean) else (value, math.nan)
    interval = "" if math.isnan(half) else f" ± {scale * half:{form}}"
    return f"{scale * mean:{'+' if signed else ''}{form}}{interval}{unit}".replace("-", "−")


TEMPLATES.filters |= {
    "plain": plain, "number": number, "lines": lambda texts: "\n".join(f"- {text}" for text in texts),
}  # fmt: skip


def fenced(text: str) -> str:
    """A code block that no text inside can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _text(self: Any, tokens: Sequence[Any], i: int, options: Any, env: Any) -> str:
    """The HTML of a text, in which no line ends between a number and its interval or its unit."""
    text = re.sub(r" ± |(?<=\d) (?=(?:s|MiB)\b|%)", lambda t: t[0].replace(" ", "\xa0"), tokens[i].content)
    return escapeHtml(text)


PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
PARSER.add_render_rule("text", _text)
MOST_CLAIMS = 4
"""The number of claims that a terminal shows beside their table."""


def answer_of(markdown: str, width: int = 80) -> str:
    """What a report comes to, in lines of at most ``width`` characters: its headline, its first table, and
    the warnings and claims that it has above its first figure; of more than a few claims, only the table."""
    headline, tables = "", 0
    rows: list[list[str]] = []
    said: list[str] = []
    claims: list[str] = []
    for before, token in pairwise(PARSER.parse(markdown.partition("\n\n![")[0].partition("\n\n##")[0])):
        text = "".join(child.content for child in token.children or [])
        tables += token.type == "table_open"
        if token.type == "tr_open" and tables == 1:
            rows.append([])
        elif before.tag == "h1":
            headline = headline or text
        elif before.type in ("th_open", "td_open") and tables == 1:
            rows[-1].append(text)
        elif before.type == "paragraph_open" and token.level > 1:
            (claims if before.hidden else said).append(text)
        elif before.type == "paragraph_open" and (bold := re.match(r"\*\*(.+?)\*\*", token.content)):
            said.append(bold[1])
    parts = [
        fill(headline, width),
        *([text_table(rows, width)] if rows else []),
        *(fill(text, width) for text in said),
    ]
    if 0 < len(claims) <= MOST_CLAIMS:
        parts.append("\n".join(fill(f"- {claim}", width, subsequent_indent="  ") for claim in claims))
    return "\n\n".join(parts)


def text_table(rows: Sequence[Sequence[str]], width: int) -> str:
    """A table as lines of text, its first column on the left; where it is wider than ``width``, this column
    is made narrower."""
    least = [max(map(len, head.split()), default=0) for head in rows[0]]
    widths = [max(low, *(len(row[i]) for row in rows[1:]), 0) for i, low in enumerate(least)]
    widths[0] = max(least[0], 12, min(widths[0], width - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for row in rows:
        cells = [wrap(cell, w, break_on_hyphens=False) or [""] for cell, w in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        for cell in cells:
            missing = [""] * (height - len(cell))
            cell[:] = missing + cell if row is rows[0] else cell + missing  # heads stand on the line below
        for first, *others in zip(*cells, strict=True):
            right = (part.rjust(w) for part, w in zip(others, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
        if row is rows[0]:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)
