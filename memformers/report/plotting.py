"""How every figure looks: narrow enough for a telephone, labelled axes with units, colours that colour-blind
readers can distinguish."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from memformers.common.files import replacing
from memformers.common.intervals import Mean
from memformers.report.markdown import plain
from memformers.runs.folder import FIGURES

WIDTH, DOTS = 4.4, 200
"""Inches, and dots an inch: text of 9 points is 10 pixels high on a screen of 390."""
LINE = 0.17
"""The height of a line of a legend, in inches."""
LONG_NAME = 26
"""The number of characters from which two names don't fit beside each other."""
FEWEST_FOR_A_LINE = 3
"""Fewer points are not joined, since a line would suggest values between them."""
GREY, PALE = "#888888", "#bbbbbb"
APART = 0.16
"""The distance between the marks of two series at the same place; places have a distance of 1."""
LineStyle = dict[str, Any]
"""A colour, a line and a marker, as matplotlib's keyword arguments."""


def _line(color: str, linestyle: object, marker: str) -> LineStyle:
    return {"color": color, "linestyle": linestyle, "marker": marker, "markersize": 4.0, "linewidth": 1.3}


# Okabe and Ito's palette (2008), with a line and a marker of its own for print without colour.
BLUE = _line("#0072B2", ":", "o")
ORANGE = _line("#D55E00", "-", "s")
GREEN = _line("#009E73", "--", "^")
PINK = _line("#CC79A7", "-.", "D")
SKY = _line("#56B4E9", (0, (4, 1, 1, 1)), "v")
AMBER = _line("#E69F00", (0, (2, 1)), "P")
BLACK = _line("#000000", (0, (1, 1)), "X")
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, BLACK)
LINE_STYLES = {"transformer": BLUE, "no-memory": BLUE, "transformer-xl": ORANGE, "compressive": GREEN,
               "conv": GREEN, "frozen": PINK, "mean": SKY, "ceiling": AMBER}  # fmt: skip
"""Those of arms with these names, in every figure and on the live page."""
DARK = {"#0072b2": "#3fa9e8", "#d55e00": "#f58a3c", "#009e73": "#2ccb9e", "#cc79a7": "#e29bc6",
        "#56b4e9": "#8cd0f5", "#e69f00": "#f0bc45", "#000000": "#e3e3e3", "#ffffff": "#17191c",
        "#888888": "#999999", "#bbbbbb": "#555555", "#b0b0b0": "#666666", "#666666": "#aaaaaa"}  # fmt: skip
"""The colours of a dark page, by those of a light one."""


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """The style of each arm; after the last of the palette, those of arms with other names repeat."""
    taken = [LINE_STYLES[name]["color"] for name in names if name in LINE_STYLES]
    free = [line for line in PALETTE[3:] if line["color"] not in taken] or PALETTE[3:]
    others = (name for name in dict.fromkeys(names) if name not in LINE_STYLES)
    return LINE_STYLES | dict(zip(others, cycle(free), strict=False))


@dataclass(frozen=True)
class Series:
    """Means at their places on an axis, and how they are drawn."""

    label: str
    """Its name in the legend; empty: it is not there."""
    points: Sequence[tuple[float, Mean]]
    line: LineStyle
    bars: Sequence[tuple[float, float]] = ()
    """How far the interval of each mean reaches below and above it, if that is not its half width."""
    scale: float = 1.0
    """The factor by which it is multiplied when it is drawn: 100 for percent."""

    @property
    def style(self) -> LineStyle:
        """What matplotlib draws it with; its label there must not begin with _, which would hide it."""
        return self.line | {"label": (literal(self.label).lstrip("_") or "run") if self.label else None}

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The places, the means, and ``[2, points]`` how far the intervals reach; None without any."""
        bars = self.bars or [(mean.half_width, mean.half_width) for _, mean in self.points]
        reach = self.scale * np.array(bars, float).reshape(-1, 2).T
        means = self.scale * np.array([mean.mean for _, mean in self.points])
        return np.array([at for at, _ in self.points], float), means, None if np.isnan(reach).all() else reach


def panels(
    heights: Sequence[float], *, width: float = WIDTH, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of rows of panels with these ``heights`` in inches; the ``grid`` is for matplotlib's
    ``subplots``."""
    figure = Figure(figsize=(width, sum(heights) + 0.3), dpi=DOTS, layout="constrained")
    places = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights, **grid)
    return figure, list(places.flat)


