"""Marks ① to ⑨ on a page: the same one at an equation, or a sentence, and at the lines that compute it.

The text and the formulas of a page contain a mark where they explain something. The comment that asks for the
source says which of the shown lines computes it, by a part of that line:

<!-- source memformers.models.memory.cut
① "return torch.cat(" -->

A mark may have several lines, and a line several marks. The text and its lines are in one
``<div class="beside" markdown>``; each of these counts from ① again.
"""

import re
from xml.etree import ElementTree

MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)

MARKS = "①②③④⑤⑥⑦⑧⑨"
MARK = re.compile(r'(\S+) "([^"]+)"')
MARK_HERE = re.compile(f"[{MARKS}]")
FORMULA = re.compile("<math .*?</math>", re.DOTALL)
BESIDE = re.compile(r'^<div class="beside" markdown>\n.*?^</div>\n</div>$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?P<head><code>(?:<span></span>)?)(?P<lines>.*?)\n?(?P<end></code></pre>)", re.DOTALL)
MARKED_LINE = re.compile(rf'\s*(?P<own><span class="c1">)?# (?P<marks>[{MARKS}]+)</span>$')
"""A line of Python in HTML whose comment ends with marks, or is only these: then the comment is theirs."""


def checked(markdown: str, asking: re.Pattern[str]) -> str:
    """The page, as it is, whose blocks match ``asking``. Raises ValueError for a mark that has no line, no
    text, or no place."""
    for block in BESIDE.findall(markdown):
        text = asking.sub("", block)
        asked = [found[2] for found in asking.finditer(block) if found[1] == "source"]
        lines = set(MARK_HERE.findall(" ".join(asked)))
        beside = next(iter(asked), "").partition("\n")[0]
        for mark in MARKS:
            if mark in text and mark not in lines:
                raise ValueError(f'{mark} has no line; below {beside!r}, add a line: {mark} "its code"')
            if mark in lines and mark not in text:
                raise ValueError(f"{mark} has no text; put it at what its lines compute, beside {beside!r}.")
    for found in asking.finditer(BESIDE.sub("", markdown)):
        if found[1] == "source" and MARK_HERE.search(found[2]):
            raise ValueError(
                f'{found[2]!r} has no text beside it; put both in a <div class="beside" markdown>.'
            )
    return markdown


def marked(code: str, asking: str, name: str) -> str:
    """The ``code`` of ``name``, with a comment at the end of each line that has marks: those that the lines
    ``asking`` give it. Raises ValueError unless the text that a mark quotes is in exactly one line."""
    lines = code.splitlines()
    marks = [""] * len(lines)
    for mark, text in MARK.findall(asking):
        if mark not in MARKS:
            raise ValueError(f'{mark!r} is not understood; write ① "text in the line", with ① to ⑨.')
        numbers = [n for n, line in enumerate(lines) if text in line]
        if len(numbers) != 1:
            many = f"{len(numbers)} lines" if numbers else "no line"
            raise ValueError(
                f"{name} shows {many} with {text!r}; change {mark} to a text that is in exactly one."
            )
        marks[numbers[0]] += mark
    return "\n".join(f"{line}  # {own}" if own else line for line, own in zip(lines, marks, strict=True))


def with_marks(page: str) -> str:
    """The page's HTML, where a mark in a text leads to its first line, and a mark at a line to its text."""
    before, *blocks = re.split(r'(?=<div class="beside">)', page)
    return before + "".join(linked(block, number) for number, block in enumerate(blocks, 1))


def linked(block: str, number: int) -> str:
    """The ``number``-th of a page's texts with the code beside it, with links between them."""
    named: set[str] = set()

    def link(mark: str, side: str, other: str) -> str:
        n = MARKS.index(mark) + 1
        name = f"{side}-{number}-{n}"
        attribute = "" if name in named else f' id="{name}"'
        named.add(name)
        return f'<a class="mark mark-{n}"{attribute} href="#{other}-{number}-{n}">{mark}</a>'

    def with_links(line: str) -> str:
        found = MARKED_LINE.search(line)
        if found is None:
            return f"{line}\n"
        links = "".join(link(mark, "lines", "text") for mark in found["marks"])
        names = " ".join(f"mark-{MARKS.index(mark) + 1}" for mark in found["marks"])
        rest = line[: found.start()] + ("" if found["own"] else "</span>")
        return f'<span class="marked {names}"><span class="marks">{links}</span>{rest}\n</span>'

    def code_with_links(found: re.Match[str]) -> str:
        return found["head"] + "".join(map(with_links, found["lines"].split("\n"))) + found["end"]

    text, *codes = re.split(r'(?=<div class="highlight">)', block)
    text = FORMULA.sub(lambda found: with_terms(found[0]) if MARK_HERE.search(found[0]) else found[0], text)
    text = MARK_HERE.sub(lambda found: link(found[0], "text", "lines"), text)
    return text + "".join(CODE.sub(code_with_links, code) for code in codes)


def with_terms(formula: str) -> str:
    """MathML in which each term that has a mark below or above it gets the mark's class. The mark becomes a
    text, since MathML can contain links only there."""
    math = ElementTree.fromstring(formula)
    for name in ("munder", "mover"):
        for pair in math.iter(f"{{{MATHML}}}{name}"):
            term, label = pair
            mark = "".join(label.itertext())
            if MARK_HERE.fullmatch(mark):
                term.set("class", f"term mark-{MARKS.index(mark) + 1}")
                label.clear()
                label.tag, label.text = f"{{{MATHML}}}mtext", mark
    return ElementTree.tostring(math, encoding="unicode")
