"""The figures of the pages of results: text of 12 pixels, and colours that follow a light or dark page. Blue,
orange and green are no memory, Transformer-XL and the Compressive Transformer, and nothing else; everything
else is black or grey."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from docs.building.results import Seeds, Verdict, about, experiments, mean, rows, seeds, stored, verdicts
from docs.building.svg import INK
from docs.building.tables import of_file
from docs.building.tables.comparisons import MAZES, PER_CHARACTER, arms_of
from docs.building.tables.memories import BEYOND_A_LAYER, TEXTS
from docs.building.tables.recall import MODELS, STREAMS, in_slots
from docs.building.tables.texts import DISTANCES, SWAPPED
from experiments.memories import ALL_MEMORIES
from experiments.mqar import SHORTEST, level_without_association
from memformers.common.intervals import Mean, paired
from memformers.report.plotting import BLUE, GREEN, ORANGE

WIDTH = 7.5
"""Inches of 96 pixels, so that text of 9 points is 12 pixels high."""
NARROW = 4.6
"""Of a figure that fits a telephone."""
GREY = "#666666"
COLOURS = {"transformer": BLUE["color"], "none": BLUE["color"], "transformer-xl": ORANGE["color"],
           "compressive": GREEN["color"], "": GREY, "selective": INK}  # fmt: skip
NAMES = {"transformer": "No memory", "transformer-xl": "Transformer-XL", "compressive": "Compressive"}
COLOUR_OF_MEMORY = {"no-memory": "none", "compressive-transformer": "compressive"}
"""The arms in ``COLOURS`` of the memories that have their own colour."""
LABEL_WIDTH = 27
"""The characters of a line of a verdict's label: half of a narrow figure."""
FOREST_HEIGHT = 11.4
"""Inches, so that two lines of a label fit a row."""
OF_ROW: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
"""At the left of a panel, and so many points beside a value of its vertical axis."""


