"""The report of a recall experiment: the share of correct answers by how long ago the value was set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from memformers.common.intervals import Mean
from memformers.common.text import UserError
from memformers.report import plotting
from memformers.report.arms import MEASURES, ArmRuns, Column, Measure, Quantity, Result, arms_of, base_of
from memformers.report.markdown import Part, Report, number, prose, table, write_page
from memformers.report.plotting import curves, line_styles
from memformers.report.sections import (
    bars,
    claims,
    costs_table,
    how_it_was_made,
    results_table,
    warnings,
    write_results,
)
from memformers.runs.reader import read_runs

MIN_TOKENS = 500_000
CLAIMED = "compressive"
"""The arm that is compared with the base, a Transformer-XL with the same number of keys."""
WITHIN = MEASURES["recall"]
LINE_OF_A_CONTROL = {
    "untouched": plotting.BLACK | {"linestyle": "-", "marker": "o"},
    "slots zeroed": plotting.GREEN,
    "slots swapped": plotting.SKY,
    "memory zeroed": plotting.ORANGE | {"linestyle": ":"},
    "memory swapped": plotting.AMBER,
}
UNTOUCHED = next(iter(LINE_OF_A_CONTROL))
ANSWERED = "answered correctly (%)"
PLACES = ("segment", "memory", "slots", "beyond")


def write_recall_report(folder: Path) -> Report:
    """Write the report of the recall experiment in ``folder``, and its numbers as ``results.json`` and
    ``results.csv``."""
    arms = arms_of(read_runs(folder, "recall"))
    base = base_of(arms)
    done = [arm for arm in arms if arm.results]
    if not done:
        raise UserError(f"no training in {folder} has finished, so there is nothing to report.")
    controlled = [arm for arm in done if controls_of(arm)[1:]]
    beyond = beyond_base(done, base)
    measures = [WITHIN, *beyond.values()]
    keys: dict[str, Column] = {"keys": lambda arm: number(arm.first.facts["keys"], ",.10g")}
    title, notes = "Recall by distance, equal keys", warnings(arms, base, folder, min_tokens=MIN_TOKENS)
    claimed, results = claim(done, base, beyond, folder), results_table(done, base, measures, keys)
    parts: list[Part] = [f"# {title}", *(f"> {note}" for note in notes), *claimed, results]
    slots = next((arm for arm in done if arm.name == CLAIMED), None)
    if slots and len(done) > 2:
        others = [arm for arm in done if arm is not slots]
        rows = [[arm.label, *(m.cell(arm.minus(slots, m.of)) for m in measures)] for arm in others]
        parts.append("The other models, minus the one with slots:")
        parts.append(table(["model", *(m.label for m in measures)], rows, numbers=True))
    asked = base.first.config["recall"]
    parts.append(prose("asked", stream=asked["stream"], on_these=asked["measured_for"] == "choosing"))
    parts += recall_figures(done, [arm for arm in controlled if arm in (base, slots)], folder)
    parts += ["## What each model costs", costs_table(done)]
    names = [f"{low:,} – {high - 1:,}" for low, high in pairwise(edges_of(done[0]))]
    columns = zip(names, *(map(percent, accuracy(arm)) for arm in done), strict=True)
    head = ["positions since the value was set", *(arm.label for arm in done)]
    parts += ["### Correct answers by distance", table(head, [*columns], numbers=True)]
    if controlled:
        rows = [
            [arm.label, control, *(percent(at_place(arm, control, place)) for place in PLACES)]
            for arm in controlled
            for control in controls_of(arm)
        ]
        parts += ["### Causal controls by the place of the value", prose("controls")]
        parts.append(table(["model", "control", *PLACES], rows, numbers=True))
    parts += how_it_was_made(done, base, folder, "Training times do not include measurements.")
    lines = [
        [arm.name, seed, control, *line]
        for arm in done
        for seed, result in arm.results.items()
        for control in controls_of(arm)
        for line in bins_of(measured(result, control))
    ]
    head = ["arm", "seed", "control", "from", "to", "asks", "accuracy"]
    write_results(folder, done, base, numbers_of, head, lines, edges=edges_of(done[0]))
    return write_page(parts, folder, bars(done, measures[-1]), [title, results, *notes, *claimed[:2]])


def numbers_of(arm: ArmRuns) -> dict[str, Any]:
    """What ``results.json`` has of an arm."""
    right = {
        control: {
            "by_distance": accuracy(arm, control),
            "by_place": {place: at_place(arm, control, place) for place in PLACES},
        }
        for control in controls_of(arm)
    }
    facts = {n: arm.first.facts[n] for n in ("keys", "sees_back", "parameters", "attention_operations")}
    return facts | {name: arm.mean(name) for name in ("seconds", "within_reach")} | {"right": right}


def right_between(low: int, high: int) -> Callable[[Result], float | None]:
    """The share of correct answers about values that were set from ``low`` to before ``high`` positions ago,
    in the distance bins between them; None without a question."""

    def share(result: Result) -> float | None:
        bins = bins_of(result["recall"])
        inside = [(n, right) for start, end, n, right in bins if low <= start and end <= high and n]
        asks = sum(n for n, _ in inside)
        return sum(n * right for n, right in inside) / asks if asks else None

    return share


def bins_of(recall: Mapping[str, Any]) -> Iterable[tuple[int, int, int, float]]:
    """Of each distance bin: its edges, how many questions it has, and the share of correct answers."""
    edges = recall["edges"]
    return zip(edges[:-1], edges[1:], recall["asks"], recall["accuracy"], strict=True)


def sees_back(arm: ArmRuns) -> int:
    """How many positions one layer of ``arm`` looks back from the end of its segment."""
    return int(arm.first.facts["sees_back"])


def longest(length: int | Sequence[Any]) -> int:
    """A length of a memory, of the layer and head that has the most."""
    return length if isinstance(length, int) else max(map(longest, length))


def edges_of(arm: ArmRuns) -> list[int]:
    """The edges of the distance bins, the same for all arms."""
    return list(next(iter(arm.results.values()))["recall"]["edges"])


def controls_of(arm: ArmRuns) -> list[str]:
    """The names of the measurements of ``arm``: with the unchanged memory, and under each control."""
    return [UNTOUCHED, *next(iter(arm.results.values()))["controls"]]


def measured(result: Result, control: str) -> Mapping[str, Any]:
    """The recall of a result under ``control``."""
    return dict(result["controls"].get(control, result["recall"]))


def accuracy(arm: ArmRuns, control: str = UNTOUCHED) -> list[Mean | None]:
    """The share of correct answers in each bin, over seeds."""

    def of(i: int) -> Quantity:
        return lambda result: measured(result, control)["accuracy"][i]

    return [arm.mean(of(i)) for i in range(len(edges_of(arm)) - 1)]


def at_place(arm: ArmRuns, control: str, place: str) -> Mean | None:
    """The share of correct answers about values that were set in ``place``, over seeds."""
    return arm.mean(lambda result: measured(result, control)["by_place"][place])


def percent(share: Mean | None) -> str:
    """A share in a table."""
    return number(share, ".1f", " %", scale=100)


def beyond_base(arms: Sequence[ArmRuns], base: ArmRuns) -> dict[str, Measure]:
    """The correct answers in the distance bins that one layer of the arm with slots sees, and one layer of
    ``base`` doesn't, by when their values were set; empty without such bins."""
    low, high = sees_back(base), max((sees_back(arm) for arm in arms if arm.name == CLAIMED), default=0)
    edges = [edge for edge in edges_of(arms[0]) if low <= edge <= high]  # of the whole bins between them
    if len(edges) < 2:
        return {}
    far = f"set {edges[0]:,} to {edges[-1]:,} positions ago"
    label, of = f"correct answers about values that were {far}", right_between(edges[0], edges[-1])
    return {far: Measure(label, of, ".1f", " %", " points", 100, 1, f"correct, {far}")}


