"""How figures of results look: text of 12 pixels, and colours that follow a light or dark page."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from memformers.common.intervals import Mean
from memformers.report.markdown import DARK
from memformers.report.plotting import BLUE, GREEN, ORANGE

WIDTH, NARROW = 7.5, 4.6
"""Inches of 96 pixels, so that text of 9 points is 12 pixels high."""
INK, GREY, FAINT = "#000000", "#666666", "#b0b0b0"
COLOURS = {
    "transformer": BLUE["color"],
    "transformer-xl": ORANGE["color"],
    "compressive": GREEN["color"],
    "": GREY,
}
NAMES = {"transformer": "No memory", "transformer-xl": "Transformer-XL", "compressive": "Compressive"}
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "xtick.color": FAINT,
    "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.linewidth": 0.8,
    "svg.fonttype": "none", "svg.hashsalt": "memformers", "font.family": "sans-serif", "lines.linewidth": 1.5,
}  # fmt: skip
Points = Sequence[tuple[float, Mean]]


def line(axes: Axes, points: Points, arm: str, scale: float = 1, alpha: float = 1) -> None:
    colour = COLOURS.get(arm, INK)
    x, y = [at for at, _ in points], [scale * m.mean for _, m in points]
    axes.plot(x, y, color=colour, marker="o", markersize=3, alpha=alpha)
    low, high = ([scale * (m.mean + sign * m.half_width) for _, m in points] for sign in (-1, 1))
    if scale == 100:  # a share
        low, high = [max(v, 0) for v in low], [min(v, 100) for v in high]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def bar(axes: Axes, value: Mean, at: float, arm: str, limits: tuple[float, float], scale: float = 1) -> None:
    """A mean with its interval, horizontal; the interval ends at the ``limits``."""
    low, high = (scale * (value.mean + sign * value.half_width) for sign in (-1, 1))
    colour = COLOURS.get(arm, INK)
    axes.plot([max(low, limits[0]), min(high, limits[1])], [at, at], color=colour, linewidth=2.5)
    axes.plot(scale * value.mean, at, "o", color=colour, markersize=5)


def names(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def guesses(axes: Axes) -> None:
    axes.axhline(25, color=GREY, linewidth=0.8, linestyle=":")
    at: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate("guessing", (0, 25), (2, -9), color=GREY, **at)


def key(figure: Figure, arms: Sequence[str], labels: Sequence[str] = ()) -> None:
    """The names of arms in their colours, or other ``labels`` of them, above all panels."""
    handles = [Line2D([], [], color=COLOURS[arm], marker="o", markersize=4) for arm in arms]
    labels = labels or [NAMES[arm] for arm in arms]
    figure.legend(handles, labels, loc="outside upper center", ncols=len(arms), frameon=False)


def svg(draw: Callable[[], Figure]) -> str:
    """A figure as SVG, the same each time: its colours are variables, which follow a light or dark page, and
    its text is text."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = draw()
        figure.patch.set_alpha(0)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<\?xml.*?<svg", "<svg", file.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c\1, #\1)", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    dark = "".join(f"--c{light[1:]}:{colour};" for light, colour in DARK.items())
    follows = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    root = 'style="fill: var(--c000000, #000000); font-family: Helvetica, Arial, sans-serif"'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {root} \1>\n {follows}", text, count=1)
