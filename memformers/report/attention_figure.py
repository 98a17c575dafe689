"""The figure of attention by place and by distance, narrow enough for a telephone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from memformers.report.curves import drawn
from memformers.report.figures import DOTS, WIDTH, finish, save_with_data, thousands
from memformers.report.markdown import Cell

PLACES: dict[str, dict[str, Any]] = {
    "compressed memory": {"facecolor": "#009E73", "hatch": "////"},
    "memory": {"facecolor": "#E69F00", "hatch": ""},
    "segment": {"facecolor": "#0072B2", "hatch": ".."},
}
"""The parts of the keys in order of time, with their colours, and patterns for print without colour."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Colours (Okabe and Ito's) and lines of layers; no two of the first 35 layers have the same pair."""


def save_attention(attention: Mapping[str, Any], labels: Mapping[str, str], folder: Path) -> Path:
    """Two panels for each model, one below the other."""
    figure = Figure(figsize=(WIDTH, 0.9 + 3.6 * len(attention)), dpi=DOTS, layout="constrained")
    panels = figure.subplots(2 * len(attention), 1, squeeze=False)[:, 0]
    for number, (run, mass) in enumerate(attention.items()):
        by_place(panels[2 * number], mass)
        panels[2 * number].set_title(drawn(labels[run]), loc="left", fontsize=9)
        by_distance(panels[2 * number + 1], mass)
    layers = max(len(mass["by_distance"]) for mass in attention.values())
    handles = [
        *(Patch(**look, edgecolor="white", label=place) for place, look in PLACES.items()),
        *(Line2D([], [], **layer_look(i), label=f"layer {i + 1}") for i in range(layers)),
    ]
    figure.legend(handles=handles, frameon=False, ncols=3, loc="outside lower center", fontsize=8)
    path = folder / "attention.png"
    head = ["arm", "layer", "head", "place, or nearest distance of the octave (tokens)", "share of attention"]
    save_with_data(figure, path, head, list(rows(attention, labels)))
    return path


def rows(attention: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[list[Cell]]:
    """The attention of every head, by place and by distance."""
    for run, mass in attention.items():
        for names, layers in ((PLACES, mass["by_place"]), (mass["nearest"], mass["by_distance"])):
            for i, layer in enumerate(layers, 1):
                for j, head in enumerate(layer, 1):
                    for name, share in zip(names, head, strict=True):
                        yield [labels[run], i, j, name, share]


def layer_look(number: int) -> dict[str, Any]:
    """A layer's colour and line."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": LINES[number % len(LINES)], "linewidth": 1.5}


def by_place(axes: Axes, mass: Mapping[str, Any]) -> None:
    """Stacked bars: layers side by side, the heads of each together."""
    heads, layers = len(mass["by_place"][0]), len(mass["by_place"])
    at = [layer * (heads + 1) + head for layer in range(layers) for head in range(heads)]
    bottom = [0.0] * len(at)
    for i, look in enumerate(PLACES.values()):
        shares = [100 * head[i] for layer in mass["by_place"] for head in layer]
        if any(shares):
            axes.bar(at, shares, bottom=bottom, width=0.9, edgecolor="white", linewidth=0.3, **look)
        bottom = [b + share for b, share in zip(bottom, shares, strict=True)]
    finish(axes, "layer", "attention (%)")
    axes.grid(visible=False)
    every = -(-layers // 12)
    shown = range(0, layers, every)
    axes.set_xticks([layer * (heads + 1) + (heads - 1) / 2 for layer in shown], [f"{n + 1}" for n in shown])
    axes.set_ylim(0, 100)


def by_distance(axes: Axes, mass: Mapping[str, Any]) -> None:
    """Each layer's mean attention in each octave of distances; distance 0 is drawn at ½."""
    middles = [0.5] + [2**0.5 * near for near in mass["nearest"][1:]]
    for number, layer in enumerate(mass["by_distance"]):
        mean = [100 * sum(parts) / len(layer) for parts in zip(*layer, strict=True)]
        axes.plot(middles, mean, **layer_look(number))
    finish(axes, "distance (tokens)", "attention in\nthe octave (%)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(middles[:1] + mass["nearest"][1::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x < 1 else thousands(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