def style(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Set the names of the axes and what else all panels share."""
    axes.set_xlabel(literal(x), fontsize=9)
    axes.set_ylabel(literal(y), fontsize=9)
    if title:
        axes.set_title(literal(title), fontsize=9, loc="left")
    axes.tick_params(labelsize=8, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(thousands)
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(thousands)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def octave_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with these ``ticks``."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(thousands)
    axes.xaxis.set_minor_locator(NullLocator())


def mark(axes: Axes, places: Sequence[float]) -> None:
    """Thin vertical lines at these ``places``, behind the curves."""
    for at in places:
        axes.axvline(at, color=PALE, linewidth=0.8, zorder=0)


def draw_lines(axes: Axes, many: Sequence[Series]) -> None:
    """Lines of means, with bands if there are intervals; fewer than three points are drawn as marks with
    bars."""
    for series in many:
        if len(series.points) < FEWEST_FOR_A_LINE:
            draw_marks(axes, [series])
            continue
        x, mean, reach = series.arrays()
        axes.plot(x, mean, **series.style)
        if reach is not None:
            low = mean - reach[0]
            if axes.get_yscale() == "log":  # which can't show zero and negative values
                low = np.maximum(low, mean.min() / 10)
            axes.fill_between(x, low, mean + reach[1], color=series.line["color"], alpha=0.18, linewidth=0)


def draw_marks(axes: Axes, many: Sequence[Series], apart: float = 0.0, *, horizontal: bool = False) -> None:
    """Marks with bars, joined by a line if there are three or more; each of ``many`` series is moved so that
    the next one is this far ``apart``. ``horizontal``: the values are on the horizontal axis."""
    for number, series in enumerate(many):
        x, mean, reach = series.arrays()
        x = x + apart * (number - (len(many) - 1) / 2)
        style = series.style | {"marker": series.line["marker"] or ".", "capsize": 2.5}
        if len(x) < FEWEST_FOR_A_LINE:
            style["linestyle"] = "none"
        if horizontal:
            axes.errorbar(mean, x, xerr=reach, **style)
        else:
            axes.errorbar(x, mean, yerr=reach, **style)


def categories(axes: Axes, names: Sequence[str], *, horizontal: bool = False, rotation: float = 0.0) -> None:
    """Give the places 0, 1, 2 … on an axis their ``names``; ``horizontal``: one below the other."""
    axis: Axis = axes.yaxis if horizontal else axes.xaxis
    axis.set_ticks(range(len(names)), [literal(name) for name in names], fontsize=8, rotation=rotation)
    if horizontal:
        axes.set_ylim(len(names) - 0.5, -0.5)
    else:
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.grid(visible=False, axis="x")


def legend(figure: Figure, handles: Sequence[Any] = (), columns: int = 2) -> None:
    """The legend below all panels, each name once, for which the figure becomes higher: of the ``handles``,
    by default of all that was drawn. Long names are below each other."""
    found = handles or [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    named = {handle.get_label(): handle for handle in found}
    if max(map(len, named), default=0) > LONG_NAME:
        columns = 1
    figure.set_figheight(figure.get_figheight() + LINE * math.ceil(len(named) / columns))
    style = {"frameon": False, "fontsize": 8, "ncols": columns}
    figure.legend(named.values(), named, loc="outside lower center", **style)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically as PNG or SVG, by the ending of ``path``; the same data give the same
    file."""
    kind = path.suffix[1:]
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "memformers"}):
        figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)


def save_figure(figure: Figure, folder: Path, name: str, title: str, caption: str) -> str:
    """Write a figure as SVG into the figures of the report in ``folder``; returns the Markdown that shows it
    with its ``caption`` below. The ``title`` replaces it where it can't be seen."""
    path = folder / FIGURES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not figure.legends:
        legend(figure)
    save(figure, path)
    return f"![{plain(title)}]({FIGURES}/{path.name})\n\n{caption}"


def thousands(value: float, _: float = 0.0) -> str:
    """12000 as 12k, 1500000 as 1.5M."""
    if abs(value) >= 1e6:
        text = f"{value / 1e6:g}M"
    else:
        text = f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
    return text.replace("-", "−")


def literal(text: str) -> str:
    """Text that matplotlib shows unchanged: $ would begin a formula."""
    return text.replace("$", r"\$")
