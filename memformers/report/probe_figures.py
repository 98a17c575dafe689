"""The figures of a probe: what context gains, what memory is worth, and where attention falls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from memformers.report.curves import drawn
from memformers.report.figures import finish, save, thousands
from memformers.report.worth_figure import save_worth

PLACES = {"compressed memory": "#009E73", "memory": "#D55E00", "segment": "#0072B2"}
"""In order of time, with their colours."""
GAIN_BELOW = 0.01
CAPTIONS = {
    "effective_context": "What a longer context gains: relative fall in perplexity from one context "
    "length to the next, over the best that any of these models makes of the shorter one. Where a curve "
    "first falls below 1 % is that model's relative effective context length.",
    "attention": "Where attention falls, with full memories: left, the parts on compressed memory, memory "
    "and segment, a bar for each head of each layer; right, by distance in octaves, thin for each head, "
    "thick for each layer's mean.",
}


def save_probe_figures(
    probe: Mapping[str, Any], labels: Mapping[str, str], looks: Mapping[str, dict[str, Any]], folder: Path
) -> dict[str, Path]:
    """Draw a probe into ``folder``: paths by name. ``labels`` and ``looks`` are by the runs' names."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    if context := probe["effective_context"]:
        paths["effective_context"] = save_gains(context, labels, looks, folder)
    if attention := probe["attention"]:
        paths["attention"] = save_attention(attention, labels, folder)
    if worth := probe.get("worth"):
        paths |= save_worth(worth, labels, looks, folder)
    return paths


def save_gains(
    context: Mapping[str, Any], labels: Mapping[str, str], looks: Mapping[str, dict[str, Any]], folder: Path
) -> Path:
    """The gain of each context over the one before, over all tokens."""
    figure = Figure(figsize=(6.4, 4.0), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for run, gains in context["gains"]["1.0"].items():
        lengths = [context["step"] * (i + 1) for i in range(len(gains))]
        axes.plot(lengths, [100 * gain for gain in gains], label=drawn(labels[run]), **looks[run])
    axes.axhline(100 * GAIN_BELOW, color="#888888", linewidth=0.8)
    axes.set(
        xlabel="context (tokens)",
        ylabel=f"gain of {context['step']} tokens more (% of perplexity)",
    )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 4, 8, 10], integer=True))
    finish(axes)
    path = folder / "effective_context.png"
    save(figure, path)
    return path


def save_attention(attention: Mapping[str, Any], labels: Mapping[str, str], folder: Path) -> Path:
    """A row of two panels for each model."""
    figure = Figure(figsize=(9.0, 2.6 * len(attention)), dpi=160, layout="constrained")
    panels = figure.subplots(len(attention), 2, squeeze=False)
    for (run, mass), (left, right) in zip(attention.items(), panels, strict=True):
        by_place(left, mass)
        by_distance(right, mass)
        left.set_title(drawn(labels[run]), loc="left", fontsize="medium")
    patches = [Patch(color=color, label=place) for place, color in PLACES.items()]
    figure.legend(handles=patches, frameon=False, ncols=3, loc="outside upper left")
    path = folder / "attention.png"
    save(figure, path)
    return path


def by_place(axes: Axes, mass: Mapping[str, Any]) -> None:
    """Stacked bars: layers side by side, the heads of each together."""
    heads = len(mass["by_place"][0])
    at = [layer * (heads + 1) + head for layer in range(len(mass["by_place"])) for head in range(heads)]
    bottom = [0.0] * len(at)
    for i, color in enumerate(PLACES.values()):
        parts = [100 * head[i] for layer in mass["by_place"] for head in layer]
        if any(parts):
            axes.bar(at, parts, bottom=bottom, width=0.9, color=color)
        bottom = [b + p for b, p in zip(bottom, parts, strict=True)]
    axes.set_xticks([layer * (heads + 1) + (heads - 1) / 2 for layer in range(len(mass["by_place"]))])
    axes.set_xticklabels([f"layer {layer + 1}" for layer in range(len(mass["by_place"]))])
    axes.set(ylabel="attention (%)", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)


def by_distance(axes: Axes, mass: Mapping[str, Any]) -> None:
    """Attention in each octave of distances; distance 0 is drawn at ½."""
    middles = [0.5] + [2**0.5 * near for near in mass["nearest"][1:]]
    for number, layer in enumerate(mass["by_distance"]):
        color = f"C{number}"
        for head in layer:
            axes.plot(middles, [100 * part for part in head], color=color, alpha=0.35, linewidth=0.7)
        mean = [100 * sum(parts) / len(layer) for parts in zip(*layer, strict=True)]
        axes.plot(middles, mean, color=color, linewidth=2.0, label=f"layer {number + 1}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(middles[:1] + mass["nearest"][1::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x < 1 else thousands(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="distance (tokens)", ylabel="attention in the octave (%)")
    axes.set_ylim(bottom=0)
    finish(axes)
