"""The figures of a recall experiment, narrow enough for a telephone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memformers.report.plotting import DOTS, WIDTH, save

# Okabe and Ito's palette (2008), with a line and a marker of its own for print without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "no-memory": {"color": "#0072B2", "linestyle": ":", "marker": "o"},
    "transformer-xl": {"color": "#D55E00", "linestyle": "-", "marker": "s"},
    "compressive": {"color": "#009E73", "linestyle": "--", "marker": "^"},
    "frozen": {"color": "#CC79A7", "linestyle": (0, (4, 1, 1, 1)), "marker": "v"},
    "mean": {"color": "#56B4E9", "linestyle": (0, (2, 1)), "marker": "D"},
    "ceiling": {"color": "#E69F00", "linestyle": "-.", "marker": "P"},
}
OF_A_CONTROL: dict[str, dict[str, Any]] = {
    "untouched": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "slots zeroed": {"color": "#009E73", "linestyle": "--", "marker": "^"},
    "slots swapped": {"color": "#56B4E9", "linestyle": (0, (2, 1)), "marker": "D"},
    "memory zeroed": {"color": "#D55E00", "linestyle": ":", "marker": "s"},
    "memory swapped": {"color": "#E69F00", "linestyle": "-.", "marker": "P"},
}
CONTROLLED = ("transformer-xl", "compressive")


def save_recall_figures(summary: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Draw the figures of ``summary``, as ``results.json`` has it, into ``folder``, as PNG and as SVG;
    returns the paths of the PNGs by name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"accuracy": accuracy_by_distance(summary), "controls": causal_controls(summary)}
    paths = {}
    for name, figure in drawn.items():
        if figure is not None:
            paths[name] = folder / f"recall_{name}.png"
            save(figure, paths[name])
            save(figure, paths[name].with_suffix(".svg"))
    return paths


def accuracy_by_distance(summary: Mapping[str, Any]) -> Figure:
    """A line for each arm; above them, how far one layer of each looks back."""
    figure = Figure(figsize=(WIDTH, 4.9), dpi=DOTS, layout="constrained")
    above, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 5])
    edges, arms = summary["edges"], summary["arms"]
    for i, arm in enumerate(arms):
        look = {**LOOKS.get(arm["name"], {"color": f"C{i}"}), "marker": "|"}
        above.plot(positions([0, arm["sees_back"]], edges), [-i, -i], **look)
        draw(axes, arm["recall"]["accuracy"], arm["title"], LOOKS.get(arm["name"], {"color": f"C{i}"}))
    above.set(yticks=[], ylim=(0.7 - len(arms), 0.7))
    above.set_title("how far one layer looks back", fontsize=9, loc="left")
    above.spines[:].set_visible(False)
    above.tick_params(bottom=False, labelbottom=False)
    reaches = sorted({arm["sees_back"] for arm in arms})
    for reach in positions(reaches, edges):
        axes.axvline(reach, color="#bbbbbb", linewidth=0.8, zorder=0)
    finish(axes, summary)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=8)
    return figure


def causal_controls(summary: Mapping[str, Any]) -> Figure | None:
    """A panel for each memory without its variants: recall with parts of it zeroed or swapped."""
    arms = [arm for arm in summary["arms"] if arm["name"] in CONTROLLED]
    if not arms:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 2.3 * len(arms)), dpi=DOTS, layout="constrained")
    panels = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for arm, axes in zip(arms, panels, strict=True):
        for name, recall in {"untouched": arm["recall"], **arm["controls"]}.items():
            handles[name] = draw(axes, recall["accuracy"], name, OF_A_CONTROL[name])
        finish(axes, summary)
        parts(axes, arm, summary)
        axes.set_title(arm["title"], fontsize=9, loc="left")
        axes.label_outer()
    order = [name for name in OF_A_CONTROL if name in handles]
    lines = [handles[name] for name in order]
    figure.legend(lines, order, loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return figure


def draw(axes: Axes, accuracy: Sequence[Mapping[str, float | None]], label: str, look: dict[str, Any]) -> Any:
    """A line of means over bins, in percent, with a band if there is an interval."""
    known = [(i + 0.5, bin["mean"], bin["half_width"]) for i, bin in enumerate(accuracy)]
    points = [(x, 100 * mean) for x, mean, _ in known if mean is not None] or [(np.nan, np.nan)]
    (line,) = axes.plot(*zip(*points, strict=True), label=label, markersize=3.5, linewidth=1.3, **look)
    band = [(x, 100 * mean, 100 * half) for x, mean, half in known if mean is not None and half is not None]
    if band:
        x, mean, half = np.array(band).T
        low, high = np.clip(mean - half, 0, 100), np.clip(mean + half, 0, 100)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return line


def parts(axes: Axes, arm: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Shade the distances that only slots reach, and draw lines where memory and slots end."""
    segment = arm["sees_back"] - arm["mem_len"] - arm["c_mem_len"] * arm["compression_rate"]
    ends = [arm["mem_len"] + segment, arm["sees_back"]]
    memory, slots = positions(ends, summary["edges"])
    for end in {memory, slots}:
        axes.axvline(end, color="#bbbbbb", linewidth=0.8, zorder=0)
    if arm["c_mem_len"]:
        axes.axvspan(memory, slots, color="#000000", alpha=0.05, linewidth=0)


def finish(axes: Axes, summary: Mapping[str, Any]) -> None:
    """Draw chance, and set axes and their names; all bins are equally wide."""
    edges = summary["edges"]
    axes.axhline(100 * summary["chance"], color="#888888", linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    axes.text(0.08, 100 * summary["chance"] + 1, "chance", fontsize=7, color="#666666")
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, len(edges) - 1)
    axes.set_ylim(0, 101)
    axes.set_xlabel("positions since the value was set", fontsize=9)
    axes.set_ylabel("right answers (%)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, axis="y")


def positions(distances: Sequence[float], edges: Sequence[int]) -> list[float]:
    """The places of distances on an axis with equally wide bins."""
    return [float(x) for x in np.interp(distances, edges, range(len(edges)))]
