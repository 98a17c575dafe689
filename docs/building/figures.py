"""The figures of the pages of results. Blue, orange and green are no memory, Transformer-XL and the
Compressive Transformer, and nothing else; everything else is black or grey."""

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from docs.building.plots import COLOURS, GREY, INK, NARROW, WIDTH, bar, guesses, key, line, names
from docs.building.results import mean, rows, seeds, stored, verdicts
from docs.building.tables import (
    AGENTS,
    COMPRESSIONS,
    DISTANCES,
    MAZES,
    MEMORIES,
    MODELS,
    REMOVED,
    SHAKESPEARE,
    STREAMS,
    SWAPPED,
    in_slots,
    of_file,
)
from memformers.common.intervals import Mean, paired

OF_ROW: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
"""At the left of a panel, and so many points beside a value of its vertical axis."""


def forest() -> Figure:
    """Each verdict with its interval, so that right is better for the Compressive Transformer; narrow enough
    for a telephone."""
    groups = {panel: [*found] for panel, found in groupby(verdicts(), key=lambda verdict: verdict.panel)}
    figure = Figure(figsize=(NARROW, 8.2), layout="constrained")
    heights = [len(found) + 0.5 for found in groups.values()]
    panels = figure.subplots(len(groups), height_ratios=heights)
    for axes, (panel, found) in zip(panels, groups.items(), strict=True):
        is_share = found[0].unit == "points"
        end = 100.0 if is_share else 1.0
        for i, verdict in enumerate(found):
            bar(axes, Mean(verdict.gain, verdict.half_width, verdict.seeds), i, verdict.winner, (-end, end))
            axes.annotate(verdict.name, (0, i), (2, 7), **OF_ROW)
        axes.axvline(0, color=INK, linewidth=0.8)
        names(axes, [""] * len(found))
        axes.set_ylim(len(found) - 0.5, -0.9)
        if is_share:  # so that zero is in the middle
            most = max(map(abs, axes.get_xlim()))
            axes.set_xlim(-most, most)
        axes.set_title(f"{panel}, in {'points' if is_share else 'bits per byte or character'}")
    figure.supxlabel("← Transformer-XL is better\u2003\u2003Compressive is better →", fontsize=9)
    meanings = {"compressive": "Compressive", "transformer-xl": "Transformer-XL", "": "no difference seen"}
    key(figure, [*meanings], [*meanings.values()])
    return figure


def edges_of(experiment: str) -> list[tuple[int, int]]:
    return list(
        dict.fromkeys((int(row["from"]), int(row["to"])) for row in rows(experiment) if row["accuracy"])
    )


