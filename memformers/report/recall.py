"""The report of a recall experiment: correct answers by how long ago a value was set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from memformers.common.errors import UserError
from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import (
    MEASURES,
    ArmRuns,
    Column,
    Measure,
    Quantity,
    Result,
    arms_of,
    arms_table,
    base_of,
    labels_of,
)
from memformers.report.claims import claims, warnings
from memformers.report.data import Block, Details, Figure, ReportData, Section, Table, prose
from memformers.report.keys import keys_text, mean_keys
from memformers.report.made import how_it_was_made
from memformers.report.plotting import CONTROL_LINES, Panel, Series, curves, styles_of
from memformers.report.rendering import Report, claim_report, write_files
from memformers.report.sections import chart_of, costs_table, difference_column, results_table, write_results
from memformers.runs.folder import PLACES, UNTOUCHED
from memformers.runs.reader import read_runs

SLOTS = "compressive"
"""The arm of a recall experiment that is compared with the base, a Transformer-XL with equal keys."""
DISTANCE = "tokens since the value was set"
N_SHOWN = 2
"""How many paragraphs of the claim a terminal shows: the shares, and what the seeds support."""


def write_recall_report(folder: Path) -> Report:
    arms = arms_of(read_runs(folder, "recall"))
    base = base_of(arms)
    finished = [arm for arm in arms if arm.results]
    if not finished:
        raise UserError(f"no training in {folder} has finished, so there is nothing to report.")
    claim_report(folder)
    report = recall_report(arms, base, finished, folder)
    write_recall_results(finished, base, folder)
    return write_files(report, folder)


def recall_report(
    arms: Sequence[ArmRuns], base: ArmRuns, finished: Sequence[ArmRuns], folder: Path
) -> ReportData:
    """The report of ``arms``, of which these have ``finished``; figures are drawn into ``folder``."""
    slots = slots_of(finished)
    distances = beyond_base(finished, base)
    measures = [MEASURES["recall"], *distances.values()]
    notes = warnings(arms, base, folder)

    # Claims and results
    claimed = recall_claim(finished, base, distances, folder)
    keys: dict[str, Column] = {"keys": lambda arm: keys_text(arm.first.facts)}
    results = results_table(finished, base, measures, keys)
    tables: list[Block] = [results]
    if slots and len(finished) > 2:
        tables += ["The other models, minus the one with slots:", against_slots(finished, slots, measures)]
    recall = base.first.config["recall"]
    on_these = recall["measured_for"] == "choosing"
    tables.append(prose("asked", stream=recall["stream"], on_these=on_these))

    # Details
    controlled = [arm for arm in finished if len(control_names(arm)) > 1]
    drawn = [arm for arm in controlled if arm in (base, slots)]
    details: list[Block] = [
        costs_table(finished),
        Details("Correct answers by distance", [distance_table(finished)]),
    ]
    if controlled:
        by_place: list[Block] = [prose("controls"), control_table(controlled)]
        details.append(Details("Causal controls by the place of the value", by_place))
    method = "Training times do not include measurements."
    return ReportData(
        "Recall by distance, equal keys",
        notes,
        claimed,
        chart_of(finished, base, measures[-1]),
        tables,
        recall_figures(finished, drawn, folder),
        [Section("What each model costs", details), how_it_was_made(finished, base, folder, method)],
        [results, *notes, *claimed[:N_SHOWN]],
    )


def slots_of(arms: Sequence[ArmRuns]) -> ArmRuns | None:
    """The arm with slots, if it is among ``arms``: by its name, or as the only Compressive Transformer."""
    for arm in arms:
        if arm.name == SLOTS:
            return arm
    with_slots = [arm for arm in arms if arm.first.config["model"]["model"] == "compressive"]
    return with_slots[0] if len(with_slots) == 1 else None


def recall_claim(
    arms: Sequence[ArmRuns], base: ArmRuns, beyond: Mapping[str, Measure], folder: Path
) -> list[Block]:
    if base.first.config["recall"]["measured_for"] == "choosing":
        return [prose("choosing")]
    slots = slots_of(arms)
    pair = [arm for arm in arms if arm in (base, slots)]
    if len(pair) < 2 or not beyond:
        return [prose("not_both")]
    [(distance, measure)] = beyond.items()
    chance = 100 / base.first.config["recall"]["stream"]["values"]
    shares = [(measure.shown(arm.mean(measure.of)), arm.label) for arm in pair]
    shown = prose("recalled", far=distance, shares=shares, chance=f"{chance:.0f} %")
    return [shown, *claims(pair, base, measure, folder)]


# Tables


def against_slots(arms: Sequence[ArmRuns], slots: ArmRuns, measures: Sequence[Measure]) -> Table:
    """Each other arm's differences to the one with slots."""
    columns: dict[str, Column] = {}
    for measure in measures:
        differences = {arm.name: arm.minus(slots, measure.of) for arm in arms}
        columns[measure.label] = difference_column(measure, differences)
    return arms_table([arm for arm in arms if arm is not slots], columns)


