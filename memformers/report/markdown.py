"""Pieces of a report: its prose, its tables, and the page that holds everything, with figures that follow the
reader's light or dark, sections that are folded, and no script."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from textwrap import fill, wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

from memformers.common.files import write_text
from memformers.common.intervals import Mean
from memformers.runs.folder import FIGURES, PAGE, REPORT, REPORTED, check_report

DASH = "–"
DARK = {"#0072b2": "#3fa9e8", "#d55e00": "#f58a3c", "#009e73": "#2ccb9e", "#cc79a7": "#e29bc6",
        "#56b4e9": "#8cd0f5", "#e69f00": "#f0bc45", "#000000": "#e3e3e3", "#ffffff": "#17191c",
        "#888888": "#999999", "#bbbbbb": "#555555", "#b0b0b0": "#666666", "#666666": "#aaaaaa"}  # fmt: skip
"""The colours of a dark page, by those of a light one."""
TERMINAL = 80
"""The columns of a terminal."""
FILES = Path(__file__).parent
TEMPLATE = Template((FILES / "page.html").read_text(encoding="utf-8"))
"""The whole page, around its title and its body."""
STYLE = Template((FILES / "page.css").read_text(encoding="utf-8")).substitute(
    dark=" ".join(f"--c{light[1:]}: {dark};" for light, dark in DARK.items())
)
"""Of a report and of the live page."""


class Markup(str):
    """Markdown that only emphasizes words."""

    @property
    def text(self) -> str:
        """Without emphasis, as a terminal shows it."""
        return re.sub(r"\\(.)|\*", r"\1", self)


class Table(str):
    """A table in Markdown, and its cells as plain text, with the head first."""

    rows: list[list[str]]


def plain(text: str) -> str:
    """Markdown that shows ``text`` unchanged, so that names and settings don't become markup."""
    if isinstance(text, Markup):
        return text
    marks = r"([\\`*\[\]<>|]|\b_+|_+\b|&(?=#?\w+;))"
    return re.sub(marks, lambda match: "".join(f"\\{c}" for c in match[0]), " ".join(text.splitlines()))


def number(
    value: Mean | float | None, form: str, unit: str = "", *, scale: float = 1.0, signed: bool = False
) -> str:
    """``value · scale`` in the format ``form``, with its interval if it has one; a dash for None."""
    if value is None:
        return DASH
    mean, half = (value.mean, value.half_width) if isinstance(value, Mean) else (value, math.nan)
    interval = "" if math.isnan(half) else f" ± {scale * half:{form}}"
    shown = f"{scale * mean:{'+' if signed else ''}{form}}"
    if not set(shown) & set("123456789"):  # no negative zero
        shown = shown.replace("-", "+" * signed)
    return f"{shown}{interval}{unit}".replace("-", "−")


def unbroken(text: str) -> str:
    """No line ends within Transformer-XL or C = 64, or between a number and its interval or unit."""
    text = re.sub(r"(?<=[a-z])-(?=[A-Z]{2}\b)", "-\N{WORD JOINER}", text)
    whole = r" ± |(?<=\b\w) = (?=\d)|(?<=\d) (?=(?:s|MiB)\b|%)"
    return re.sub(whole, lambda match: match[0].replace(" ", "\xa0"), text)


