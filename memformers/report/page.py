"""A report as one web page that holds everything: figures that follow the reader's light or dark, sections
that are folded, and no script."""

import html
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

from markdown_it.token import Token

from memformers.common.files import write_text
from memformers.report.markdown import PARSER, text_of
from memformers.report.plotting import DARK
from memformers.runs.folder import FIGURES, PAGE, REPORT

WIDE = 500.0
"""The width of a figure, in points, from which it takes the whole width of the page."""
TEMPLATE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
"""The whole page, around its title and its body."""
STYLE = Template((Path(__file__).parent / "page.css").read_text(encoding="utf-8")).substitute(
    dark=" ".join(f"--c{light[1:]}: {dark};" for light, dark in DARK.items())
)
"""The style of a report and of the live page."""


def write_page(parts: Sequence[str], folder: Path, bars: str = "") -> Path:
    """Write the report of ``folder`` into it, as Markdown and as one page; returns the page. The first of its
    ``parts`` is the title; ``bars`` is HTML that the page has below it."""
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    tokens = PARSER.parse(markdown)
    body = html_of(tokens, folder)
    title, end, rest = body.partition("</h1>")
    page = TEMPLATE.substitute(
        title=html.escape(text_of(tokens[1])), style=STYLE, contents=contents_of(tokens),
        body=f"{title}{end}{bars}{rest}",
    )  # fmt: skip
    write_text(folder / PAGE, page)
    return folder / PAGE


def html_of(tokens: list[Token], folder: Path | None = None) -> str:
    """Markdown as HTML, with the figures of the report in ``folder`` inside; raw HTML in it stays text."""
    tokens = _folded(_with_figures(tokens))
    for before, token in pairwise(tokens):
        if before.type == "heading_open" and before.tag == "h2":
            before.attrSet("id", _name(token))
        for i, child in enumerate(token.children or []):
            if child.type == "text":
                child.content = unbroken(child.content)
            if child.type == "image":
                assert folder is not None
                picture = (folder / str(child.attrs["src"])).resolve().with_suffix(".svg")
                assert picture.parent == (folder / FIGURES).resolve(), picture  # names are escaped: see plain
                svg = picture.read_text(encoding="utf-8")
                width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
                if width and float(width[1]) > WIDE:
                    before.attrSet("class", "wide")
                assert token.children is not None
                token.children[i] = Token("html_inline", "", 0, content=inline_svg(svg, child.content))
    return str(PARSER.renderer.render(tokens, PARSER.options, {}))


def inline_svg(svg: str, title: str) -> str:
    """The figure as a part of a page, whose style sets its colours by variables, with a ``title`` for those
    who can't see it."""
    svg = svg[svg.index("<svg") :] if "<svg" in svg else "<svg></svg>"
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c\1, #\1)", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _with_figures(tokens: list[Token]) -> list[Token]:
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


def _folded(tokens: list[Token]) -> list[Token]:
    """``tokens`` in which each part below a heading of level 3 is folded until a reader opens it."""
    found, is_open = [], False
    for token in tokens:
        if token.type == "heading_open" and token.tag in ("h2", "h3") and is_open:
            found.append(Token("details_close", "details", -1, block=True))
            is_open = False
        if token.tag == "h3":
            token.tag = "summary"
            if token.nesting == 1:
                found.append(Token("details_open", "details", 1, block=True))
                is_open = True
        found.append(token)
    return found + [Token("details_close", "details", -1, block=True)] * is_open


def unbroken(text: str) -> str:
    """``text`` in which no line ends between a number and its interval or its unit."""
    text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return re.sub(r"(?<=\d) (?=(?:s|MiB)\b|%)", "\N{NO-BREAK SPACE}", text)


def contents_of(tokens: Sequence[Token]) -> str:
    """Links to the sections of a page."""
    heads = [b for a, b in pairwise(tokens) if a.type == "heading_open" and a.tag == "h2"]
    links = [f'<li><a href="#{_name(head)}">{html.escape(text_of(head))}</a></li>' for head in heads]
    return f"<nav><ul>{''.join(links)}</ul></nav>" if links else ""


def _name(heading: Token) -> str:
    return re.sub(r"\W+", "-", text_of(heading).lower()).strip("-")
