"""Pieces of a report in Markdown, its data as CSV, and the self-contained web page made of it."""

import base64
import csv
import html
import io
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template
from textwrap import fill, wrap
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from memformers.common.files import write_text
from memformers.common.intervals import Mean
from memformers.runs.folder import FIGURES, PAGE, REPORT, TEX

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


PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
MOST_CLAIMS = 4
"""The number of claims that a terminal shows beside their table."""


def answer_of(markdown: str, width: int = 80) -> str:
    """What a report comes to, in lines of at most ``width`` characters: its headline, its first table, and
    the warnings and claims that it has above its first figure; of more than a few claims, only the table."""
    headline = ""
    bold: list[str] = []
    warnings: list[str] = []
    claims: list[str] = []
    tokens = PARSER.parse(markdown.partition("\n\n![")[0])
    for before, token in pairwise(tokens):
        if token.type != "inline":
            continue
        if before.tag == "h1":
            headline = text_of(token)
        elif before.type == "paragraph_open" and token.level > 1:
            (claims if before.hidden else warnings).append(text_of(token))
        elif before.type == "paragraph_open" and (found := re.match(r"\*\*(.+?)\*\*", token.content)):
            bold.append(found[1])
    parts = [headline, text_table(rows, width)] if (rows := first_table(tokens)) else [headline]
    parts += [fill(text, width) for text in dict.fromkeys((*warnings, *bold))]
    if 0 < len(claims) <= MOST_CLAIMS:
        parts.append("\n".join(fill(f"- {claim}", width, subsequent_indent="  ") for claim in claims))
    return "\n\n".join(parts)


def text_of(token: Token) -> str:
    """What an inline ``token`` says, without its marks."""
    return "".join(child.content for child in token.children or [])


def first_table(tokens: Sequence[Token]) -> list[list[str]]:
    """The cells of the first table, its head first; empty if there is none."""
    rows: list[list[str]] = []
    for before, token in pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif before.type in ("th_open", "td_open"):
            rows[-1].append(text_of(token))
        elif token.type == "table_close":
            break
    return rows


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
        for i in range(height):
            at = i if row is not rows[0] else i - height  # heads stand on the line below them
            parts = [cell[at] if -len(cell) <= at < len(cell) else "" for cell in cells]
            shown = [
                parts[0].ljust(widths[0]),
                *(p.rjust(w) for p, w in zip(parts[1:], widths[1:], strict=True)),
            ]
            lines.append("  ".join(shown).rstrip())
        if row is rows[0]:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)


TEX_MARKS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
             "±": r"$\pm$", "−": "$-$", "≤": r"$\leq$", "≥": r"$\geq$", "×": r"$\times$", "→": r"$\to$",
             "β": r"$\beta$", "₂": "$_2$", "–": "--", "\N{NO-BREAK SPACE}": "~"}  # fmt: skip
"""What LaTeX needs for these characters."""


def tex_table(rows: Sequence[Sequence[str]]) -> str:
    """A table for LaTeX, with the rules of its package booktabs."""

    def cells(row: Sequence[str]) -> str:
        marked = [re.sub(rf"([&%$#_{{}}])|([{re.escape(''.join(TEX_MARKS))}])", in_tex, cell) for cell in row]
        return " & ".join(marked) + r" \\"

    columns = "l" + "r" * (len(rows[0]) - 1)
    begin = rf"\begin{{tabular}}{{{columns}}}"
    lines = [r"% \usepackage{booktabs}", begin, r"\toprule", cells(rows[0]), r"\midrule"]
    lines += [*map(cells, rows[1:]), r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def in_tex(found: re.Match[str]) -> str:
    """A character of a cell for LaTeX."""
    return f"\\{found[1]}" if found[1] else TEX_MARKS[found[2]]


def write_page(parts: Sequence[str], folder: Path) -> Path:
    """Write the report of ``folder`` into it, as Markdown and as one page, and its first table for LaTeX;
    returns the page."""
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    if rows := first_table(PARSER.parse(markdown)):
        write_text(folder / TEX, tex_table(rows))
    write_text(folder / PAGE, render_html(markdown, folder))
    return folder / PAGE


WIDE = 500.0
"""The width of a figure, in points, from which it takes the whole width of the page."""
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


def with_contents(tokens: Sequence[Token]) -> str:
    """Give each section of a page a name that an address can end with; returns the list of their links."""
    links = []
    for before, token in pairwise(tokens):
        if before.type == "heading_open" and before.tag == "h2":
            before.attrSet("id", name := re.sub(r"\W+", "-", text_of(token).lower()).strip("-"))
            links.append(f'<li><a href="#{name}">{html.escape(text_of(token))}</a></li>')
    return f"<nav><ul>{''.join(links)}</ul></nav>" if links else ""


def render_html(markdown: str, folder: Path) -> str:
    """The report as one page with its figures inside; raw HTML in it stays text."""
    tokens = with_figures(PARSER.parse(markdown))
    for before, token in pairwise(tokens):
        for child in token.children or []:
            if child.type == "text":
                child.content = unbroken(child.content)
            if child.type == "image":
                png = (folder / str(child.attrs["src"])).resolve()
                assert png.parent == (folder / FIGURES).resolve(), png  # names are escaped: see plain
                svg = png.with_suffix(".svg").read_bytes()
                child.attrs["src"] = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
                width = re.search(rb'<svg [^>]*?width="([\d.]+)pt"', svg)
                if width and float(width[1]) > WIDE:
                    before.attrSet("class", "wide")
    contents = with_contents(tokens)
    body = PARSER.renderer.render(tokens, PARSER.options, {})
    return TEMPLATE.substitute(title=html.escape(text_of(tokens[1])), contents=contents, body=body)
