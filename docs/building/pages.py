"""What becomes of the HTML of the site's pages: formulas are drawn, marks are links, figures follow the
colours of a page, notebooks are completed, and numbers and short code stay in their line."""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from latex2mathml.converter import convert

from docs.building.markdown import MARKS
from docs.building.results import ROOT

MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)

TEX = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\((?P<inline>.*?)\\\)|\[(?P<block>.*?)\\\])</(?P=tag)>',
    re.DOTALL,
)
"""What pymdownx.arithmatex makes of ``$…$`` and ``$$…$$``, in its generic mode."""
MARK_HERE = re.compile(f"[{MARKS}]")
FORMULA = re.compile("<math .*?</math>", re.DOTALL)
CODE = re.compile(r"(?P<head><code>(?:<span></span>)?)(?P<lines>.*?)\n?(?P<end></code></pre>)", re.DOTALL)
MARKED_LINE = re.compile(rf'\s*(?P<own><span class="c1">)?# (?P<marks>[{MARKS}]+)</span>$')
"""A line of Python in HTML whose comment ends with marks, or is only these: then the comment is theirs."""
UNBROKEN = re.compile(r"(?<=\d) (?=[%±] ?\d?|(?:[KM]iB|[Ms])\b)|(?<=%) (?=±)|(?<=±) (?=\d)")
"""Spaces within a number with its unit and its interval, such as 65.7 % ± 0.6."""
INLINE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]+)</code>")
SHORT = 30
"""The most characters of code that stays in a line. A browser breaks --option after its dashes."""
FIGURE = re.compile(r'<img alt="([^"]*)" src="[./]*(?:results/)?figures/(\w+)\.svg"\s*/?>')
WIDE_FIGURE = 400
"""The points from which a figure scrolls on a telephone, so that it stays readable."""
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
DRAWING = re.compile(r'<img [^>]*src="([^"]*drawings/[^"]+)"[^>]*>')
UNDESCRIBED = 'alt="No description has been provided for this image"'


def finished(page: str, uri: str) -> str:
    """The HTML of a page, where a click on a drawing shows it larger. Raises ValueError for TeX that is not
    understood."""
    page = INLINE.sub(unbroken, UNBROKEN.sub("\u00a0", with_marks(TEX.sub(mathml, page))))
    if uri.startswith("results/"):
        page = TABLE.sub(narrow, page)
    return DRAWING.sub(r'<a href="\1">\g<0></a>', page)


def mathml(tex: re.Match[str]) -> str:
    """MathML, which browsers draw by themselves: no script, no font and no network."""
    inline = tex["inline"] is not None
    formula = html.unescape(tex["inline"] if inline else tex["block"]).strip()
    try:
        drawn = convert(formula, display="inline" if inline else "block")
    except Exception as error:  # its errors share no base class but Exception
        raise ValueError(f"the formula {formula!r} can't be drawn: {type(error).__name__} {error}") from error
    if "\\" in drawn:
        raise ValueError(f"the formula {formula!r} has a command that can't be drawn: {drawn}")
    return drawn if inline else f'<div class="formula">{drawn}</div>'


def with_marks(page: str) -> str:
    """The page where a mark in a text leads to its first line, and a mark at a line to its text."""
    first, *blocks = re.split(r'(?=<div class="beside">)', page)
    return first + "".join(map(linked, blocks, range(1, len(blocks) + 1)))


