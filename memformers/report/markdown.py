"""Pieces of a report in Markdown, its data as CSV, and the self-contained web page made of it."""

import base64
import csv
import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from memformers.common.files import write_text
from memformers.common.intervals import Mean
from memformers.runs.folder import FIGURES, PAGE, REPORT

DASH = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that shows the cells as they are."""
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
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


def plain(text: str) -> str:
    """Markdown that shows ``text`` unchanged, so that names and settings don't become markup."""
    marks = r"([\\`*\[\]<>|]|\b_+|_+\b|&(?=#?\w+;))"
    return re.sub(marks, lambda found: "".join(f"\\{c}" for c in found[0]), " ".join(text.splitlines()))


def fenced(text: str) -> str:
    """A code block that no text inside can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def csv_text(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as CSV; None and NaN are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(
            "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell for cell in row
        )
    return text.getvalue()


def write_page(parts: Sequence[str], folder: Path) -> Path:
    """Write the report of ``folder`` into it, as Markdown and as one page; returns the page."""
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    write_text(folder / PAGE, render_html(markdown, folder))
    return folder / PAGE


TEMPLATE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
"""The whole page, around its title and its body."""


def with_figures(tokens: list[Token]) -> list[Token]:
    """``tokens`` in which a paragraph that is an image and the one after it, its caption, are a figure."""
    found, caption_ends = [], 0
    for i, token in enumerate(tokens):
        inside = tokens[i + 1].children if token.type == "paragraph_open" else None
        if inside and [child.type for child in inside] == ["image"]:
            picture_end, caption, caption_end = tokens[i + 2], tokens[i + 3], tokens[i + 5]
            token.tag = "figure"
            picture_end.hidden = True
            caption.tag = caption_end.tag = "figcaption"
            caption_ends = i + 5
        found.append(token)
        if i and i == caption_ends:
            found.append(Token("figure_close", "figure", -1, block=True))
    return found


def unbroken(text: str) -> str:
    """``text`` in which no line ends between a number and its interval or its unit."""
    text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return re.sub(r"(?<=\d) (?=(?:s|MiB)\b|%)", "\N{NO-BREAK SPACE}", text)


def render_html(markdown: str, folder: Path) -> str:
    """The report as one page with its figures inside; raw HTML in it stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = with_figures(parser.parse(markdown))
    for token in tokens:
        for child in token.children or []:
            if child.type == "text":
                child.content = unbroken(child.content)
            if child.type == "image":
                png = (folder / str(child.attrs["src"])).resolve()
                assert png.parent == (folder / FIGURES).resolve(), png  # names are escaped: see plain
                data = base64.b64encode(png.with_suffix(".svg").read_bytes()).decode()
                child.attrs["src"] = f"data:image/svg+xml;base64,{data}"
    body = parser.renderer.render(tokens, parser.options, {})
    headline = "".join(child.content for child in tokens[1].children or [])  # the text, without its escapes
    return TEMPLATE.substitute(title=html.escape(headline), body=body)
