"""The figures of the pages of results: text of 12 pixels, and colours that follow a light or dark page. Blue,
orange and green are no memory, Transformer-XL and the Compressive Transformer, and nothing else; everything
else is black or grey."""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import groupby, product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.building.results import Seeds, about, mean, rows, seeds, stored, verdicts
from docs.building.tables import DISTANCES, MAZES, MODELS, STREAMS, SWAPPED, arms_of, in_slots, of_file
from experiments.mqar import SHORTEST, level_without_association
from memformers.common.intervals import Mean, paired
from memformers.report.plotting import BLUE, GREEN, ORANGE
from memformers.report.rendering import DARK

WIDTH, NARROW = 7.5, 4.6
"""Inches of 96 pixels, so that text of 9 points is 12 pixels high."""
INK, GREY = "#000000", "#666666"
COLOURS = {"transformer": BLUE["color"], "none": BLUE["color"], "transformer-xl": ORANGE["color"],
           "compressive": GREEN["color"], "": GREY, "selective": INK}  # fmt: skip
NAMES = {"transformer": "No memory", "transformer-xl": "Transformer-XL", "compressive": "Compressive"}
STYLE = Path(__file__).with_name("figures.mplstyle")
OF_ROW: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
"""At the left of a panel, and so many points beside a value of its vertical axis."""


