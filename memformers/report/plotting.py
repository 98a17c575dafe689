"""Figures: narrow enough for a telephone, labelled axes with units, colours that colour-blind readers can
distinguish; and those of runs on a text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from memformers.common.files import atomic_write
from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean
from memformers.report import data
from memformers.report.arms import ArmRuns, Measure, Quantity, Result
from memformers.report.data import Text, prose
from memformers.runs.folder import FIGURES
from memformers.runs.metrics import SECONDS, TOKENS

WIDTH = 4.4
"""Inches: text of 9 points is 10 pixels high on a screen of 390."""
DOTS = 200
"""Dots an inch, of a figure as PNG."""
LINE = 0.17
"""The height of a line of a legend, in inches."""
LONG_NAME = 26
"""The number of characters from which two names don't fit beside each other."""
BESIDE = 0.08
"""Inches between two marks of the same place, a little more than a mark is wide."""
MIN_FOR_A_LINE = 3
"""Fewer points are not joined, since a line would suggest values between them."""
MAX_DRAWN = 16
"""The most arms in a figure; nobody can distinguish more."""
GREY = "#888888"
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""An SVG then begins with its drawing, and the same data give the same file."""
VALID = "bits_per_character.valid"
TRAIN = "bits_per_character.train"
RECONSTRUCTION = "reconstruction_loss"
UNIT = "bits per character"
LineStyle = dict[str, Any]
"""A colour, a line and a marker, as matplotlib's keyword arguments."""


def _line(color: str, linestyle: object, marker: str) -> LineStyle:
    return {"color": color, "linestyle": linestyle, "marker": marker, "markersize": 4.0, "linewidth": 1.3}


# Okabe and Ito's palette (2008), with lines and markers for print without colour.
BLUE = _line("#0072B2", ":", "o")
ORANGE = _line("#D55E00", "-", "s")
GREEN = _line("#009E73", "--", "^")
PINK = _line("#CC79A7", "-.", "D")
SKY = _line("#56B4E9", (0, (4, 1, 1, 1)), "v")
AMBER = _line("#E69F00", (0, (2, 1)), "P")
BLACK = _line("#000000", (0, (1, 1)), "X")
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, BLACK)
LINE_STYLES = {"transformer": BLUE, "no-memory": BLUE, "transformer-xl": ORANGE, "compressive": GREEN,
               "selective": BLACK, "conv": GREEN, "frozen": PINK, "mean": SKY, "ceiling": AMBER}  # fmt: skip
"""Those of arms with these names, in every figure and on the live page."""
CONTROL_LINES = {
    "slots zeroed": GREEN, "slots swapped": SKY, "memory zeroed": ORANGE | {"linestyle": ":"},
    "memory swapped": AMBER,
}  # fmt: skip
"""Those of changed memories."""


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """The style of each arm; after the last of the palette, those of arms with other names repeat."""
    used = set()
    unnamed = []
    for name in dict.fromkeys(names):
        if name in LINE_STYLES:
            used.add(LINE_STYLES[name]["color"])
        else:
            unnamed.append(name)
    # The first three colours are those of the models, in every figure.
    free = [line for line in PALETTE[3:] if line["color"] not in used] or PALETTE[3:]
    return LINE_STYLES | dict(zip(unnamed, cycle(free), strict=False))


def styles_of(arms: Sequence[ArmRuns]) -> dict[str, LineStyle]:
    return line_styles([arm.name for arm in arms])