def distance_table(arms: Sequence[ArmRuns]) -> Table:
    rows = []
    for low, high in pairwise(edges_of(arms[0])):
        rows.append([f"{low:,} – {high - 1:,}"])
    for arm in arms:
        for row, mean in zip(rows, accuracy(arm), strict=True):
            row.append(MEASURES["recall"].shown(mean))
    return Table([DISTANCE, *labels_of(arms)], rows, has_numbers=True)


def control_table(arms: Sequence[ArmRuns]) -> Table:
    rows = []
    for arm in arms:
        for control in control_names(arm):
            shares = shares_by_place(arm, control)
            rows.append([arm.label, control, *map(MEASURES["recall"].shown, shares.values())])
    return Table(["model", "control", *PLACES], rows, has_numbers=True)


def write_recall_results(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path) -> None:
    """Write ``results.json`` and ``results.csv``."""
    lines = []
    for arm in arms:
        for seed, result in arm.results.items():
            for control in control_names(arm):
                for line in bins_of(measured(result, control)):
                    lines.append([arm.name, seed, control, *line])
    head = ["arm", "seed", "control", "from", "to", "asks", "accuracy"]
    write_results(folder, arms, base, recall_numbers, head, lines, edges=edges_of(arms[0]))


def recall_numbers(arm: ArmRuns) -> dict[str, Any]:
    """What ``results.json`` has of an arm."""
    numbers: dict[str, Any] = {}
    for name in ("keys", "sees_back", "parameters", "attention_operations"):
        numbers[name] = arm.first.facts[name]
    numbers["mean_keys"] = mean_keys(arm.first.facts)
    for name in ("seconds", "within_reach"):
        numbers[name] = arm.mean(name)
    numbers["right"] = {}
    for control in control_names(arm):
        by_place = shares_by_place(arm, control)
        numbers["right"][control] = {"by_distance": accuracy(arm, control), "by_place": by_place}
    return numbers


# Quantities


def right_between(low: int, high: int) -> Callable[[Result], float | None]:
    """The share of correct answers in the distance bins between ``low`` and ``high``."""

    def share(result: Result) -> float | None:
        n_asks = 0
        n_right = 0.0
        for start, end, asks, accuracy_of_bin in bins_of(result["recall"]):
            if low <= start and end <= high and asks:
                n_asks += asks
                n_right += asks * accuracy_of_bin
        return n_right / n_asks if n_asks else None

    return share


def bins_of(recall: Mapping[str, Any]) -> Iterable[tuple[int, int, int, float]]:
    """Of each distance bin: its edges, how many questions it has, and the share of correct answers."""
    edges = recall["edges"]
    return zip(edges[:-1], edges[1:], recall["asks"], recall["accuracy"], strict=True)


def sees_back(arm: ArmRuns) -> int:
    """How many positions one layer of ``arm`` looks back from the end of its segment."""
    return int(arm.first.facts["sees_back"])


def edges_of(arm: ArmRuns) -> list[int]:
    return list(next(iter(arm.results.values()))["recall"]["edges"])


def control_names(arm: ArmRuns) -> list[str]:
    """The names of the measurements of ``arm``: with the unchanged memory, and under each control."""
    return [UNTOUCHED, *next(iter(arm.results.values()))["controls"]]


def measured(result: Result, control: str) -> Mapping[str, Any]:
    return dict(result["controls"].get(control, result["recall"]))


def accuracy(arm: ArmRuns, control: str = UNTOUCHED) -> list[Mean | None]:
    """The share of correct answers in each bin, over seeds."""

    def share_in(index: int) -> Quantity:
        return lambda result: measured(result, control)["accuracy"][index]

    return [arm.mean(share_in(index)) for index in range(len(edges_of(arm)) - 1)]


def shares_by_place(arm: ArmRuns, control: str) -> dict[str, Mean | None]:
    """The share of correct answers by where the value was, over seeds."""

    def share_at(name: str) -> Quantity:
        return lambda result: measured(result, control)["by_place"][name]

    return {name: arm.mean(share_at(name)) for name in PLACES}


