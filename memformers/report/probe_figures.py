"""The figures of a probe: how much context and memory help, and where attention goes, as Markdown with their
captions. Models are named by their runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure
from memformers.report.markdown import prose

Measured = Mapping[str, Any]
"""The measurements in ``probe.json``, or a part of them."""
OfRuns = Mapping[str, ArmRuns]
"""The arm of each run."""
PARTS = {"slots": "compressed memory", "memory": "memory"}
"""The names of the parts of a memory in a report."""
CONTROLS = ("slots zeroed", "slots swapped", "memory zeroed", "memory swapped")
GAIN_BELOW = 0.01


def lines_of(of_runs: OfRuns) -> dict[str, plotting.LineStyle]:
    """The line of each run."""
    lines = plotting.line_styles([arm.name for arm in of_runs.values()])
    return {run: lines[arm.name] for run, arm in of_runs.items()}


def gains_figure(context: Measured, of_runs: OfRuns, folder: Path) -> str:
    """The gain of each context over the previous one, over all tokens, with its interval."""
    figure, [axes] = plotting.panels([2.7])
    step, many, lines = context["step"], [], lines_of(of_runs)
    for run, gains in context["gains"]["1.0"].items():
        ends = zip(gains, context["gain_intervals"]["1.0"][run], strict=True)
        bars = [(max(gain - low, 0.0), max(high - gain, 0.0)) for gain, (low, high) in ends]
        points = [(step * (i + 1.0), Mean(gain, math.nan, 1)) for i, gain in enumerate(gains)]
        many.append(plotting.Series(of_runs[run].label, points, lines[run], bars, scale=100))
    plotting.draw_marks(axes, many, apart=0.1 * step)  # so that bars don't hide each other
    axes.axhline(100 * GAIN_BELOW, color=plotting.GREY, linewidth=0.8)
    y = f"gain of {step} more tokens (% of perplexity)"
    plotting.style(axes, "context (tokens)", y, "all tokens (r = 1.0)")
    axes.set_ylim(bottom=0)
    ticks = sorted({at for series in many for at, _ in series.points})
    axes.set_xticks(ticks[:: -(-len(ticks) // 8)] if ticks else [])
    title = "Gain of a longer context against the length of the context"
    return plotting.save_figure(figure, folder, "effective_context", title, prose("gains"))


PLACES: dict[str, dict[str, Any]] = {
    "compressed memory": {"facecolor": "#009E73", "hatch": "////"},
    "memory": {"facecolor": "#E69F00", "hatch": ""},
    "segment": {"facecolor": "#0072B2", "hatch": ".."},
}
"""The parts of the keys in order of time, with their colours, and patterns for print without colour."""
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Lines of layers; no two of the first 35 layers have the same colour and line."""


def attention_figure(attention: Measured, of_runs: OfRuns, folder: Path) -> str:
    """The attention of each model by place and by distance, in two panels."""
    figure, places = plotting.panels([1.8] * len(attention), width=9.0, columns=2)
    for left, right, (run, mass) in zip(places[::2], places[1::2], attention.items(), strict=True):
        draw_places(left, mass, of_runs[run].label)
        draw_distances(right, mass)
    layers = max(len(mass["by_distance"]) for mass in attention.values())
    handles = [
        *(Patch(**style, edgecolor="white", label=place) for place, style in PLACES.items()),
        *(Line2D([], [], **line_of_layer(i), label=f"layer {i + 1}") for i in range(layers)),
    ]
    plotting.legend(figure, handles, columns=6)
    title = "Attention by place and by distance, for each layer"
    return plotting.save_figure(figure, folder, "attention", title, prose("attention"))


def line_of_layer(number: int) -> plotting.LineStyle:
    """A layer's colour and line."""
    color = plotting.PALETTE[number % len(plotting.PALETTE)]["color"]
    return {"color": color, "linestyle": LINES[number % len(LINES)], "linewidth": 1.5}


