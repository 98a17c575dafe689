"""The figures of a probe: what context and memory are worth, and where attention goes, as Markdown with their
captions."""

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.markdown import prose

Measured = Mapping[str, Any]
"""The measurements in ``probe.json``, or a part of them."""
GAIN_BELOW = 0.01


def gains_figure(
    context: Measured, labels: Mapping[str, str], looks: Mapping[str, plotting.Look], folder: Path
) -> str:
    """The gain of each context over the previous one, over all tokens, with its interval; ``labels`` and
    ``looks`` have the runs' names as keys, as in the other figures of a probe."""
    figure, [axes] = plotting.panels([2.7])
    step, many = context["step"], []
    for run, gains in context["gains"]["1.0"].items():
        ends = zip(gains, context["gain_intervals"]["1.0"][run], strict=True)
        bars = [(max(gain - low, 0.0), max(high - gain, 0.0)) for gain, (low, high) in ends]
        points = [(step * (i + 1.0), Mean(gain, math.nan, 1)) for i, gain in enumerate(gains)]
        many.append(plotting.Series(labels[run], points, looks[run], bars, scale=100))
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
COLORS = [look["color"] for look in plotting.PALETTE]
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Lines of layers; no two of the first 35 layers have the same colour and line."""


def attention_figure(attention: Measured, labels: Mapping[str, str], folder: Path) -> str:
    """The attention of each model by place and by distance, in two panels."""
    figure, places = plotting.panels([1.8] * len(attention), width=9.0, columns=2)
    for number, (run, mass) in enumerate(attention.items()):
        draw_places(places[2 * number], mass, labels[run])
        draw_distances(places[2 * number + 1], mass)
    layers = max(len(mass["by_distance"]) for mass in attention.values())
    handles = [
        *(Patch(**look, edgecolor="white", label=place) for place, look in PLACES.items()),
        *(Line2D([], [], **layer_look(i), label=f"layer {i + 1}") for i in range(layers)),
    ]
    plotting.legend(figure, handles, columns=6)
    title = "Attention by place and by distance, for each layer"
    return plotting.save_figure(figure, folder, "attention", title, prose("attention"))


def layer_look(number: int) -> plotting.Look:
    """A layer's colour and line."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": LINES[number % len(LINES)], "linewidth": 1.5}


def draw_places(axes: Axes, mass: Measured, label: str) -> None:
    """Stacked bars: layers side by side, the heads of each together."""
    heads, layers = len(mass["by_place"][0]), len(mass["by_place"])
    at = [layer * (heads + 1) + head for layer in range(layers) for head in range(heads)]
    bottom = [0.0] * len(at)
    for i, look in enumerate(PLACES.values()):
        shares = [100 * head[i] for layer in mass["by_place"] for head in layer]
        if any(shares):
            axes.bar(at, shares, bottom=bottom, width=0.9, edgecolor="white", linewidth=0.3, **look)
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
        axes.plot(middles, mean, **layer_look(number))
    plotting.style(axes, "distance (tokens)", "attention in\nthe octave (%)")
    plotting.octave_axis(axes, middles[:1] + mass["nearest"][1::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x < 1 else plotting.thousands(x)))
    axes.set_ylim(bottom=0)


CONTROLS = ("memory zeroed", "memory swapped", "slots zeroed", "slots swapped")


def memory_ablation_figure(
    ablation: Measured, labels: Mapping[str, str], looks: Mapping[str, plotting.Look], folder: Path
) -> list[str]:
    """The costs of changed memories, and the loss of repeats minus that of the baseline; nothing if there is
    neither a memory nor a second arm."""
    costs = {run: found for run, found in ablation["overall"]["less_untouched"].items() if found}
    baseline, groups = ablation["baseline"], ablation["by_repeat_distance"]
    others = [run for run in ablation["overall"]["loss"] if baseline and run != baseline]
    if not costs and not others:
        return []
    figure, places = plotting.panels([2.6] * bool(costs) + [3.4] * bool(others))
    if costs:
        names = [control for control in CONTROLS if any(control in found for found in costs.values())]
        many = [
            plotting.Series(
                labels[run],
                [(names.index(control), Mean.from_json(cost)) for control, cost in found.items()],
                looks[run] | {"linestyle": "none"},
            )
            for run, found in costs.items()
        ]
        plotting.draw_marks(places[0], many, plotting.APART)
        plotting.style(places[0], "", "bits per character", "Cost of a changed memory")
        shown = [name.replace("slots", "compressed").replace(" ", "\n") for name in names]
        plotting.categories(places[0], shown)
    if others:
        many = []
        for run in others:
            known = [i for i, group in enumerate(groups) if run in group["less_baseline"]]
            points = [(float(i), Mean.from_json(groups[i]["less_baseline"][run])) for i in known]
            points.append((len(groups) - 1.5, Mean(math.nan, math.nan, 0)))  # before tokens that don't repeat
            points.sort(key=itemgetter(0))
            many.append(plotting.Series(labels[run], points, looks[run]))
        plotting.draw_marks(places[-1], many, plotting.APART)
        plotting.mark(places[-1], [len(groups) - 1.5])
        against = f"bits per character, minus\n{labels[baseline]}"
        plotting.style(places[-1], "tokens since the last occurrence", against, "Loss of repeats")
        plotting.categories(places[-1], [fill(group["name"], 12) for group in groups], rotation=45)
    for axes in places:
        axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    base = labels[baseline] if others else ""
    title = "Cost of a changed memory, and loss by the distance of repeats"
    caption = prose("memory_ablation", has_costs=bool(costs), base=base)
    return [plotting.save_figure(figure, folder, "memory_ablation", title, caption)]
