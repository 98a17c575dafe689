"""The figures of a comparison and of a probe, as Markdown with their captions."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from memformers.common.intervals import Mean, mean_of
from memformers.report import plotting
from memformers.report.arms import Arm, Result
from memformers.report.markdown import plain
from memformers.report.sections import stages_of

VALID, TOKENS = "bits_per_character.valid", "training tokens"
Measured = Mapping[str, Any]
"""The measurements in ``probe.json``, or a part of them."""


def curve_figures(
    arms: Sequence[Arm], base: Arm, folder: Path, bands: str, read: str, *, timed: bool
) -> list[str]:
    """Every figure of curves that ``arms`` have data for: those against time if they are ``timed``. ``bands``
    explains the bands, and ``read`` says which part of the held-out text the validation read."""
    looks = plotting.looks_of([arm.name for arm in arms])
    stages = stages_of(arms)
    growth = " The memory becomes longer at the vertical grey lines." * bool(stages)

    def curves(x: str, y: str, label: str = "{}", *, marked: bool = False) -> list[plotting.Series]:
        look = {} if marked else {"marker": "", "linewidth": 1.0}
        return [
            plotting.Series(label.format(arm.label), curve(arm, x, y), looks[arm.name] | look) for arm in arms
        ]

    def drawn(
        name: str,
        title: str,
        caption: str,
        y: str,
        many: Sequence[plotting.Series],
        x: str = TOKENS,
        *,
        log: bool = False,
    ) -> list[str]:
        many = [series for series in many if series.points]
        if not many:
            return []
        figure, [axes] = plotting.panels([2.7])
        if log:
            axes.set_yscale("log")
        plotting.draw_lines(axes, many)
        if name == "tokens_per_second":
            axes.set_ylim(bottom=0)
        plotting.style(axes, x, y)
        if x == TOKENS:
            plotting.mark(axes, stages)
            caption += growth
        return [plotting.save_series(figure, folder, name, title, caption + bands, {f"{y} by {x}": many})]

    loss = "validation loss (bits per character)"
    minus = curve_minus if len(arms) > 1 and len(base.counted) > 1 else lambda *_: []
    return [
        *drawn(
            "validation_tokens",
            "Validation loss against training tokens",
            f"Validation loss over {read}, with memory carried from segment to segment.",
            loss,
            curves("tokens", VALID, marked=True),
        ),
        *drawn(
            "differences",
            "Validation loss minus the baseline's, against training tokens",
            f"The same loss minus that of {plain(base.label)} from the same seed; a value below zero is "
            f"better.",
            "validation loss minus the baseline's\n(bits per character)",
            [plotting.Series(arm.label, minus(arm, base, VALID), looks[arm.name]) for arm in arms],
        ),
        *drawn(
            "validation_time",
            "Validation loss against training time",
            "The same loss against training time, which does not include evaluations.",
            loss,
            curves("seconds", VALID, marked=True) if timed else [],
            "training time (seconds)",
        ),
        *drawn(
            "reconstruction_loss",
            "Loss of the compression functions against training tokens",
            "The loss of the compression functions. It measures how much attention changes when memories are "
            "replaced by their slots; for an auto-encoding arm, it is the error of a decoder that restores "
            "the memories from the slots. The loss can rise while the compression functions improve: an "
            "untrained model attends to all positions nearly alike, which is easy to reconstruct, and the "
            "attention of a trained one differs from token to token.",
            "reconstruction loss\n(MSE, sum over layers)",
            curves("tokens", "reconstruction_loss.train", "{}, training")
            + curves("tokens", "reconstruction_loss.valid", "{}, validation", marked=True),
            log=True,
        ),
        *drawn(
            "tokens_per_second",
            "Training speed against training tokens",
            "Training speed. "
            + "A step takes longer when its memory is longer, since it attends to more keys. " * bool(stages)
            + "Other programs on the machine can reduce the speed too.",
            "training tokens per second",
            curves("tokens", "tokens_per_second"),
        ),
    ]


def records_with(arm: Arm, name: str) -> dict[int, dict[float, Mapping[str, float]]]:
    """The records of an arm's runs that have ``name``, by seed and by their tokens."""
    return {run.seed: {r["tokens"]: r for r in run.metrics if name in r} for run in arm.counted}


def curve(arm: Arm, x: str, y: str) -> list[tuple[float, Mean]]:
    """The mean of ``x``, and that of ``y``, at each number of tokens for which all runs have both."""
    found = list(records_with(arm, y).values())
    return [
        (fmean(run[at][x] for run in found), mean_of([run[at][y] for run in found]))
        for at in found[0]
        if all(at in run and x in run[at] for run in found)
    ]