def reach() -> Figure:
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = (("2 layers: slots from 256 on", "recall_two_layers", 768),
              ("3 layers: from 384 on", "recall_three_layers", 768),
              ("2 layers, 256 keys: from 512 on", "recall_far", 2304))  # fmt: skip
    for axes, (title, experiment, end) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for arm in MODELS:
            bins = [(low, high) for low, high in edges_of(experiment) if (low + high) / 2 <= end]
            found = [
                ((low + high) / 2, mean(seeds(experiment, arm, f"correct, {low} – {high}")))
                for low, high in bins
            ]
            line(axes, [(x, y) for x, y in found if y], arm, scale=100)
        guesses(axes)
        axes.set(ylim=(0, 101), xlim=(0, end), title=title)
        axes.set_xticks(range(0, end, end // 3), [f"{x:,}" for x in range(0, end, end // 3)])
    figure.axes[0].set_ylabel("correct answers, %")
    figure.axes[1].set_xlabel("positions since the value was set")
    key(figure, MODELS)
    return figure


def slots() -> Figure:
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    for axes, longer in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for shift, arm in ((-0.06, "transformer-xl"), (0.06, "compressive")):
            for i, (_, bits) in enumerate(STREAMS):
                value = mean(in_slots(arm, i, longer=longer))
                if value is None:
                    continue
                low, high = max(value.mean - value.half_width, 0), min(value.mean + value.half_width, 1)
                if value.n > 1:
                    axes.plot([bits + shift] * 2, [100 * low, 100 * high], color=COLOURS[arm], linewidth=2)
                axes.plot(bits + shift, 100 * value.mean, "o", color=COLOURS[arm], markersize=5)
        title = "after 12 million tokens (one seed)" if longer else "after 3 million tokens (three seeds)"
        axes.set(
            ylim=(0, 102), title=title, xlabel="bits that a slot of four positions must hold", xlim=(1, 6.5)
        )
    figure.axes[0].set_ylabel("correct beyond chance, %")
    key(figure, MODELS)
    return figure


def long_text() -> Figure:
    """What memories save by the budget of the training, and by how far back a word last began."""
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, like in (("xl-256", "transformer-xl"), ("slots-64-192", "compressive")):
        gains = [
            (tokens, paired(*(seeds("text", a, f"bits per byte, {tokens:,} tokens") for a in ("none", arm))))
            for tokens in (400_000, 1_600_000, 6_400_000)
        ]
        line(left, [(x, y) for x, y in gains if y], like)
        saved = [paired(seeds("text", "none", d), seeds("text", arm, d)) for d in DISTANCES]
        line(right, [(i, y) for i, y in enumerate(saved) if y], like)
    left.set(
        xscale="log",
        title="over the whole text",
        xlabel="tokens of the training, millions",
        ylabel="bits per byte saved",
    )
    left.set_xticks([4e5, 1.6e6, 6.4e6], ["0.4", "1.6", "6.4"])
    left.minorticks_off()
    right.set(
        title="by distance, after 6.4 million",
        xlabel="tokens since the word last began",
        ylabel="nats per token saved",
    )
    right.set_xticks(range(len(DISTANCES)), [d.split(" ")[0] for d in DISTANCES])
    for axes in (left, right):
        axes.axhline(0, color=GREY, linewidth=0.8)
    key(figure, MODELS, ["Transformer-XL, 256 positions", "Compressive, 64 positions and 192 slots"])
    return figure


def tiny_shakespeare() -> Figure:
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, *_ in SHAKESPEARE:
        curve = re.compile(r"curve: bits per character after (\d+) tokens")
        found = [
            (row, curve.fullmatch(row["measure"])) for row in rows("tiny_shakespeare") if row["arm"] == arm
        ]
        line(
            left,
            [(int(at[1]) / 1e6, stored("tiny_shakespeare", arm, row["measure"])) for row, at in found if at],
            arm,
        )
    left.set(xlabel="tokens of the training, millions", ylabel="bits per character", title="held-out loss")
    shown = (("transformer-xl", "memory", "Transformer-XL: positions"),
             ("compressive", "memory", "Compressive: positions"),
             ("compressive", "compressed memory", "Compressive: slots"))  # fmt: skip
    for i, (arm, part, _) in enumerate(shown):
        bar(right, stored("tiny_shakespeare", arm, SWAPPED, f"{part} swapped"), i, arm, (-1, 1))
    names(right, [label for *_, label in shown])
    right.axvline(0, color=INK, linewidth=0.8)
    right.set(title="memory of another stream costs", xlabel="nats per token")
    key(figure, [arm for arm, *_ in SHAKESPEARE])
    return figure


def compression() -> Figure:
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    for i, (arm, *_) in enumerate(COMPRESSIONS):
        value = mean(seeds("ablation", arm, "answers about values set 192 to 384 positions ago"))
        if value:
            bar(axes, value, i, arm if arm == "transformer-xl" else "compressive", (0, 100), 100)
    names(axes, [shown.removesuffix(f" {REMOVED}") for _, shown, _ in COMPRESSIONS])
    axes.axvline(25, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate("guessing", (25, 0), (3, 0), textcoords="offset points", color=GREY, va="center")
    axes.set(xlim=(0, 100), xlabel="correct answers about values that only slots hold, %")
    return figure


def agents() -> Figure:
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    shown = AGENTS[:4]
    for axes, (arm, label, _) in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        found = [seeds("agents", arm, maze) for maze in MAZES]
        colour = COLOURS.get(arm.replace("none", "transformer"), INK)
        for seed in found[0]:
            solved = [100 * each[seed] for each in found]
            axes.plot(range(3), solved, "o-", color=colour, markersize=4, linewidth=0.8, alpha=0.8)
        axes.axhline(50, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(ylim=(0, 102), xlim=(-0.3, 2.3), title=label)
        axes.set_xticks(range(3), [maze.removeprefix("t-maze-") for maze in MAZES])
    figure.axes[0].set_ylabel("episodes solved, %")
    figure.supxlabel("steps of the corridor (a dot is a seed; dotted: guessing)", fontsize=9)
    return figure


def memories() -> Figure:
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, (arm, label, *_) in zip(panels, MEMORIES, strict=True):
        for name in ("transformer-xl", arm):
            found = [
                (
                    (low + high) / 2,
                    mean(seeds("memories", name, f"recall, set {low} to {high} positions ago")),
                )
                for low, high in edges_of("recall_two_layers")
            ]
            line(axes, [(x, y) for x, y in found if y], name, scale=100, alpha=1.0 if name == arm else 0.35)
        guesses(axes)
        axes.set(ylim=(0, 101), title=label)
    figure.supxlabel("positions since the value was set (pale: Transformer-XL)", fontsize=9)
    figure.supylabel("correct answers, %", fontsize=9)
    return figure


def speed() -> Figure:
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    table = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in of_file("experiments/benchmarks/RESULTS.md", "1").splitlines()[2:]
    ]
    cases = [*dict.fromkeys(row[0] for row in table)]
    for case, model, *_, ratios in (row[:5] for row in table):
        ratio, low, high = map(float, re.findall(r"\d+\.\d+", ratios))
        at = cases.index(case) + (0.15 if model == "compressive" else -0.15)
        axes.plot([low, high], [at, at], color=COLOURS[model], linewidth=2.5)
        axes.plot(ratio, at, "o", color=COLOURS[model], markersize=5)
    names(axes, cases)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xlim=(0, 3.1), xlabel="times as fast as labml-nn (lines: quartiles)")
    key(figure, MODELS)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "verdicts": forest, "reach": reach, "slots": slots, "long_text": long_text, "agents": agents,
    "tiny_shakespeare": tiny_shakespeare, "compression": compression, "memories": memories, "speed": speed,
}  # fmt: skip