def claim(arms: Sequence[ArmRuns], base: ArmRuns, beyond: Mapping[str, Measure], folder: Path) -> list[Part]:
    """The claim about how much slots help, as far as the seeds support one: by the values that one layer sees
    with slots, and not with an equally long memory."""
    if base.first.config["recall"]["measured_for"] == "choosing":
        return [prose("choosing")]
    both = [arm for arm in arms if arm is base or arm.name == CLAIMED]
    if len(both) < 2 or not beyond:
        return [prose("not_both")]
    [(far, measure)] = beyond.items()
    chance = 100 / base.first.config["recall"]["stream"]["values"]
    shares = [measure.shown(arm.mean(measure.of)) for arm in both]
    labels = [arm.label for arm in both]
    shown = prose("recalled", far=far, shares=shares, labels=labels, chance=f"{chance:.0f}")
    return [shown, *claims(both, base, measure, folder)]


def recall_figures(arms: Sequence[ArmRuns], controlled: Sequence[ArmRuns], folder: Path) -> list[str]:
    """The share of correct answers by distance: a line for each of ``arms``, and a panel for each
    ``controlled`` one with its memory zeroed or swapped."""
    lines, seeds = line_styles([arm.name for arm in arms]), max(len(arm.results) for arm in arms)
    x = "positions since the value was set"

    def series(arm: ArmRuns, control: str, line: plotting.LineStyle, label: str) -> plotting.Series:
        points = [(i + 0.5, mean) for i, mean in enumerate(accuracy(arm, control)) if mean]
        return plotting.Series(label, points, line, scale=100)  # in the middle of each bin

    def with_reaches(y: str, axes: Axes) -> None:
        draw_bins(axes, arms[0])
        for arm in arms:
            color = lines[arm.name]["color"]
            axes.axvline(place_of(sees_back(arm), arm), color=color, linewidth=0.8, zorder=0)

    def with_slots(y: str, axes: Axes) -> None:
        arm = of_panels[y]
        draw_bins(axes, arm)
        model = arm.first.config["model"]
        memory = place_of(model["segment_len"] + longest(model["mem_len"]), arm)
        axes.axvspan(
            memory, max(place_of(sees_back(arm), arm), memory), color="#000000", alpha=0.05, linewidth=0
        )

    of_panels = {f"{arm.label}:\n{ANSWERED}": arm for arm in controlled}
    untouched = [series(arm, UNTOUCHED, lines[arm.name], arm.label) for arm in arms]
    controls = {
        y: [
            series(arm, name, line, name)
            for name, line in LINE_OF_A_CONTROL.items()
            if name in controls_of(arm)
        ]
        for y, arm in of_panels.items()
    }
    accuracy_text, controls_text = (prose(f"recall_{kind}", seeds=seeds) for kind in ("accuracy", "controls"))
    title, with_controls = (
        "Share of correct answers, by how long ago the value was set",
        "The same with changed memories",
    )
    figures = [
        curves(
            folder, "recall_accuracy", title, accuracy_text, {ANSWERED: untouched}, x, finish=with_reaches
        ),
        curves(folder, "recall_controls", with_controls, controls_text, controls, x, finish=with_slots),
    ]
    return [figure for figure in figures if figure]


def draw_bins(axes: Axes, arm: ArmRuns) -> None:
    """Draw chance, and the axis of distances; all bins are equally wide, with // where they begin to span
    more."""
    edges, chance = edges_of(arm), 100 / arm.first.config["recall"]["stream"]["values"]
    axes.axhline(chance, color=plotting.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    axes.text(0.08, chance + 1, "chance", fontsize=7, color="#666666")
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45, fontsize=8)
    axes.set_xlim(0, len(edges) - 1)
    axes.set_ylim(0, 101)
    axes.grid(visible=False, axis="x")
    widths = np.diff(edges)
    for i in 1 + np.flatnonzero(widths[1:] != widths[:-1]):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
        axes.annotate("//", (i, 0), (4, 0), textcoords="offset points", ha="center", va="center", bbox=box,
                      fontsize=8)  # fmt: skip


def place_of(distance: float, arm: ArmRuns) -> float:
    """The place of a distance on an axis with equally wide bins."""
    edges = edges_of(arm)
    return float(np.interp(distance, edges, range(len(edges))))