def beyond_base(arms: Sequence[ArmRuns], base: ArmRuns) -> dict[str, Measure]:
    """The correct answers in the whole bins that one layer of the arm with slots sees, and one of ``base``
    doesn't."""
    slots = slots_of(arms)
    low = sees_back(base)
    high = sees_back(slots) if slots else 0
    edges = [edge for edge in edges_of(arms[0]) if low <= edge <= high]  # of the whole bins between them
    if len(edges) < 2:
        return {}
    distance = f"set {edges[0]:,} to {edges[-1]:,} tokens ago"
    share = right_between(edges[0], edges[-1])
    label = f"correct answers about values {distance}"
    return {distance: Measure(label, share, ".1f", " %", " points", 100, 1)}


# Figures


def recall_figures(arms: Sequence[ArmRuns], controlled: Sequence[ArmRuns], folder: Path) -> list[Figure]:
    """Correct answers by distance: of all ``arms``, and of each ``controlled`` one with a changed memory."""
    seeds = max(len(arm.results) for arm in arms)
    by_arm = reach_panel(arms)
    by_control = list(map(control_panel, controlled))
    title = "Share of correct answers, by how long ago the value was set"
    caption = prose("recall_accuracy", seeds=seeds)
    figures = curves(folder, "recall_accuracy", title, [caption], DISTANCE, [by_arm])
    title = "The same with changed memories"
    caption = prose("recall_controls", seeds=seeds)
    return figures + curves(folder, "recall_controls", title, [caption], DISTANCE, by_control)


def recall_series(arm: ArmRuns, control: str, line: plotting.LineStyle, label: str) -> Series:
    # Each point stands in the middle of its bin.
    points = []
    for index, mean in enumerate(accuracy(arm, control)):
        if mean:
            points.append((index + 0.5, mean))
    return Series(label, points, line, scale=100)


def reach_panel(arms: Sequence[ArmRuns]) -> Panel:
    """All arms, and how far one layer of each looks back."""
    lines = styles_of(arms)
    series = []
    for arm in arms:
        series.append(recall_series(arm, UNTOUCHED, lines[arm.name], arm.label))

    def draw_reaches(axes: Axes) -> None:
        draw_bins(axes, arms[0])
        for arm in arms:
            color = lines[arm.name]["color"]
            axes.axvline(axis_position(sees_back(arm), arm), color=color, linewidth=0.8, zorder=0)

    return Panel("answered correctly (%)", series, "", draw_reaches)


def control_panel(arm: ArmRuns) -> Panel:
    """An arm with its memory, and with each change of it; grey where one layer sees only slots."""
    lines = CONTROL_LINES | {UNTOUCHED: plotting.BLACK | {"linestyle": "-", "marker": "o"}}
    series = []
    for control in control_names(arm):
        series.append(recall_series(arm, control, lines[control], control))
    return Panel("answered correctly (%)", series, arm.label, partial(draw_slots, arm=arm))


def draw_slots(axes: Axes, arm: ArmRuns) -> None:
    draw_bins(axes, arm)
    model = arm.first.config["model"]
    memory = axis_position(model["segment_len"] + int(np.max(model["mem_len"])), arm)
    end = max(axis_position(sees_back(arm), arm), memory)
    axes.axvspan(memory, end, color="#000000", alpha=0.05, linewidth=0)


def draw_bins(axes: Axes, arm: ArmRuns) -> None:
    """All bins are equally wide, with // where they begin to span more."""
    edges = edges_of(arm)
    chance = 100 / arm.first.config["recall"]["stream"]["values"]
    axes.axhline(chance, color=plotting.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    # Right of the axis, at the height of chance
    margin = axes.get_yaxis_transform()
    axes.text(1.01, chance, "chance", transform=margin, va="center", fontsize=7, color="#666666")
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45, fontsize=8)
    axes.set_xlim(0, len(edges) - 1)
    axes.set_ylim(0, 101)
    axes.grid(visible=False, axis="x")
    # A mark before each bin that is wider than the one before it
    widths = np.diff(edges)
    mark: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8}
    mark["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    for index in 1 + np.flatnonzero(widths[1:] != widths[:-1]):
        axes.annotate("//", (index, 0), (4, 0), **mark)


def axis_position(distance: float, arm: ArmRuns) -> float:
    edges = edges_of(arm)
    return float(np.interp(distance, edges, range(len(edges))))