TEMPLATES = Environment(
    loader=FileSystemLoader(FILES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.filters |= {"plain": plain, "number": number, "whole": unbroken}
TEMPLATES.filters["lines"] = lambda texts: "\n".join(f"- {text}" for text in texts)


def prose(name: str, **values: Any) -> Markup:
    """The paragraph ``name`` of ``prose.md``, with these ``values``, on one line."""
    paragraph = getattr(TEMPLATES.get_template("prose.md").module, name)(**values)
    return Markup(re.sub(r"[ \n]+", " ", paragraph).strip())


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Table:
    """``numbers``, below all heads but the first, are aligned on their right."""
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---", *["---:" if numbers else "---"] * (len(head) - 1)])
    made = Table("\n".join("| " + " | ".join(line) + " |" for line in lines))
    made.rows = [[cell.text if isinstance(cell, Markup) else cell for cell in line] for line in (head, *rows)]
    return made


def bullets(paragraphs: Sequence[str]) -> Markup:
    return Markup("\n".join(f"- {paragraph}" for paragraph in paragraphs))


def fenced(text: str) -> str:
    """A code block that no text inside can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def in_terminal(parts: Sequence[str], width: int = TERMINAL) -> str:
    """What a terminal shows of tables and paragraphs, in lines of at most ``width`` characters."""

    def line_of(text: str) -> str:
        return fill(text, width, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False)

    def shown(part: str) -> str:
        if isinstance(part, Table):
            return text_table(part.rows, width)
        return "\n".join(map(line_of, (part.text if isinstance(part, Markup) else part).splitlines()))

    return "\n\n".join(map(shown, parts))


def text_table(rows: Sequence[Sequence[str]], width: int) -> str:
    """The first column is made narrower where the table is wider than ``width``."""
    rows = [[unbroken(cell).replace("\N{WORD JOINER}", "") for cell in row] for row in rows]
    least = [max(map(len, head.split(" ")), default=0) for head in rows[0]]
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
    return "\n".join(lines).replace("\xa0", " ")


PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
PARSER.add_render_rule("text", lambda _, tokens, i, *more: escapeHtml(unbroken(tokens[i].content)))


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    page: Path
    answer: str
    """What a terminal shows of it."""

    def __str__(self) -> str:
        return str(self.page)


def claim_report(folder: Path) -> None:
    """Allow the report in ``folder`` to replace the files of an earlier one; UserError for other files."""
    check_report(folder)
    (folder / REPORTED).touch()


def write_page(parts: Sequence[str], folder: Path, bars: str = "", answer: Sequence[str] = ()) -> Report:
    """Write a report as Markdown and as one page, after [`claim_report`][]. The first of its ``parts`` is the
    title; ``bars`` is HTML below it, and ``answer`` what a terminal shows, by default title and tables."""
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    title, end, rest = html_of(markdown, folder).partition("</h1>")
    heads = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', rest)
    links = "".join(f'<li><a href="#{name}">{_without_tags(head)}</a></li>' for name, head in heads)
    contents, body = f"<nav><ul>{links}</ul></nav>" if links else "", f"{title}{end}{bars}{rest}"
    page = TEMPLATE.substitute(title=_without_tags(title), style=STYLE, contents=contents, body=body)
    write_text(folder / PAGE, page)
    tables = [part for part in parts if isinstance(part, Table)]
    return Report(folder / PAGE, in_terminal(answer or [parts[0].removeprefix("# "), *tables[:1]]))


def html_of(markdown: str, folder: Path | None = None) -> str:
    """What is below a heading of level 3 is folded, and an image with the paragraph after it is a figure of
    the report in ``folder``; raw HTML stays text."""

    def section(match: re.Match[str]) -> str:
        name = re.sub(r"\W+", "-", _without_tags(match[1]).lower()).strip("-")
        return f'<h2 id="{name}">{match[1]}</h2>'

    def figure(match: re.Match[str]) -> str:
        assert folder is not None
        path = (folder / match[1]).resolve()
        assert path.parent == (folder / FIGURES).resolve(), path  # names are escaped: see plain
        svg = inline_svg(path.read_text(encoding="utf-8"), match[2])
        return f"<figure>{svg}\n<figcaption>{match[3]}</figcaption>\n</figure>"

    page = re.sub(r"<h2>(.*?)</h2>", section, str(PARSER.render(markdown)))
    folded = r"<details><summary>\1</summary>\2</details>\n"
    page = re.sub(r"<h3>(.*?)</h3>(.*?)(?=<h[23]|\Z)", folded, page, flags=re.DOTALL)
    image = r'<p><img src="([^"]*)" alt="([^"]*)" /></p>\s*<p>(.*?)</p>'
    return re.sub(image, figure, page, flags=re.DOTALL)


def inline_svg(svg: str, title: str) -> str:
    """The figure in the colours of a page; its ``title`` is for those who can't see it."""
    svg = svg[svg.index("<svg") :] if "<svg" in svg else "<svg></svg>"
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c\1, #\1)", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _without_tags(text: str) -> str:
    return re.sub("<.*?>", "", text)