@dataclass(frozen=True)
class Series:
    """Means at their places on an axis, and how they are drawn."""

    label: str
    """Its name in the legend; empty: it is not there."""
    points: Sequence[tuple[float, Mean]]
    line: LineStyle
    scale: float = 1.0
    """The factor by which it is multiplied when it is drawn: 100 for percent."""

    @property
    def style(self) -> LineStyle:
        """For matplotlib, which hides labels that begin with _."""
        return self.line | {"label": (literal(self.label).lstrip("_") or "run") if self.label else None}

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Places, means, and half widths, which means of fewer than ``MIN_FOR_A_CLAIM`` numbers lack."""
        rows = []
        for x, mean in self.points:
            half_width = mean.half_width if mean.n >= MIN_FOR_A_CLAIM else math.nan
            rows.append((x, mean.mean, half_width))
        x_values, means, half_widths = np.array(rows, float).reshape(-1, 3).T
        has_intervals = not np.isnan(half_widths).all()
        return x_values, self.scale * means, self.scale * half_widths if has_intervals else None


@dataclass(frozen=True)
class Panel:
    """Some series over the same vertical axis."""

    y: str
    """What the vertical axis shows, with its unit."""
    series: Sequence[Series]
    title: str = ""
    finish: Callable[[Axes], None] = lambda axes: None
    """Adds to what is drawn."""


def panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """A figure of panels with these ``heights`` in inches, one below the other."""
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), dpi=DOTS, layout="constrained")
    return figure, [*figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).flat]


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


def draw_lines(axes: Axes, many: Sequence[Series]) -> None:
    """Lines with bands where there are intervals; fewer than three points are marks with bars."""
    marked = [series for series in many if len(series.points) < MIN_FOR_A_LINE]
    draw_marks(axes, marked)
    for series in many:
        if series in marked:
            continue
        x, mean, half = series.arrays()
        axes.plot(x, mean, **series.style)
        if half is not None and series.line["marker"]:
            # The band
            low = mean - half
            if axes.get_yscale() == "log":  # which can't show zero and negative values
                low = np.maximum(low, mean.min() / 10)
            axes.fill_between(x, low, mean + half, color=series.line["color"], alpha=0.18, linewidth=0)


def draw_marks(axes: Axes, many: Sequence[Series], *, horizontal: bool = False) -> None:
    """Marks with bars, joined by a line if there are three or more; one beside the other where several series
    have a mark at the same place."""
    places = {x for series in many for x, _ in series.points}
    n_marks = sum(len(series.points) for series in many)
    is_crowded = not horizontal and len(places) < n_marks
    for i, series in enumerate(many):
        x, mean, half = series.arrays()
        style = series.style | {"marker": series.line["marker"] or ".", "capsize": 2.5}
        if is_crowded and len(x) < MIN_FOR_A_LINE:
            inches = BESIDE * (i - (len(many) - 1) / 2)
            beside = ScaledTranslation(inches, 0.0, axes.figure.dpi_scale_trans)
            style["transform"] = axes.transData + beside
            # matplotlib leaves what is moved out of the limits of the axes.
            reach = 0.0 if half is None else half
            axes.update_datalim(np.column_stack([x, mean - reach]))
            axes.update_datalim(np.column_stack([x, mean + reach]))
            axes.autoscale_view()
        if len(x) < MIN_FOR_A_LINE:
            style["linestyle"] = "none"
        if horizontal:
            axes.errorbar(mean, x, xerr=half, **style)
        else:
            axes.errorbar(x, mean, yerr=half, **style)


def categories(axes: Axes, names: Sequence[str]) -> None:
    """Give the places 0, 1, 2 … of the vertical axis their ``names``, one below the other."""
    axes.yaxis.set_ticks(range(len(names)), list(map(literal, names)), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)


def legend(figure: Figure) -> None:
    """The legend below all panels, each name once, for which the figure becomes higher."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    # Two names beside each other, if they are short
    columns = 1 if max(map(len, named), default=0) > LONG_NAME else 2
    figure.set_figheight(figure.get_figheight() + LINE * math.ceil(len(named) / columns))
    style = {"frameon": False, "fontsize": 8, "ncols": columns}
    figure.legend([*named.values()], [*named], loc="outside lower center", **style)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG; the same data give the same file."""
    kind = path.suffix[1:]
    with atomic_write(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "memformers"}):
        figure.savefig(temporary, format=kind, metadata=NO_METADATA if kind == "svg" else None)


def save_figure(figure: Figure, folder: Path, name: str, title: str, captions: Sequence[Text]) -> data.Figure:
    """Write a figure for the report in ``folder``."""
    path = folder / FIGURES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    legend(figure)
    save(figure, path)
    return data.Figure(path.name, title, captions)


def thousands(value: float, _: float = 0.0) -> str:
    """12000 as 12k, 1500000 as 1.5M."""
    if abs(value) >= 1e6:
        text = f"{value / 1e6:g}M"
    else:
        text = f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
    return text.replace("-", "−")


def literal(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula


def curves(
    folder: Path,
    name: str,
    title: str,
    captions: Sequence[Text],
    x: str,
    drawn: Sequence[Panel],
    log: bool = False,
) -> list[data.Figure]:
    """A figure of the panels that have curves; none if none has."""
    drawn = [panel for panel in drawn if panel.series]
    if not drawn:
        return []
    figure, places = panels([2.7] * len(drawn))
    for axes, panel in zip(places, drawn, strict=True):
        axes.set_yscale("log" if log else "linear")
        draw_lines(axes, panel.series)
        style(axes, x if axes is places[-1] else "", panel.y, panel.title)
        panel.finish(axes)
    return [save_figure(figure, folder, name, title, captions)]


def distance_to_best(arm: ArmRuns, measure: Measure) -> float:
    """Less for a better ``arm``; infinite for one without a result."""
    mean = arm.mean(measure.of)
    return -measure.better * mean.mean if mean and math.isfinite(mean.mean) else math.inf


def best_arms(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure) -> list[ArmRuns]:
    """At most [`MAX_DRAWN`][] of the ``arms``, in their order: ``base``, those that are best, and then those
    without a result."""
    if len(arms) <= MAX_DRAWN:
        return list(arms)
    others = [arm for arm in arms if arm is not base]
    ranked = sorted(others, key=lambda arm: distance_to_best(arm, measure))
    best = {arm.name for arm in [base, *ranked[: MAX_DRAWN - 1]]}
    return [arm for arm in arms if arm.name in best]


def text_figures(
    arms: Sequence[ArmRuns],
    base: ArmRuns,
    measure: Measure,
    folder: Path,
    read_in_training: Text,
    read_at_end: str,
) -> list[data.Figure]:
    """Every figure that ``arms`` have data for; of many arms, only the best ones by ``measure``. Captions say
    which part of the held-out text is ``read_in_training`` and ``read_at_end``."""
    shared: list[Text] = []  # captions
    n_arms = len(arms)
    lines = styles_of(arms)  # of all, as in the chart and on the live page
    arms = best_arms(arms, base, measure)
    if len(arms) < n_arms:
        others = [arm for arm in arms if arm is not base]
        n_best = sum(math.isfinite(distance_to_best(arm, measure)) for arm in others)
        counts = {"n_best": n_best, "n_unfinished": len(others) - n_best, "n_arms": n_arms}
        shared.append(prose("best_arms", **counts, measure=measure, base=base.label))
    seeds = sorted({len(arm.counted) for arm in arms})
    if seeds[-1] > 1:
        shared.append(prose("bands", seeds=seeds, least=MIN_FOR_A_CLAIM))
    tokens = "training tokens"

    def series_of(
        metric: str, over: str = TOKENS, label: str = "{}", minus: ArmRuns | None = None
    ) -> list[Series]:
        drawn = []
        for arm in arms:
            points = arm.curve(metric, over, minus) if arm is not minus else []
            if points:
                drawn.append(Series(label.format(arm.label), points, lines[arm.name]))
        return drawn

    # Loss
    training = thin(series_of(TRAIN, label=""))
    held_out = series_of(VALID)
    loss = Panel(f"loss ({UNIT})", [*training, *held_out])
    caption = prose("loss", read=read_in_training, has_training=bool(training))
    title = "Loss against training tokens"
    figures = curves(folder, "loss", title, [caption, *shared], tokens, [loss])

    # Its difference to that of the baseline
    if len(base.counted) > 1:
        difference = Panel(f"held-out loss minus the baseline's\n({UNIT})", series_of(VALID, minus=base))
        caption = prose("differences", base=base.label)
        title = "Held-out loss minus the baseline's"
        figures += curves(folder, "differences", title, [caption, *shared], tokens, [difference])

    # By time
    by_time = Panel(f"held-out loss ({UNIT})", series_of(VALID, SECONDS))
    title = "Held-out loss against training time"
    caption = prose("loss_by_time")
    x = "training time (seconds)"
    figures += curves(folder, "loss_by_time", title, [caption, *shared], x, [by_time])

    # Of the compression functions
    of_training = thin(series_of(f"{RECONSTRUCTION}.train", label="{}, training"))
    of_held_out = series_of(f"{RECONSTRUCTION}.valid", label="{}, held-out")
    panel = Panel("reconstruction loss\n(MSE, sum over layers)", [*of_training, *of_held_out])
    title = "Loss of the compression functions"
    caption = prose(RECONSTRUCTION)
    figures += curves(folder, RECONSTRUCTION, title, [caption, *shared], tokens, [panel], log=True)

    # By position
    upper = position_series(arms, lines)
    lower = position_series([arm for arm in arms if arm is not base], lines, base)

    def draw_octaves(axes: Axes) -> None:
        octaves = next(filter(None, map(by_octave, arms)))
        axes.set_xscale("log", base=2)
        axes.set_xticks([first for first, _ in octaves])
        axes.xaxis.set_major_formatter(thousands)
        axes.xaxis.set_minor_locator(NullLocator())

    drawn = [
        Panel(f"loss ({UNIT})", upper, finish=draw_octaves),
        Panel(f"minus that of\n{base.label}", lower, finish=draw_octaves),
    ]
    caption = prose("loss_by_position", read=read_at_end, base=base.label if lower else "")
    title = "Held-out loss by position in the segment"
    x = "position in the segment (tokens)"
    return figures + curves(folder, "loss_by_position", title, [caption, *shared], x, drawn)


def thin(many: Sequence[Series]) -> list[Series]:
    """Thin lines without markers, of those with enough points for a line."""
    thinned = []
    for series in many:
        if len(series.points) >= MIN_FOR_A_LINE:
            thinned.append(replace(series, line=series.line | {"marker": "", "linewidth": 0.8}))
    return thinned


def position_series(
    arms: Sequence[ArmRuns], lines: Mapping[str, LineStyle], base: ArmRuns | None = None
) -> list[Series]:
    """The loss by position, at the geometric mean of each octave's ends, or its difference to ``base``."""
    drawn = []
    for arm in arms:
        points = []
        for (first, last), mean in by_octave(arm, base).items():
            points.append(((first * last) ** 0.5, mean))
        if points:
            drawn.append(Series(arm.label, points, lines[arm.name]))
    return drawn