def panels(rows: int, columns: int, height: float, width: float = WIDTH, **grid: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def curve(
    axes: Axes, values: Iterable[tuple[float, Mean | None]], arm: str, scale: float = 1, alpha: float = 1
) -> None:
    """A line of means with its band; places without a value are left out."""
    colour = COLOURS.get(arm, INK)
    x = []
    y = []
    low = []
    high = []
    for position, value in values:
        if value:
            x.append(position)
            y.append(scale * value.mean)
            low.append(scale * (value.mean - value.half_width))
            high.append(scale * (value.mean + value.half_width))
    axes.plot(x, y, color=colour, marker="o", markersize=3, alpha=alpha)
    if scale == 100:  # a share
        low, high = np.clip([low, high], 0, 100)
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def bar(axes: Axes, value: Mean, row: float, arm: str, limits: tuple[float, float], scale: float = 1) -> None:
    """A mean with its interval, which ends at the ``limits``."""
    low = scale * (value.mean - value.half_width)
    high = scale * (value.mean + value.half_width)
    interval(axes, (max(low, limits[0]), min(high, limits[1])), scale * value.mean, row, arm)


def interval(axes: Axes, ends: tuple[float, float], value: float, row: float, arm: str) -> None:
    colour = COLOURS.get(arm, INK)
    axes.plot(ends, [row, row], color=colour, linewidth=2.5)
    axes.plot(value, row, "o", color=colour, markersize=5)


def names(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def guesses(axes: Axes) -> None:
    axes.axhline(25, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("chance", (0, 25), (2, -9), color=GREY, **OF_ROW)


def key(
    figure: Figure, arms: Iterable[str], labels: Sequence[str] = (), n_columns: int | None = None
) -> None:
    """The names of arms in their colours, or other ``labels`` of them, above all panels."""
    handles = []
    arm_names = []
    for arm in arms:
        handles.append(Line2D([], [], color=COLOURS[arm], marker="o", markersize=4))
        arm_names.append(NAMES.get(arm, ""))
    n_columns = n_columns or len(handles)
    figure.legend(handles, labels or arm_names, loc="outside upper center", ncols=n_columns, frameon=False)


# Figures


def forest() -> Figure:
    """Each verdict with its interval, so that right is better for the Compressive Transformer; narrow enough
    for a telephone."""
    by_panel: dict[str, list[Verdict]] = {}
    for verdict in verdicts():
        by_panel.setdefault(verdict.panel, []).append(verdict)
    heights = [len(of_panel) + 1.2 for of_panel in by_panel.values()]
    figure, all_axes = panels(len(by_panel), 1, FOREST_HEIGHT, NARROW, height_ratios=heights)
    # A panel for each kind of task, as high as it has verdicts
    for axes, (panel, of_panel) in zip(all_axes, by_panel.items(), strict=True):
        is_text = panel.startswith("Text")
        scale = 1 if is_text else 100
        for row, verdict in enumerate(of_panel):
            bar(axes, verdict.gain, row, verdict.winner, (-scale, scale), scale)
        axes.axvline(0, color=INK, linewidth=0.8)
        # The label of an interval stands on its row.
        names(axes, [fill(verdict.name, LABEL_WIDTH) for verdict in of_panel])
        axes.set_ylim(len(of_panel) - 0.4, -0.6)
        if not is_text:  # so that zero is in the middle
            end = max(map(abs, axes.get_xlim()))
            axes.set_xlim(-end, end)
        unit = "bits per byte or character" if is_text else "points"
        axes.set_title(f"{panel}, in {unit}", loc="right")
    figure.supxlabel("← Transformer-XL is better\u2003\u2003Compressive is better →", fontsize=9)
    labels = ("Compressive", "Transformer-XL", "no clear difference")
    key(figure, ("compressive", "transformer-xl", ""), labels)
    return figure


def by_distance(experiment: str, bins_of: str, arm: str, measure: str) -> list[tuple[float, Mean | None]]:
    """The shares of correct answers in the middle of each of the bins that an experiment has."""
    shares: dict[float, Mean | None] = {}
    for row in rows(bins_of):
        low = int(row["from"])
        high = int(row["to"])
        middle = (low + high) / 2
        if row["accuracy"] and middle not in shares:
            shares[middle] = mean(seeds(experiment, arm, measure.format(low=low, high=high)))
    return list(shares.items())


def reach() -> Figure:
    figure, all_axes = panels(1, 3, 2.9, sharey=True)
    networks = (("2 layers: slots lead from 256", "recall_two_layers", 768),
                ("3 layers: from 384", "recall_three_layers", 768),
                ("2 layers, 256 keys: from 512", "recall_far", 2304))  # fmt: skip
    for axes, (title, experiment, end) in zip(all_axes, networks, strict=True):
        for arm in MODELS:
            points = by_distance(experiment, experiment, arm, "correct, {low} – {high}")
            curve(axes, [point for point in points if point[0] <= end], arm, scale=100)
        guesses(axes)
        axes.set(ylim=(0, 101), xlim=(0, end), title=title)
        ticks = range(0, end, end // 3)
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
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
    for (kind, model), is_pale in product(kinds.items(), (False, True)):
        points = []
        for row in arms_of("mqar"):
            if row["arm"].startswith(kind) and ("shift" not in row["arm"]) == is_pale:
                kibibytes = about("mqar")["arms"][row["label"]]["state per stream"] / 1024
                points.append((kibibytes, mean(seeds("mqar", row["arm"], "correct"))))
        curve(axes, sorted(points), model, 100, 0.3 if is_pale else 1)
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
        # The points of both models stand beside each other.
        for shift, arm in ((-0.06, "transformer-xl"), (0.06, "compressive")):
            for index, (_, size) in enumerate(STREAMS):
                value = mean(in_slots(arm, index, longer=title == titles[1]))
                if value is None:
                    continue
                if value.n > 1:
                    low = max(value.mean - value.half_width, 0)
                    high = min(value.mean + value.half_width, 1)
                    axes.plot([size + shift] * 2, [100 * low, 100 * high], color=COLOURS[arm], linewidth=2)
                axes.plot(size + shift, 100 * value.mean, "o", color=COLOURS[arm], markersize=5)
        axes.set(ylim=(0, 102), title=title, xlim=(1, 6.5))
        axes.set_xlabel("bits that a four-token slot must hold")
    all_axes[0].set_ylabel("correct beyond chance, %")
    key(figure, MODELS)
    return figure


def long_text() -> Figure:
    """What memories save by the budget of the training, and by how far back a word last began."""
    figure, (upper, lower) = panels(2, 1, 5.4, NARROW)
    budgets = (400_000, 1_600_000, 6_400_000)
    for arm, model in (("xl-256", "transformer-xl"), ("slots-64-192", "compressive")):
        by_budget = [(n_tokens, saved(arm, f"bits per byte, {n_tokens:,} tokens")) for n_tokens in budgets]
        by_octave = [(index, saved(arm, distance)) for index, distance in enumerate(DISTANCES)]
        curve(upper, by_budget, model)
        curve(lower, by_octave, model)
    # The axes
    upper.set(xscale="log", title="over the whole text", ylabel="bits per byte saved")
    upper.set_xlabel("training tokens, millions")
    upper.set_xticks(budgets, ["0.4", "1.6", "6.4"])
    upper.minorticks_off()
    lower.set(title="by distance, after 6.4 million", ylabel="nats per token saved")
    lower.set_xlabel("tokens since the word last began")
    lower.set_xticks(range(len(DISTANCES)), [distance.split(" ")[0] for distance in DISTANCES])
    for axes in (upper, lower):
        axes.axhline(0, color=GREY, linewidth=0.8)
    # Below each other, so that the legend fits a telephone.
    labels = ["Transformer-XL, 256 positions", "Compressive, 64 positions, 192 slots"]
    key(figure, MODELS, labels, n_columns=1)
    return figure


def saved(arm: str, measure: str) -> Mean | None:
    """What an arm saves on a long text compared with no memory."""
    return paired(seeds("text", "none", measure), seeds("text", arm, measure))


def tiny_shakespeare() -> Figure:
    figure, (curves, bars) = panels(1, 2, 3.0)
    experiment = "tiny_shakespeare"
    # The curves of the training
    for arm in NAMES:
        points = []
        for row in rows(experiment):
            name = re.fullmatch(r"curve: bits per character after (\d+) tokens", row["measure"])
            if name and row["arm"] == arm:
                points.append((int(name[1]) / 1e6, stored(experiment, arm, name[0])))
        curve(curves, points, arm)
    curves.set(xlabel="training tokens, millions", ylabel="bits per character", title="held-out loss")
    # How much each memory saves
    parts = (("transformer-xl", "memory", "Transformer-XL: positions"),
             ("compressive", "memory", "Compressive: positions"),
             ("compressive", "compressed memory", "Compressive: slots"))  # fmt: skip
    labels = []
    for row_number, (arm, part, label) in enumerate(parts):
        labels.append(label)
        if rise := stored(experiment, arm, SWAPPED, f"{part} swapped"):
            bar(bars, rise, row_number, arm, (-1, 1))
    names(bars, labels)
    bars.axvline(0, color=INK, linewidth=0.8)
    bars.set(title="cost of another stream's memory", xlabel="nats per token")
    key(figure, NAMES)
    return figure


def compression() -> Figure:
    figure, axes = panels(1, 1, 3.2)
    labels = []
    for row_number, row in enumerate(arms_of("compression")):
        arm = row["arm"]
        label, _, _ = row["shown"].partition(" (removed")
        labels.append(label)
        if value := mean(seeds("ablation", arm, "answers about values set 192 to 384 tokens ago")):
            model = arm if arm == "transformer-xl" else "compressive"
            bar(axes, value, row_number, model, (0, 100), 100)
    names(axes, labels)
    axes.axvline(25, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("chance", (25, 0), (3, 0), textcoords="offset points", color=GREY, va="center")
    axes.set(xlim=(0, 100), xlabel="correct answers about values that are only in slots, %")
    return figure


def agents() -> Figure:
    figure, all_axes = panels(1, 4, 3.0, sharey=True)
    for axes, arm in zip(all_axes, arms_of("agents")[:4], strict=True):
        by_maze: list[Seeds] = [seeds("agents", arm["arm"], maze) for maze in MAZES]
        style: Any = {"color": COLOURS.get(arm["arm"], INK), "markersize": 4, "linewidth": 0.8}
        # A line for each seed
        for seed in by_maze[0]:
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


def equal_bytes() -> Figure:
    """A panel for each text: every memory minus Transformer-XL. A row without a point is untested there."""
    texts = [name for name in TEXTS if name in experiments()]
    columns = [(text, PER_CHARACTER, TEXTS[text].partition(",")[0]) for text in texts]
    return differences_of_memories(columns, 1, "bits per character, minus Transformer-XL's (left is better)")


def equal_bytes_recall() -> Figure:
    """A panel for values that a layer of Transformer-XL sees, and one for older ones."""
    columns = [
        ("equal_bytes_recall", "set 0 to 192 tokens ago", "set 0 to 191 tokens ago"),
        ("equal_bytes_recall", BEYOND_A_LAYER, "set 192 to 383 tokens ago"),
    ]
    label = "points of correct answers, minus Transformer-XL's (right is better)"
    return differences_of_memories(columns, 100, label)


def differences_of_memories(columns: Sequence[tuple[str, str, str]], scale: float, label: str) -> Figure:
    """A panel for each experiment, measure and title: every memory minus Transformer-XL, times ``scale``."""
    first_experiment, first_measure, _ = columns[0]
    others = []
    for memory in ALL_MEMORIES:
        if memory.arm != "transformer-xl" and seeds(first_experiment, memory.arm, first_measure):
            others.append(memory)
    figure, all_axes = panels(1, len(columns), 3.4, sharex=True, sharey=True, squeeze=False)
    for axes, (experiment, measure, title) in zip(all_axes[0], columns, strict=True):
        positions = seeds(experiment, "transformer-xl", measure)
        for row, memory in enumerate(others):
            values = seeds(experiment, memory.arm, measure)
            difference = paired(values, positions) if values else None
            if difference:
                arm = COLOUR_OF_MEMORY.get(memory.arm, "")
                bar(axes, difference, row, arm, (-math.inf, math.inf), scale)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set(title=title)
    names(all_axes[0][0], [memory.name for memory in others])
    figure.supxlabel(label, fontsize=9)
    return figure


def speed() -> Figure:
    """Whole steps as a multiple of labml-nn's speed; narrow enough for a telephone."""
    figure, axes = panels(1, 1, 2.8, NARROW)
    cases: list[str] = []
    for line in of_file("experiments/benchmarks/RESULTS.md", "1").splitlines()[2:]:
        case, model, _, _, ratios = map(str.strip, line.split("|")[1:6])
        if case not in cases:
            cases.append(case)
        ratio, low, high = map(float, re.findall(r"\d+\.\d+", ratios))
        # The models of a case stand below each other.
        shift = 0.15 if model == "compressive" else -0.15
        interval(axes, (low, high), ratio, cases.index(case) + shift, model)
    names(axes, cases)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xlabel="times as fast as labml-nn (lines: quartiles)")
    key(figure, MODELS)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "verdicts": forest, "reach": reach, "mqar": mqar, "slots": slots, "long_text": long_text,
    "agents": agents, "tiny_shakespeare": tiny_shakespeare, "compression": compression, "memories": memories,
    "equal_bytes": equal_bytes, "equal_bytes_recall": equal_bytes_recall, "speed": speed,
}  # fmt: skip