def linked(block: str, number: int) -> str:
    """The ``number``-th of a page's texts with the code beside it, with links between them."""
    ids = set[str]()

    def link(mark: str, side: str, opposite: str) -> str:
        n = MARKS.index(mark) + 1
        name = f"{side}-{number}-{n}"
        attribute = "" if name in ids else f' id="{name}"'  # of several lines, the first is linked to
        ids.add(name)
        return f'<a class="mark mark-{n}"{attribute} href="#{opposite}-{number}-{n}">{mark}</a>'

    def line_with_links(line: str) -> str:
        comment = MARKED_LINE.search(line)
        if comment is None:
            return f"{line}\n"
        links = ""
        classes = ""
        for mark in comment["marks"]:
            links += link(mark, "lines", "text")
            classes += f" mark-{MARKS.index(mark) + 1}"
        rest = line[: comment.start()] + ("" if comment["own"] else "</span>")
        return f'<span class="marked{classes}"><span class="marks">{links}</span>{rest}\n</span>'

    def code_with_links(code: re.Match[str]) -> str:
        return code["head"] + "".join(map(line_with_links, code["lines"].split("\n"))) + code["end"]

    # The text comes first; the marks of its formulas lie inside of MathML.
    text, *codes = re.split(r'(?=<div class="highlight">)', block)
    text = FORMULA.sub(lambda math: with_terms(math[0]) if MARK_HERE.search(math[0]) else math[0], text)
    text = MARK_HERE.sub(lambda mark: link(mark[0], "text", "lines"), text)
    return text + "".join(CODE.sub(code_with_links, code) for code in codes)


def with_terms(formula: str) -> str:
    """MathML in which each term that has a mark below or above it gets the mark's class. The mark becomes a
    text, since MathML can contain links only there."""
    math = ElementTree.fromstring(formula)
    pairs = [*math.iter(f"{{{MATHML}}}munder"), *math.iter(f"{{{MATHML}}}mover")]
    for term, label in pairs:
        mark = "".join(label.itertext())
        if MARK_HERE.fullmatch(mark):
            term.set("class", f"term mark-{MARKS.index(mark) + 1}")
            label.clear()
            label.tag = f"{{{MATHML}}}mtext"
            label.text = mark
    return ElementTree.tostring(math, encoding="unicode")


def unbroken(code: re.Match[str]) -> str:
    """Code in a sentence: short code stays in its line, and in longer code each option does."""
    if len(code[1]) <= SHORT:
        return f'<code class="short">{code[1]}</code>'
    options = re.sub(r"(?<!\S)--[\w-]+", r'<span class="short">\g<0></span>', code[1])
    return f"<code>{options}</code>"


def narrow(table: re.Match[str]) -> str:
    """A table of results that breaks no name, and whose numbers a search doesn't show."""
    unbroken_names = table[0].replace("Transformer-XL", "Transformer\u2011XL")
    return unbroken_names.replace("<table", "<table data-search-exclude", 1)


def with_figures(page: str) -> str:
    """The page with its figures in it, where they follow its colours."""
    return FIGURE.sub(figure, page)


def figure(image: re.Match[str]) -> str:
    """A figure in the page, where its colours follow the reader's choice: see the rules of the site."""
    title, name = image.groups()
    svg = (ROOT / f"docs/results/figures/{name}.svg").read_text(encoding="utf-8")
    width = float(svg.partition('width="')[2].partition("pt")[0])
    classes = "figure wide" if width > WIDE_FIGURE else "figure"
    return f'<div class="{classes}" role="img" aria-label="{title}">{svg}</div>'


def of_notebook(page: str, path: Path) -> str:
    """What mkdocs-jupyter leaves to do: links to other notebooks lead to their pages, figures are described
    by the comments that begin their cells, and the notebook at ``path`` can be downloaded. Raises ValueError
    for a figure whose cell doesn't begin with a comment."""
    # A page of a notebook is named like it.
    page = re.sub(r'(href="\w+)\.ipynb(?=")', r"\1.html", page)
    for cell in nbformat.read(path, as_version=4).cells:
        first = cell.source.partition("\n")[0]
        for output in cell.get("outputs", []):
            if "image/png" not in output.get("data", {}):
                continue
            if not first.startswith("# "):
                raise ValueError(f"the cell of a figure must begin with a comment, not with {first!r}.")
            page = page.replace(UNDESCRIBED, f'alt="{html.escape(first.removeprefix("# "))}"', 1)
    return f'<p><a href="{path.name}" download>Download this notebook</a></p>\n{page}'