def panels(rows: int, columns: int, height: float, width: float = WIDTH, **grid: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def curve(
    axes: Axes, values: Iterable[tuple[float, Mean | None]], arm: str, scale: float = 1, alpha: float = 1
) -> None:
    """A line of means with its band; places without a value are left out."""
    colour, points = COLOURS.get(arm, INK), [(x, y) for x, y in values if y]
    x, y = [at for at, _ in points], [scale * m.mean for _, m in points]
    axes.plot(x, y, color=colour, marker="o", markersize=3, alpha=alpha)
    low, high = ([scale * (m.mean + sign * m.half_width) for _, m in points] for sign in (-1, 1))
    if scale == 100:  # a share
        low, high = [max(v, 0) for v in low], [min(v, 100) for v in high]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def bar(axes: Axes, value: Mean, at: float, arm: str, limits: tuple[float, float], scale: float = 1) -> None:
    """A mean with its interval, which ends at the ``limits``."""
    low, high = (scale * (value.mean + sign * value.half_width) for sign in (-1, 1))
    interval(axes, (max(low, limits[0]), min(high, limits[1])), scale * value.mean, at, arm)


def interval(axes: Axes, ends: tuple[float, float], value: float, at: float, arm: str) -> None:
    colour = COLOURS.get(arm, INK)
    axes.plot(ends, [at, at], color=colour, linewidth=2.5)
    axes.plot(value, at, "o", color=colour, markersize=5)


def names(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def guesses(axes: Axes) -> None:
    axes.axhline(25, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("chance", (0, 25), (2, -9), color=GREY, **OF_ROW)


def key(figure: Figure, arms: Iterable[str], labels: Sequence[str] = ()) -> None:
    """The names of arms in their colours, or other ``labels`` of them, above all panels."""
    arms = [*arms]
    handles = [Line2D([], [], color=COLOURS[arm], marker="o", markersize=4) for arm in arms]
    labels = labels or [NAMES[arm] for arm in arms]
    figure.legend(handles, labels, loc="outside upper center", ncols=len(arms), frameon=False)


def svg(draw: Callable[[], Figure]) -> str:
    """A figure as SVG, the same each time: its colours are variables, which follow a light or dark page, and
    its text is text."""
    file = io.StringIO()
    with matplotlib.rc_context(fname=STYLE):
        figure = draw()
        for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
            patch.set_alpha(0)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<\?xml.*?<svg", "<svg", file.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c\1, #\1)", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    # Names of clips are hashes of sizes that may differ in their last bit.
    names = dict.fromkeys(re.findall(r'id="(p[0-9a-f]{10})"', text))
    text = reduce(lambda text, name: text.replace(name[1], f"clip{name[0]}"), enumerate(names), text)
    dark = "".join(f"--c{light[1:]}:{colour};" for light, colour in DARK.items())
    follows = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    root = 'style="fill: var(--c000000, #000000); font-family: Helvetica, Arial, sans-serif"'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {root} \1>\n {follows}", text, count=1)


def forest() -> Figure:
    """Each verdict with its interval, so that right is better for the Compressive Transformer; narrow enough
    for a telephone."""
    groups = {panel: [*those] for panel, those in groupby(verdicts(), key=lambda verdict: verdict.panel)}
    heights = [len(those) + 0.5 for those in groups.values()]
    figure, all_axes = panels(len(groups), 1, 9.7, NARROW, height_ratios=heights)
    for axes, (panel, those) in zip(all_axes, groups.items(), strict=True):
        scale, unit = (1, "bits per byte or character") if panel.startswith("Text") else (100, "points")
        for i, verdict in enumerate(those):
            bar(axes, verdict.gain, i, verdict.winner, (-scale, scale), scale)
            axes.annotate(verdict.name, (0, i), (2, 7), **OF_ROW)
        axes.axvline(0, color=INK, linewidth=0.8)
        names(axes, [""] * len(those))
        axes.set_ylim(len(those) - 0.5, -0.9)
        if scale == 100:  # so that zero is in the middle
            end = max(map(abs, axes.get_xlim()))
            axes.set_xlim(-end, end)
        axes.set_title(f"{panel}, in {unit}")
    figure.supxlabel("← Transformer-XL is better\u2003\u2003Compressive is better →", fontsize=9)
    labels = ("Compressive", "Transformer-XL", "no clear difference")
    key(figure, ("compressive", "transformer-xl", ""), labels)
    return figure


def by_distance(experiment: str, bins_of: str, arm: str, measure: str) -> list[tuple[float, Mean | None]]:
    """The shares of correct answers in the middle of each of the bins that an experiment has."""
    bins = {(int(row["from"]), int(row["to"])): None for row in rows(bins_of) if row["accuracy"]}
    return [
        ((low + high) / 2, mean(seeds(experiment, arm, measure.format(low=low, high=high))))
        for low, high in bins
    ]


def reach() -> Figure:
    figure, all_axes = panels(1, 3, 2.9, sharey=True)
    networks = (("2 layers: slots lead from 256", "recall_two_layers", 768),
                ("3 layers: from 384", "recall_three_layers", 768),
                ("2 layers, 256 keys: from 512", "recall_far", 2304))  # fmt: skip
    for axes, (title, experiment, end) in zip(all_axes, networks, strict=True):
        for arm in MODELS:
            points = by_distance(experiment, experiment, arm, "correct, {low} – {high}")
            curve(axes, [(x, y) for x, y in points if x <= end], arm, scale=100)
        guesses(axes)
        axes.set(ylim=(0, 101), xlim=(0, end), title=title)
        axes.set_xticks(range(0, end, end // 3), [f"{x:,}" for x in range(0, end, end // 3)])
    all_axes[0].set_ylabel("correct answers, %")
    all_axes[1].set_xlabel("tokens since the value was set")
    key(figure, MODELS)
    return figure


def mqar() -> Figure:
    """Answers by the bytes of a memory; pale: without a token shift."""
    figure, axes = panels(1, 1, 3.0)
    kinds = {
        "none": "none",
        "xl": "transformer-xl",
        "conv": "compressive",
        "mean": "",
        "selective": "selective",
    }
    for (kind, arm), pale in product(kinds.items(), (False, True)):
        of = [x for x in arms_of("mqar") if x["arm"].startswith(kind) and ("shift" not in x["arm"]) == pale]
        size = [about("mqar")["arms"][x["label"]]["state per stream"] / 1024 for x in of]
        shares = [mean(seeds("mqar", x["arm"], "correct")) for x in of]
        curve(axes, sorted(zip(size, shares, strict=True)), arm, 100, 0.3 if pale else 1)
    level = 100 * level_without_association(SHORTEST)
    axes.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("without association", (0, level), (30, 4), color=GREY, **OF_ROW)
    axes.set(ylim=(0, 101), ylabel="correct answers, %")
    axes.set_xlabel("KiB that a memory keeps for each stream (pale: without token shift)")
    key(figure, kinds.values(), ("No memory", "Transformer-XL", "Compressive", "means", "selective"))
    return figure


def slots() -> Figure:
    figure, all_axes = panels(1, 2, 3.0, sharey=True)
    titles = ("after 3 million tokens (three seeds)", "after 12 million tokens (one seed)")
    for axes, title in zip(all_axes, titles, strict=True):
        for shift, arm in ((-0.06, "transformer-xl"), (0.06, "compressive")):
            for i, (_, bits) in enumerate(STREAMS):
                value = mean(in_slots(arm, i, longer=title == titles[1]))
                if value is None:
                    continue
                low, high = max(value.mean - value.half_width, 0), min(value.mean + value.half_width, 1)
                if value.n > 1:
                    axes.plot([bits + shift] * 2, [100 * low, 100 * high], color=COLOURS[arm], linewidth=2)
                axes.plot(bits + shift, 100 * value.mean, "o", color=COLOURS[arm], markersize=5)
        axes.set(ylim=(0, 102), title=title, xlim=(1, 6.5))
        axes.set_xlabel("bits that a four-token slot must hold")
    all_axes[0].set_ylabel("correct beyond chance, %")
    key(figure, MODELS)
    return figure


def long_text() -> Figure:
    """What memories save by the budget of the training, and by how far back a word last began."""
    figure, (left, right) = panels(1, 2, 3.0)
    budgets = (400_000, 1_600_000, 6_400_000)
    for arm, like in (("xl-256", "transformer-xl"), ("slots-64-192", "compressive")):

        def saved(measure: str, arm: str = arm) -> Mean | None:
            return paired(seeds("text", "none", measure), seeds("text", arm, measure))

        curve(left, [(tokens, saved(f"bits per byte, {tokens:,} tokens")) for tokens in budgets], like)
        curve(right, [(i, saved(d)) for i, d in enumerate(DISTANCES)], like)
    left.set(xscale="log", title="over the whole text", ylabel="bits per byte saved")
    left.set_xlabel("training tokens, millions")
    left.set_xticks(budgets, ["0.4", "1.6", "6.4"])
    left.minorticks_off()
    right.set(title="by distance, after 6.4 million", ylabel="nats per token saved")
    right.set_xlabel("tokens since the word last began")
    right.set_xticks(range(len(DISTANCES)), [d.split(" ")[0] for d in DISTANCES])
    for axes in (left, right):
        axes.axhline(0, color=GREY, linewidth=0.8)
    key(figure, MODELS, ["Transformer-XL, 256 positions", "Compressive, 64 positions and 192 slots"])
    return figure


def tiny_shakespeare() -> Figure:
    figure, (left, right) = panels(1, 2, 3.0)
    of = "tiny_shakespeare"
    for arm in NAMES:
        measures = [row["measure"] for row in rows(of) if row["arm"] == arm]
        after = (re.fullmatch(r"curve: bits per character after (\d+) tokens", name) for name in measures)
        curve(left, [(int(name[1]) / 1e6, stored(of, arm, name[0])) for name in after if name], arm)
    left.set(xlabel="training tokens, millions", ylabel="bits per character", title="held-out loss")
    shown = (("transformer-xl", "memory", "Transformer-XL: positions"),
             ("compressive", "memory", "Compressive: positions"),
             ("compressive", "compressed memory", "Compressive: slots"))  # fmt: skip
    for i, (arm, part, _) in enumerate(shown):
        if rise := stored(of, arm, SWAPPED, f"{part} swapped"):
            bar(right, rise, i, arm, (-1, 1))
    names(right, [label for *_, label in shown])
    right.axvline(0, color=INK, linewidth=0.8)
    right.set(title="cost of another stream's memory", xlabel="nats per token")
    key(figure, NAMES)
    return figure


def compression() -> Figure:
    figure, axes = panels(1, 1, 3.2)
    arms = arms_of("compression")
    for i, arm in enumerate(row["arm"] for row in arms):
        if value := mean(seeds("ablation", arm, "answers about values set 192 to 384 tokens ago")):
            bar(axes, value, i, arm if arm == "transformer-xl" else "compressive", (0, 100), 100)
    names(axes, [arm["shown"].partition(" (removed")[0] for arm in arms])
    axes.axvline(25, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("chance", (25, 0), (3, 0), textcoords="offset points", color=GREY, va="center")
    axes.set(xlim=(0, 100), xlabel="correct answers about values that are only in slots, %")
    return figure


def agents() -> Figure:
    figure, all_axes = panels(1, 4, 3.0, sharey=True)
    for axes, arm in zip(all_axes, arms_of("agents")[:4], strict=True):
        by_maze: list[Seeds] = [seeds("agents", arm["arm"], maze) for maze in MAZES]
        for seed in by_maze[0]:
            style: Any = {"color": COLOURS.get(arm["arm"], INK), "markersize": 4, "linewidth": 0.8}
            axes.plot(range(3), [100 * solved[seed] for solved in by_maze], "o-", alpha=0.8, **style)
        axes.axhline(50, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(ylim=(0, 102), xlim=(-0.3, 2.3), title=arm["shown"])
        axes.set_xticks(range(3), [maze.removeprefix("t-maze-") for maze in MAZES])
    all_axes[0].set_ylabel("episodes solved, %")
    figure.supxlabel("corridor length, steps (one dot per seed; dotted: chance)", fontsize=9)
    return figure


def memories() -> Figure:
    figure, all_axes = panels(2, 3, 4.4, sharex=True, sharey=True)
    for axes, arm in zip(all_axes.flat, arms_of("memories"), strict=True):
        for name in ("transformer-xl", arm["arm"]):
            measure = "recall, set {low} to {high} tokens ago"
            points = by_distance("memories", "recall_two_layers", name, measure)
            curve(axes, points, name, scale=100, alpha=1.0 if name == arm["arm"] else 0.35)
        guesses(axes)
        axes.set(ylim=(0, 101), title=arm["label"])
    figure.supxlabel("tokens since the value was set (pale: Transformer-XL)", fontsize=9)
    figure.supylabel("correct answers, %", fontsize=9)
    return figure


def speed() -> Figure:
    figure, axes = panels(1, 1, 2.8)
    lines = of_file("experiments/benchmarks/RESULTS.md", "1").splitlines()[2:]
    table = [[cell.strip() for cell in line.split("|")[1:6]] for line in lines]
    cases = [*dict.fromkeys(row[0] for row in table)]
    for case, model, *_, ratios in table:
        ratio, low, high = map(float, re.findall(r"\d+\.\d+", ratios))
        at = cases.index(case) + (0.15 if model == "compressive" else -0.15)
        interval(axes, (low, high), ratio, at, model)
    names(axes, cases)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xlim=(0, 3.1), xlabel="times as fast as labml-nn (lines: quartiles)")
    key(figure, MODELS)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "verdicts": forest, "reach": reach, "mqar": mqar, "slots": slots, "long_text": long_text,
    "agents": agents, "tiny_shakespeare": tiny_shakespeare, "compression": compression, "memories": memories,
    "speed": speed,
}  # fmt: skip
