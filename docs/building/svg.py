"""Figures as SVG files that are the same each time and follow a light or dark page."""

import io
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from memformers.report.plotting import NO_METADATA
from memformers.report.rendering import dark_rules

INK = "#000000"
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
STYLE = Path(__file__).with_name("figures.mplstyle")


def svg(draw: Callable[[], Figure]) -> str:
    """A figure as SVG, the same each time: its text is text, and its colours follow a light or dark page."""
    file = io.StringIO()
    with matplotlib.rc_context(fname=STYLE):
        figure = draw()
        # The ground is that of the page.
        figure.patch.set_alpha(0)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    root = ElementTree.fromstring(text)
    use_plain_names(root)
    number_clips(root)
    remove_fonts(root)
    let_markers_inherit(root)
    root.set("style", f"fill: {INK}; font-family: Helvetica, Arial, sans-serif")
    # svg:root is a file's; in a page, whose root is html, the rules of the page apply.
    rules = []
    for rule in f"{dark_rules('svg:root')}\n{dark_rules('svg:root ')}".splitlines():
        _, declaration, _ = rule.split('"')
        if declaration in text or declaration == f"fill: {INK}":
            rules.append(rule)
    style = ElementTree.Element("style")
    style.text = "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def use_plain_names(root: ElementTree.Element) -> None:
    """Names as they are written in a file. ElementTree would write the prefixes that it has registered, and
    formulas need others."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
        href = element.attrib.pop(f"{{{XLINK}}}href", None)
        if href:
            element.set("xlink:href", href)
    root.set("xmlns", SVG)
    root.set("xmlns:xlink", XLINK)


def number_clips(root: ElementTree.Element) -> None:
    """Name clips by numbers, instead of hashes of sizes that may differ in their last bit."""
    numbered = {}
    for index, clip in enumerate(root.iter("clipPath")):
        name = clip.get("id", "")
        numbered[f"url(#{name})"] = f"url(#clip{index})"
        clip.set("id", f"clip{index}")
    for element in root.iter():
        clip_path = element.get("clip-path", "")
        if clip_path:
            element.set("clip-path", numbered[clip_path])


def remove_fonts(root: ElementTree.Element) -> None:
    """Texts get the font of the whole figure instead of the one that matplotlib found here."""
    for element in root.iter():
        remove_declarations(element, ("font-family",))


def let_markers_inherit(root: ElementTree.Element) -> None:
    """Markers get the colours of the elements that use them. Rules for the dark reach these alone."""
    for definitions in root.iter("defs"):
        for marker in definitions.iter("path"):
            remove_declarations(marker, ("fill: #", "stroke: #"))


def remove_declarations(element: ElementTree.Element, beginnings: tuple[str, ...]) -> None:
    declarations = element.get("style", "").split("; ")
    kept = [text for text in declarations if not text.startswith(beginnings)]
    if len(kept) < len(declarations):
        element.set("style", "; ".join(kept))