def curve_minus(arm: Arm, base: Arm, y: str) -> list[tuple[float, Mean]]:
    """The tokens at which both have ``y``, and the mean over their common seeds of the difference."""
    ours, theirs = records_with(arm, y), records_with(base, y)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return [
        (at, mean_of([a[at][y] - b[at][y] for a, b in pairs]))
        for at in (pairs[0][0] if pairs else ())
        if all(at in run for pair in pairs for run in pair)
    ]


def position_figure(arms: Sequence[Arm], base: Arm, folder: Path, bands: str) -> list[str]:
    """The loss by position in the segment: above, that of each arm; below, if there are several seeds, the
    difference to that of ``base`` from the same seed. Nothing if no run has finished."""
    looks = plotting.looks_of([arm.name for arm in arms])
    found = {
        "loss (bits per character)": [(arm, by_octave(arm)) for arm in arms],
        f"minus that of\n{base.label}": [(arm, by_octave(arm, base)) for arm in arms if arm is not base],
    }
    found = {name: [(arm, of) for arm, of in pairs if of] for name, pairs in found.items()}
    found = {name: pairs for name, pairs in found.items() if pairs}
    if not found:
        return []
    figure, places = plotting.panels([2.6] * len(found))
    drawn = {}
    for axes, (name, pairs) in zip(places, found.items(), strict=True):
        drawn[name] = [
            plotting.Series(
                arm.label,
                [((first * last) ** 0.5, mean) for (first, last), mean in octaves.items()],
                looks[arm.name],
                names=[f"{first} – {last}" for first, last in octaves],
            )
            for arm, octaves in pairs
        ]
        plotting.draw_lines(axes, drawn[name])
        plotting.style(axes, "position in the segment (tokens)", name)
        plotting.octave_axis(axes, [first for first, _ in pairs[0][1]])
    caption = (
        "Loss over the whole held-out text, by position in the segment, in octaves. The first tokens of a "
        "segment have only a few of its tokens before them, so they depend mostly on memory."
    )
    if len(places) > 1:
        places[-1].axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
        caption += (
            f" The lower panel has the loss minus that of {plain(base.label)} from the same seed; a value "
            f"below zero is better."
        )
    title = "Validation loss by position in the segment"
    return [plotting.save_series(figure, folder, "loss_by_position", title, caption + bands, drawn)]


def by_octave(arm: Arm, base: Arm | None = None) -> dict[tuple[int, int], Mean]:
    """The mean loss in each octave of positions over seeds, or the difference to that of ``base`` from the
    same seed; no difference for a single seed, and none if the segments have different lengths."""
    results = {seed: octave_means(result) for seed, result in arm.results.items()}
    if base is None:
        pairs = [(octaves, dict.fromkeys(octaves, 0.0)) for octaves in results.values()]
    else:
        theirs = {seed: octave_means(result) for seed, result in base.results.items()}
        pairs = [(octaves, theirs[seed]) for seed, octaves in results.items() if seed in theirs]
        if len(pairs) < 2 or any(a.keys() != b.keys() for a, b in pairs):
            return {}
    octaves = pairs[0][0] if pairs else ()
    return {octave: mean_of([a[octave] - b[octave] for a, b in pairs]) for octave in octaves}


def bits(result: Result, nats: float = 1.0) -> float:
    """Nats per token as bits per character of the text of ``result``."""
    return float(nats * result["bits_per_character"] / result["loss"])


def octave_means(result: Result) -> dict[tuple[int, int], float]:
    """The mean loss at the positions 1, 2, 3 – 4, 5 – 8 and so on of a segment, by the first and the last."""
    by_position, found, first = result["loss_by_position"], {}, 1
    while first <= len(by_position):
        last = min(max(2 * (first - 1), 1), len(by_position))
        found[first, last] = bits(result, fmean(by_position[first - 1 : last]))
        first = last + 1
    return found


