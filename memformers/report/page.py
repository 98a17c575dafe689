"""A report as one web page that holds everything: figures that follow the reader's light or dark, sections
that are folded, and no script."""

import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from memformers.common.files import write_text
from memformers.report.markdown import PARSER
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
    title, end, rest = html_of(markdown, folder).partition("</h1>")
    heads = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', rest)
    links = "".join(f'<li><a href="#{name}">{_without_tags(head)}</a></li>' for name, head in heads)
    page = TEMPLATE.substitute(
        title=_without_tags(title), style=STYLE, contents=f"<nav><ul>{links}</ul></nav>" if links else "",
        body=f"{title}{end}{bars}{rest}",
    )  # fmt: skip
    write_text(folder / PAGE, page)
    return folder / PAGE


def html_of(markdown: str, folder: Path | None = None) -> str:
    """Markdown as HTML, in which what is below a heading of level 3 is folded, and an image with the
    paragraph after it is a figure of the report in ``folder``; raw HTML in it stays text."""

    def section(found: re.Match[str]) -> str:
        name = re.sub(r"\W+", "-", _without_tags(found[1]).lower()).strip("-")
        return f'<h2 id="{name}">{found[1]}</h2>'

    def figure(found: re.Match[str]) -> str:
        assert folder is not None
        path = (folder / found[1]).resolve()
        assert path.parent == (folder / FIGURES).resolve(), path  # names are escaped: see plain
        svg = path.read_text(encoding="utf-8")
        width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
        kind = ' class="wide"' if width and float(width[1]) > WIDE else ""
        return f"<figure{kind}>{inline_svg(svg, found[2])}\n<figcaption>{found[3]}</figcaption>\n</figure>"

    page = re.sub(r"<h2>(.*?)</h2>", section, str(PARSER.render(markdown)))
    folded = r"<details><summary>\1</summary>\2</details>\n"
    page = re.sub(r"<h3>(.*?)</h3>(.*?)(?=<h[23]|\Z)", folded, page, flags=re.DOTALL)
    image = r'<p><img src="([^"]*)" alt="([^"]*)" /></p>\s*<p>(.*?)</p>'
    return re.sub(image, figure, page, flags=re.DOTALL)


def inline_svg(svg: str, title: str) -> str:
    """The figure as a part of a page, whose style sets its colours by variables, with a ``title``, which is
    HTML, for those who can't see it."""
    svg = svg[svg.index("<svg") :] if "<svg" in svg else "<svg></svg>"
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c\1, #\1)", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _without_tags(text: str) -> str:
    return re.sub("<.*?>", "", text)
