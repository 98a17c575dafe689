"""Turns the data of a report into Markdown, into one page that holds everything, and into lines of a
terminal.

Each format has its environment of Jinja, which escapes every value that a template shows: names, settings and
samples stay text. ``Markup`` marks what a template has already made in its own format.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from memformers.common.console import printable
from memformers.common.files import write_text
from memformers.report.data import (
    Block,
    Bullets,
    Cell,
    Code,
    Notice,
    Paragraphs,
    Prose,
    ReportData,
    Table,
    Text,
)
from memformers.report.numbers import number, unbroken
from memformers.runs.folder import FIGURES, PAGE, REPORT, REPORTED, check_report

DARK = {"#0072b2": "#3fa9e8", "#d55e00": "#f58a3c", "#009e73": "#2ccb9e", "#cc79a7": "#e29bc6",
        "#56b4e9": "#8cd0f5", "#e69f00": "#f0bc45", "#000000": "#e3e3e3", "#ffffff": "#17191c",
        "#888888": "#999999", "#bbbbbb": "#555555", "#b0b0b0": "#666666", "#666666": "#aaaaaa"}  # fmt: skip
"""The colours of a dark page, by those of a light one."""
TERMINAL = 80
"""The columns of a terminal."""
MIN_NAME = 12
"""The narrowest first column of a table in a terminal."""
TEMPLATES = Path(__file__).parent / "templates"


# Values in each format


def markdown_value(value: Any) -> Markup:
    """Markdown that shows ``value`` unchanged, so that names and settings don't become markup."""
    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).splitlines())
    marks = r"([\\`*\[\]<>|]|\b_+|_+\b|&(?=#?\w+;))"
    return Markup(re.sub(marks, lambda match: "".join(f"\\{sign}" for sign in match[0]), text))