def save_loss_by_position(
    in_segment: Sequence[float], by_memory: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw the mean loss against the position in a segment, and against the length of the memory before it
    (positions, loss, uncertainty), into ``path``."""
    figure, [left, right] = plotting.panels([3.3], width=9.0, columns=2, below=0.3)
    left.plot(range(1, len(in_segment) + 1), in_segment, color=plotting.BLUE["color"])
    plotting.style(left, "position in the segment (tokens)", "loss (nats per token)")
    points = [(positions, Mean(loss, half, 2)) for positions, loss, half in by_memory]
    plotting.draw_marks(right, [plotting.Series("", points, plotting.ORANGE | {"marker": "o"})])
    plotting.style(right, "remembered before the segment (tokens)", "loss (nats per token, ± 95 %)")
    plotting.save(figure, path)


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
    return plotting.save_series(
        figure,
        folder,
        "effective_context",
        "Gain of a longer context against the length of the context",
        "The gain of a longer context, over all tokens (r = 1.0): the relative fall of perplexity from one "
        "context length to the next, compared with the best prediction that any of these models makes from "
        "the shorter context. The relative effective context length of a model is the context at which its "
        "curve first falls below 1 %, the grey line.",
        {y: many},
    )


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
    figure, places = plotting.panels([1.8] * len(attention), width=9.0, columns=2, below=0.7)
    for number, (run, mass) in enumerate(attention.items()):
        draw_places(places[2 * number], mass, labels[run])
        draw_distances(places[2 * number + 1], mass)
    layers = max(len(mass["by_distance"]) for mass in attention.values())
    handles = [
        *(Patch(**look, edgecolor="white", label=place) for place, look in PLACES.items()),
        *(Line2D([], [], **layer_look(i), label=f"layer {i + 1}") for i in range(layers)),
    ]
    figure.legend(handles=handles, frameon=False, ncols=6, loc="outside lower center", fontsize=8)
    return plotting.save_picture(
        figure,
        folder,
        "attention",
        "Attention by place and by distance, for each layer",
        "The distribution of attention, with full memories. The left panel of each model shows the shares of "
        "compressed memory, memory and segment, with a bar for each head of each layer. The right panel "
        "shows each layer's mean over its heads, by distance in octaves; the data of the figure has each "
        "head.",
        ["arm", "layer", "head", "place, or nearest distance of the octave (tokens)", "share of attention"],
        [
            [labels[run], i, j, name, share]
            for run, mass in attention.items()
            for names, of_layers in ((PLACES, mass["by_place"]), (mass["nearest"], mass["by_distance"]))
            for i, layer in enumerate(of_layers, 1)
            for j, head in enumerate(layer, 1)
            for name, share in zip(names, head, strict=True)
        ],
    )


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
    drawn, said = {}, []
    if costs:
        names = [control for control in CONTROLS if any(control in found for found in costs.values())]
        drawn["cost of a changed memory (bits per character)"] = many = [
            plotting.Series(
                labels[run],
                [(names.index(control), Mean.from_json(cost)) for control, cost in found.items()],
                looks[run] | {"linestyle": "none"},
                names=list(found),
            )
            for run, found in costs.items()
        ]
        plotting.draw_marks(places[0], many, plotting.APART)
        plotting.style(places[0], "", "bits per character", "Cost of a changed memory")
        plotting.categories(
            places[0], [name.replace("slots", "compressed").replace(" ", "\n") for name in names]
        )
        said.append(
            "how much the loss of a trained model rises, in bits per character, when a part of its memory "
            "is changed"
        )
    if others:
        many = []
        for run in others:
            known = [i for i, group in enumerate(groups) if run in group["less_baseline"]]
            points = [(float(i), Mean.from_json(groups[i]["less_baseline"][run])) for i in known]
            points.append((len(groups) - 1.5, Mean(math.nan, math.nan, 0)))  # before tokens that don't repeat
            points.sort(key=itemgetter(0))
            names = [groups[int(at)]["name"] for at, _ in points]
            many.append(plotting.Series(labels[run], points, looks[run], names=names))
        drawn[f"loss minus that of {labels[baseline]} (bits per character)"] = many
        plotting.draw_marks(places[-1], many, plotting.APART)
        plotting.mark(places[-1], [len(groups) - 1.5])
        against = f"bits per character, minus\n{labels[baseline]}"
        plotting.style(places[-1], "tokens since the last occurrence", against, "Loss of repeats")
        plotting.categories(places[-1], [fill(group["name"], 12) for group in groups], rotation=45)
        said.append(
            f"the loss of each arm minus that of {plain(labels[baseline])}, by the distance of repeats in "
            f"tokens; a value below zero is better"
        )
    for axes in places:
        axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    said = [f"above, {said[0]}", f"below, {said[1]}"] if len(said) > 1 else said
    caption = f"What memory is worth: {'; '.join(said)}. Bars are 95 % intervals over streams."
    title = "Cost of a changed memory, and loss by the distance of repeats"
    return [plotting.save_series(figure, folder, "memory_ablation", title, caption, drawn)]
