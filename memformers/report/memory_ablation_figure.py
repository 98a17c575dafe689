"""The figure of what memory is worth, narrow enough for a telephone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memformers.report.curves import drawn
from memformers.report.figures import DOTS, WIDTH, legend, save_with_data
from memformers.report.markdown import Cell

CONTROLS = {
    "memory zeroed": "memory\nzeroed",
    "memory swapped": "memory\nswapped",
    "slots zeroed": "compressed\nzeroed",
    "slots swapped": "compressed\nswapped",
}
APART = 0.16
"""The distance between arms at the same place of the axis; places have a distance of 1."""


def save_memory_ablation(
    memory_ablation: Mapping[str, Any],
    labels: Mapping[str, str],
    looks: Mapping[str, dict[str, Any]],
    folder: Path,
) -> dict[str, Path]:
    """Draw what memory is ``memory_ablation`` into ``folder``; returns the path by the figure's name, or
    nothing if there is neither a memory nor a second arm. ``labels`` and ``looks`` have the runs' names as
    keys."""
    costs = {run: found for run, found in memory_ablation["overall"]["less_untouched"].items() if found}
    others = [
        run
        for run in memory_ablation["overall"]["loss"]
        if run != memory_ablation["baseline"] and memory_ablation["baseline"]
    ]
    if not costs and not others:
        return {}
    heights = [2.6] * bool(costs) + [3.4] * bool(others)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), dpi=DOTS, layout="constrained")
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if costs:
        draw_costs(panels[0], costs, labels, looks)
    if others:
        draw_bands(panels[-1], memory_ablation["by_repeat_distance"], others, labels, looks)
        panels[-1].set_ylabel(
            f"nats per token, minus\n{drawn(labels[memory_ablation['baseline']])}", fontsize=9
        )
    legend(figure, panels)
    path = folder / "memory_ablation.png"
    head = ["arm", "changed part, or distance of repeats (tokens)", "quantity (nats per token)", "mean",
            "half width of the 95 % interval"]  # fmt: skip
    save_with_data(figure, path, head, list(rows(memory_ablation, costs, others, labels)))
    return {"memory_ablation": path}


def rows(
    memory_ablation: Mapping[str, Any],
    costs: Mapping[str, Mapping[str, Any]],
    others: Sequence[str],
    labels: Mapping[str, str],
) -> Iterator[list[Cell]]:
    """The data of both panels."""
    for run, found in costs.items():
        for control, cost in found.items():
            yield [labels[run], control, "cost", cost["mean"], cost["half_width"]]
    for run in others:
        less = f"loss minus that of {labels[memory_ablation['baseline']]}"
        for group in memory_ablation["by_repeat_distance"]:
            if run in group["less_baseline"]:
                difference = group["less_baseline"][run]
                yield [labels[run], group["name"], less, difference["mean"], difference["half_width"]]


def draw_costs(
    axes: Axes,
    costs: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
    looks: Mapping[str, dict[str, Any]],
) -> None:
    """A place for each change of the memory, and a mark for each arm that has the changed part."""
    names = [control for control in CONTROLS if any(control in found for found in costs.values())]
    for number, (run, found) in enumerate(costs.items()):
        marks = [(names.index(control), difference) for control, difference in found.items()]
        draw(axes, marks, offset(number, len(costs)), labels[run], {**looks[run], "linestyle": "none"})
    axes.set_xticks(range(len(names)), [CONTROLS[name] for name in names], fontsize=8)
    axes.set_title("Cost of a changed memory", fontsize=9, loc="left")
    axes.set_ylabel("nats per token", fontsize=9)
    finish(axes, len(names))


def draw_bands(
    axes: Axes,
    groups: Sequence[Mapping[str, Any]],
    others: Sequence[str],
    labels: Mapping[str, str],
    looks: Mapping[str, dict[str, Any]],
) -> None:
    """A place for each band of distances, and a mark for each arm; the last place, for tokens that don't
    repeat, is not connected with the line."""
    for number, run in enumerate(others):
        marks = [(i, g["less_baseline"][run]) for i, g in enumerate(groups) if run in g["less_baseline"]]
        apart = offset(number, len(others))
        last = len(groups) - 1
        draw(axes, [mark for mark in marks if mark[0] < last], apart, labels[run], looks[run])
        draw(axes, [mark for mark in marks if mark[0] == last], apart, "", looks[run])
    axes.axvline(len(groups) - 1.5, color="#bbbbbb", linewidth=0.8)
    names = [fill(group["name"], 12) for group in groups]
    axes.set_xticks(range(len(groups)), names, rotation=45, fontsize=8)
    axes.set_title("Loss of repeats", fontsize=9, loc="left")
    axes.set_xlabel("tokens since the last occurrence", fontsize=9)
    finish(axes, len(groups))


def draw(
    axes: Axes,
    marks: Sequence[tuple[int, Mapping[str, Any]]],
    apart: float,
    label: str,
    look: dict[str, Any],
) -> None:
    """Draw means at their places, with a bar if there is an interval."""
    if not marks:
        return
    x = [place + apart for place, _ in marks]
    means = [difference["mean"] for _, difference in marks]
    halves = [difference["half_width"] or 0.0 for _, difference in marks]
    name = drawn(label) if label else None
    axes.errorbar(x, means, halves, label=name, capsize=2.5, markersize=4.5, linewidth=1.2, **look)


def offset(number: int, count: int) -> float:
    """The offset of the arm with this number from the middle of all arms."""
    return APART * (number - (count - 1) / 2)


def finish(axes: Axes, places: int) -> None:
    """Draw a line at zero, and set the style that both panels share."""
    axes.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xlim(-0.5, places - 0.5)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, axis="y")