def html_value(value: Any) -> Any:
    """Jinja escapes it afterwards, unless it is ``Markup``."""
    return unbroken(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def fenced(text: str) -> Markup:
    """A code block that no text inside can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{text.rstrip()}\n{fence}")


def one_line(text: str) -> str:
    """The words of ``text`` with single spaces between them, in the format that it has."""
    words = text.replace("\n", " ").split(" ")
    return type(text)(" ").join(filter(None, words))


def environment(show: Callable[[Any], Any] | None = None) -> Environment:
    """A format whose templates ``show`` values in this way, and escape them; without it, as they are. A value
    that is [`Prose`][memformers.report.data.Prose] is shown as its paragraph."""

    @pass_context  # also constants of templates come through here, which Jinja would escape for HTML
    def finalize(_: Context, value: Any) -> Any:
        if isinstance(value, Prose):
            macros = made.get_template("prose.j2").module
            return one_line(getattr(macros, value.name)(**value.values))
        return show(value) if show else value

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=show is not None,
        finalize=finalize,
    )
    made.filters["number"] = number
    return made


PLAIN = environment()
PLAIN.filters |= {"strong": str, "quiet": str, "code": str}
PLAIN_TEXT = PLAIN.from_string("{{ text }}")

MARKDOWN = environment(markdown_value)
MARKDOWN.filters |= {
    "strong": lambda text: Markup(f"**{markdown_value(text)}**"),
    "quiet": lambda text: Markup(f"*{markdown_value(text)}*"),
    "code": lambda text: Markup(f"`{text}`"),
    "fenced": fenced,
}

HTML = environment(html_value)
HTML.filters |= {
    "strong": lambda text: Markup("<strong>%s</strong>") % html_value(text),
    "quiet": lambda text: Markup("<em>%s</em>") % html_value(text),
    "code": lambda text: Markup("<code>%s</code>") % text,
}


def svg_of(file: str, folder: Path) -> Markup:
    """The drawing with this name in the report's ``folder``, without the head that only a file needs."""
    svg = (folder / FIGURES / Path(file).name).read_text(encoding="utf-8")
    return Markup(svg[svg.index("<svg") :] if "<svg" in svg else "<svg></svg>")


def dark_rules(scope: str = "", names: Sequence[str] = ("fill", "stroke")) -> str:
    """CSS that gives the colours of properties with these ``names`` their dark values, inside of ``scope`` if
    there is one. matplotlib writes colours into the elements of a figure."""
    rules = []
    for light, dark in DARK.items():
        for name in names:
            rules.append(f'{scope}[style*="{name}: {light}"] {{ {name}: {dark} !important; }}')
    return "\n".join(rules)


def style() -> str:
    """The style of reports and of the live page."""
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    # Without a scope, since a marker that a figure uses has no ancestors.
    rules = f"{dark_rules()}\n{dark_rules('.chart ', ['--color'])}"
    return f"{css}@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}\n"


STYLE = style()


# Formats


def markdown_of(report: ReportData) -> str:
    return MARKDOWN.get_template("report.md.j2").render(report=report).rstrip() + "\n"


def markdown_table(
    head: Sequence[str | Cell], rows: Sequence[Sequence[str | Cell]], *, numbers: bool = False
) -> Markup:
    """A table for a page that isn't a report."""
    blocks: Any = MARKDOWN.get_template("blocks.md.j2").module
    return Markup(blocks.table(Table(head, rows, numbers)).rstrip())


def page_of(report: ReportData, folder: Path = Path()) -> str:
    """The page of a report whose figures are in ``folder``."""

    def svg(file: str) -> Markup:
        return svg_of(file, folder)

    return HTML.get_template("report.html.j2").render(report=report, style=Markup(STYLE), svg=svg)


def html_of(blocks: Sequence[Block]) -> str:
    """A part of a page."""
    macros: Any = HTML.get_template("blocks.html.j2").module
    return str(macros.show_all(blocks))


def text_of(text: Text) -> str:
    """A paragraph in a terminal, without any markup."""
    return printable(one_line(PLAIN_TEXT.render(text=text)))


def in_terminal(blocks: Sequence[Block], width: int = TERMINAL) -> str:
    """Tables and paragraphs in lines of at most ``width`` characters."""

    def wrapped(text: Text, bullet: str = "") -> str:
        indent = " " * len(bullet)
        return fill(bullet + text_of(text), width, subsequent_indent=indent, break_on_hyphens=False)

    shown = []
    for block in blocks:
        match block:
            case Table():
                shown.append(text_table([block.head, *block.rows], width))
            case Bullets():
                shown.append("\n".join(wrapped(item, "- ") for item in block.items))
            case Code():
                shown.append(printable(block.text))
            case Paragraphs():
                shown.append(wrapped(" ".join(map(text_of, block.texts))))
            case Notice(text=text) | (str() | Prose() as text):
                shown.append(wrapped(text))
            case _:
                raise TypeError(f"a terminal doesn't show a {type(block).__name__}")
    return "\n\n".join(shown)


def terminal_cell(cell: str | Cell) -> str:
    """Its text. A word joiner has no width in a terminal, but ``len`` counts it."""
    text = cell.text if isinstance(cell, Cell) else cell
    return unbroken(printable(text)).replace("\N{WORD JOINER}", "")


def text_table(rows: Sequence[Sequence[str | Cell]], width: int) -> str:
    """A table in a terminal, its head first. The first column is made narrower where the table is wider than
    ``width``."""
    texts = []
    for row in rows:
        texts.append(list(map(terminal_cell, row)))

    # A head may break between its words, other cells only in the first column.
    widths = []
    for head, *cells in zip(*texts, strict=True):
        min_width = max(map(len, head.split(" ")), default=0)
        widths.append(max(min_width, *map(len, cells), 0))
    # The first column gets what the others leave.
    longest_word = max(map(len, texts[0][0].split(" ")))
    rest = sum(widths[1:]) + 2 * len(widths[1:])
    widths[0] = max(longest_word, MIN_NAME, min(widths[0], width - rest))

    lines = []
    for number_of_row, row in enumerate(texts):
        is_head = number_of_row == 0
        columns = []
        for cell, w in zip(row, widths, strict=True):
            columns.append(wrap(cell, w, break_on_hyphens=False) or [""])
        # Lines of a row: heads stand on the line below, other cells begin in the first line
        height = max(map(len, columns))
        for column in columns:
            padding = [""] * (height - len(column))
            column[:] = padding + column if is_head else column + padding
        for name, *cells in zip(*columns, strict=True):
            numbers = map(str.rjust, cells, widths[1:])
            lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
        if is_head:
            lines.append("  ".join(["-" * w for w in widths]))
    return "\n".join(lines).replace("\xa0", " ")


# Files


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


def write_files(report: ReportData, folder: Path) -> Report:
    """Write a report as Markdown and as one page, after [`claim_report`][]."""
    write_text(folder / REPORT, markdown_of(report))
    write_text(folder / PAGE, page_of(report, folder))
    return Report(folder / PAGE, in_terminal([report.title, *report.answer]))
