"""The figures of a probe: the gain of context, the worth of memory, and the distribution of attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memformers.report.attention_figure import save_attention
from memformers.report.curves import FEWEST_FOR_A_LINE, drawn
from memformers.report.figures import DOTS, WIDTH, finish, legend, save_with_data
from memformers.report.memory_ablation_figure import save_memory_ablation

GAIN_BELOW = 0.01
TITLES = {
    "effective_context": "Gain of a longer context against the length of the context",
    "attention": "Attention by place and by distance, for each layer",
}
CAPTIONS = {
    "effective_context": "The gain of a longer context, over all tokens (r = 1.0): the relative fall of "
    "perplexity from one context length to the next, compared with the best prediction that any of these "
    "models makes from the shorter context. The relative effective context length of a model is the context "
    "at which its curve first falls below 1 %, the grey line.",
    "attention": "The distribution of attention, with full memories. The first panel of each model shows the "
    "shares of compressed memory, memory and segment, with a bar for each head of each layer. The second "
    "panel shows each layer's mean over its heads, by distance in octaves; the data of the figure has each "
    "head.",
}


def save_probe_figures(
    probe: Mapping[str, Any], labels: Mapping[str, str], looks: Mapping[str, dict[str, Any]], folder: Path
) -> dict[str, Path]:
    """Draw a probe into ``folder``; returns paths by name. ``labels`` and ``looks`` have the runs' names as
    keys."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    if context := probe["effective_context"]:
        paths["effective_context"] = save_gains(context, labels, looks, folder)
    if attention := probe["attention"]:
        paths["attention"] = save_attention(attention, labels, folder)
    if memory_ablation := probe.get("memory_ablation"):
        paths |= save_memory_ablation(memory_ablation, labels, looks, folder)
    return paths


def save_gains(
    context: Mapping[str, Any], labels: Mapping[str, str], looks: Mapping[str, dict[str, Any]], folder: Path
) -> Path:
    """The gain of each context over the previous one, over all tokens, with its interval, which probes of
    older versions don't have."""
    figure = Figure(figsize=(WIDTH, 3.3), dpi=DOTS, layout="constrained")
    axes, rows = figure.add_subplot(), []
    intervals = context.get("gain_intervals", {}).get("1.0", {})
    runs = context["gains"]["1.0"]
    for number, (run, gains) in enumerate(runs.items()):
        apart = 0.1 * context["step"] * (number - (len(runs) - 1) / 2)  # so that bars don't hide each other
        lengths = [context["step"] * (i + 1) for i in range(len(gains))]
        ends = intervals.get(run, [])
        look = {"markersize": 4.0, "linewidth": 1.3, **looks[run]}
        if len(gains) < FEWEST_FOR_A_LINE:
            look["linestyle"] = "none"
        bars = [
            [100 * max(g - low, 0.0), 100 * max(high - g, 0.0)]
            for g, (low, high) in zip(gains, ends, strict=False)
        ]
        axes.errorbar(
            [length + apart for length in lengths],
            [100 * gain for gain in gains],
            list(zip(*bars, strict=True)) or None,
            label=drawn(labels[run]),
            capsize=2.5,
            **look,
        )
        for i, length in enumerate(lengths):
            rows.append([labels[run], length, gains[i], *(ends[i] if ends else (None, None))])
    axes.axhline(100 * GAIN_BELOW, color="#888888", linewidth=0.8)
    finish(axes, "context (tokens)", f"gain of {context['step']} more tokens (% of perplexity)")
    axes.set_title("all tokens (r = 1.0)", fontsize=9, loc="left")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 4, 8, 10], integer=True))
    legend(figure, [axes])
    path = folder / "effective_context.png"
    head = ["arm", "context (tokens)", "gain", "95 % interval from", "to"]
    save_with_data(figure, path, head, rows)
    return path