def by_octave(arm: ArmRuns, base: ArmRuns | None = None) -> dict[tuple[int, int], Mean]:
    """The mean loss over seeds at the positions 1, 2, 3 – 4, 5 – 8 and so on of a segment, or its difference
    to ``base``, if there are several seeds and all segments are equally long."""
    results = [*arm.results.values(), *(base or arm).results.values()]
    lengths = {len(result["loss_by_position"]) for result in results}
    if len(lengths) != 1:
        return {}

    def between(first: int, last: int) -> Quantity:
        return lambda result: bits(result, fmean(result["loss_by_position"][first - 1 : last]))

    [length] = lengths
    means = {}
    firsts = [1, 2, *(2**i + 1 for i in range(1, length.bit_length()))]
    for first in firsts:
        if first > length:
            continue
        last = min(max(2 * (first - 1), 1), length)
        mean = arm.minus(base, between(first, last)) if base else arm.mean(between(first, last))
        if mean and (mean.n > 1 or not base):
            means[first, last] = mean
    return means


def bits(result: Result, nats: float = 1.0) -> float | None:
    """Nats per token as bits per character of the text of ``result``; None if these are not known."""
    if result["bits_per_character"] is None:
        return None
    return float(nats * result["bits_per_character"] / result["loss"])


def save_loss_by_position(
    in_segment: Sequence[float], by_memory: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw the mean loss by position in a segment, and by remembered positions, with half widths."""
    figure, [upper, lower] = panels([2.7, 2.7])
    positions = points_of(range(1, len(in_segment) + 1), in_segment)
    draw_lines(upper, [Series("", positions, BLUE | {"linestyle": "-", "marker": ""})])
    style(upper, "position in the segment (tokens)", "loss (nats per token)")
    points = [(length, Mean(loss, half, MIN_FOR_A_CLAIM)) for length, loss, half in by_memory]
    draw_marks(lower, [Series("", points, ORANGE)])
    style(lower, "remembered before the segment (tokens)", "loss (nats per token, ± 95 %)")
    save(figure, path)


def points_of(x: Sequence[float], losses: Sequence[float]) -> list[tuple[float, Mean]]:
    """Losses without intervals, as points of a series."""
    return [(position, Mean(loss, math.nan, 1)) for position, loss in zip(x, losses, strict=True)]


def save_loss_over_text(parts: Sequence[tuple[float, float, float]], path: Path) -> None:
    """Draw the loss of consecutive parts of a text, each with its middle in tokens, of a model as trained and
    of one that learns as it reads."""
    figure, [axes] = panels([2.7])
    middles, static, learning = zip(*parts, strict=True)
    as_trained = Series("as trained", points_of(middles, static), BLUE)
    draw_lines(axes, [as_trained, Series("learning", points_of(middles, learning), ORANGE)])
    style(axes, "position in the text (tokens)", "loss (nats per token)")
    legend(figure)
    save(figure, path)