def draw_places(axes: Axes, mass: Measured, label: str) -> None:
    """Stacked bars: layers side by side, the heads of each together."""
    heads, layers = len(mass["by_place"][0]), len(mass["by_place"])
    at = [layer * (heads + 1) + head for layer in range(layers) for head in range(heads)]
    bottom = [0.0] * len(at)
    for i, style in enumerate(PLACES.values()):
        shares = [100 * head[i] for layer in mass["by_place"] for head in layer]
        if any(shares):
            axes.bar(at, shares, bottom=bottom, width=0.9, edgecolor="white", linewidth=0.3, **style)
        bottom = [b + share for b, share in zip(bottom, shares, strict=True)]
    plotting.style(axes, "layer", "attention (%)", label)
    axes.grid(visible=False)
    shown = range(0, layers, -(-layers // 12))
    axes.set_xticks([layer * (heads + 1) + (heads - 1) / 2 for layer in shown], [f"{n + 1}" for n in shown])
    axes.set_ylim(0, 100)


def draw_distances(axes: Axes, mass: Measured) -> None:
    """Each layer's mean attention in each octave of distances; distance 0 is drawn at ½."""
    middles = [0.5] + [2**0.5 * near for near in mass["nearest"][1:]]
    for number, layer in enumerate(mass["by_distance"]):
        mean = [100 * sum(parts) / len(layer) for parts in zip(*layer, strict=True)]
        axes.plot(middles, mean, **line_of_layer(number))
    plotting.style(axes, "distance (tokens)", "attention in\nthe octave (%)")
    plotting.octave_axis(axes, middles[:1] + mass["nearest"][1::2])
    axes.xaxis.set_major_formatter(lambda x, _: "0" if x < 1 else plotting.thousands(x))
    axes.set_ylim(bottom=0)


def memory_ablation_figure(ablation: Measured, of_runs: OfRuns, measure: Measure, folder: Path) -> list[str]:
    """The costs of changed memories, and the loss of repeats minus that of the baseline; nothing if there is
    neither a memory nor a second arm."""
    costs = {run: found for run, found in ablation["overall"]["less_untouched"].items() if found}
    baseline, groups = ablation["baseline"], ablation["by_repeat_distance"]
    others = [run for run in ablation["overall"]["loss"] if baseline and run != baseline]
    if not costs and not others:
        return []
    figure, places = plotting.panels([2.6] * bool(costs) + [3.4] * bool(others))
    lines = lines_of(of_runs)

    def draw(axes: Axes, points: Mapping[str, list[tuple[float, Mean]]], **style: Any) -> None:
        many = [
            plotting.Series(of_runs[run].label, of, lines[run] | style, scale=measure.scale)
            for run, of in points.items()
        ]
        plotting.draw_marks(axes, many, plotting.APART)
        axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)

    if costs:
        names = [c for c in (*CONTROLS[2:], *CONTROLS[:2]) if any(c in found for found in costs.values())]
        found = {
            run: [(float(names.index(control)), Mean.from_json(cost)) for control, cost in of.items()]
            for run, of in costs.items()
        }
        draw(places[0], found, linestyle="none")
        plotting.style(places[0], "", "bits per character", "Cost of a changed memory")
        plotting.categories(places[0], [n.replace("slots", "compressed").replace(" ", "\n") for n in names])
    if others:
        gap = len(groups) - 1.5  # before tokens that don't repeat
        found = {run: [(gap, Mean(math.nan, math.nan, 0))] for run in others}
        for run, points in found.items():
            less = ((i, group["less_baseline"].get(run)) for i, group in enumerate(groups))
            points += [(float(i), Mean.from_json(of)) for i, of in less if of]
            points.sort(key=lambda point: point[0])
        draw(places[-1], found)
        plotting.mark(places[-1], [gap])
        against = f"bits per character, minus\n{of_runs[baseline].label}"
        plotting.style(places[-1], "tokens since the last occurrence", against, "Loss of repeats")
        plotting.categories(places[-1], [fill(group["name"], 12) for group in groups], rotation=45)
    title = "Cost of a changed memory, and loss by the distance of repeats"
    base = of_runs[baseline].label if others else ""
    caption = prose("memory_ablation", has_costs=bool(costs), base=base)
    return [plotting.save_figure(figure, folder, "memory_ablation", title, caption)]
