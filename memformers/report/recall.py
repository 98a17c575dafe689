"""The report of a recall experiment: the share of correct answers by how long ago the value was set."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from memformers.common.errors import UserError
from memformers.common.files import csv_text, write_json, write_text
from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import MEASURES, Arm, Column, Measure, Result, arms_of, base_of
from memformers.report.markdown import number, prose, table
from memformers.report.page import write_page
from memformers.report.provenance import how_it_was_made
from memformers.report.sections import bars, claims, costs_table, results_table, warnings
from memformers.runs.folder import RESULTS, TABLE
from memformers.runs.reader import read_runs

FEWEST_TOKENS = 500_000
CLAIMED = "compressive"
"""The arm that is compared with the base, a Transformer-XL with as many keys."""
WITHIN = MEASURES["recall"]
UNTOUCHED = "untouched"
LOOK_OF_A_CONTROL = {
    UNTOUCHED: plotting.BLACK | {"linestyle": "-", "marker": "o"},
    "slots zeroed": plotting.GREEN,
    "slots swapped": plotting.SKY,
    "memory zeroed": plotting.ORANGE | {"linestyle": ":"},
    "memory swapped": plotting.AMBER,
}
ANSWERED = "answered correctly (%)"
PLACES = ("segment", "memory", "slots", "beyond")


def write_recall_report(folder: Path) -> Path:
    """Write the report of the recall experiment in ``folder``, and its numbers as ``results.json`` and
    ``results.csv``; returns its page."""
    arms = arms_of(read_runs(folder, "recall"))
    base = base_of(arms)
    done = [arm for arm in arms if arm.results]
    if not done:
        raise UserError(f"no training in {folder} has finished, so there is nothing to report.")
    write_results(done, base, folder)
    controlled = [arm for arm in done if arm.name in (base.name, CLAIMED) and controls_of(arm)[1:]]
    parts = ["# Recall by distance, equal keys"]
    parts += warnings(arms, base, folder, fewest_tokens=FEWEST_TOKENS)
    measures = [WITHIN, *beyond_base(done, base)]
    keys: dict[str, Column] = {"keys": lambda arm: number(arm.first.facts["keys"], ",.10g")}
    parts += [*claim(done, base, folder), results_table(done, base, measures, keys)]
    parts += [*beside_claimed(done, measures), how_it_is_asked(base), accuracy_figure(done, folder)]
    parts += [control_figure(controlled, folder)] if controlled else []
    more: dict[str, Column] = {
        "one layer looks back (positions)": lambda arm: f"{sees_back(arm):,}",
        WITHIN.label: lambda arm: WITHIN.shown(arm.mean(WITHIN.of)),
    }
    parts += ["## What each arm costs", costs_table(done, base, more)]
    parts += ["### Correct answers by distance", by_distance(done)]
    if any(controls_of(arm)[1:] for arm in done):
        parts += ["### Causal controls by the place of the value", prose("controls"), by_place(done)]
    method = "Training times do not include measurements."
    return write_page(
        [*parts, *how_it_was_made(done, base, folder, method)], folder, bars(done, measures[-1])
    )


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


def sees_back(arm: Arm) -> int:
    """How many positions one layer of ``arm`` looks back from the end of its segment."""
    return int(arm.first.facts["sees_back"])


def edges_of(arm: Arm) -> list[int]:
    """The edges of the distance bins, the same for all arms."""
    return list(next(iter(arm.results.values()))["recall"]["edges"])


def controls_of(arm: Arm) -> list[str]:
    """The names of the measurements of ``arm``: with the unchanged memory, and under each control."""
    return [UNTOUCHED, *next(iter(arm.results.values()))["controls"]]


def measured(result: Result, control: str) -> Mapping[str, Any]:
    """The recall of a result under ``control``."""
    found: Mapping[str, Any] = result["recall"] if control == UNTOUCHED else result["controls"][control]
    return found


def accuracy(arm: Arm, control: str = UNTOUCHED) -> list[Mean | None]:
    """The share of correct answers in each bin, over seeds."""
    bins = range(len(edges_of(arm)) - 1)
    return [arm.mean(lambda result, i=i: measured(result, control)["accuracy"][i]) for i in bins]  # type: ignore[misc]


def percent(share: Mean | None) -> str:
    """A share in a table."""
    return number(share, ".1f", " %", scale=100)


def between(arms: Sequence[Arm], base: Arm) -> tuple[int, int] | None:
    """The first and the last edge of the distance bins that one layer of the arm with slots sees, and one
    layer of ``base`` doesn't; None without such bins."""
    low, high = sees_back(base), max((sees_back(arm) for arm in arms if arm.name == CLAIMED), default=0)
    edges = [edge for edge in edges_of(arms[0]) if low <= edge <= high]  # of the whole bins between them
    return (edges[0], edges[-1]) if len(edges) > 1 else None


def beyond_base(arms: Sequence[Arm], base: Arm) -> list[Measure]:
    """The correct answers in the distance bins [`between`][]; empty without such bins."""
    if not (edges := between(arms, base)):
        return []
    far = f"set {edges[0]:,} to {edges[1]:,} positions ago"
    head = f"correct, {far}"
    label = f"correct answers about values that were {far}"
    return [Measure(label, right_between(*edges), ".1f", " %", " points", 100, 1, head)]


def claim(arms: Sequence[Arm], base: Arm, folder: Path) -> list[str]:
    """The claim about the worth of the slots, as far as the seeds support one: by the values that one layer
    sees with slots, and not with an equally long memory."""
    if base.first.config["recall"]["measured_for"] == "choosing":
        return [prose("choosing")]
    both = [arm for arm in arms if arm is base or arm.name == CLAIMED]
    edges = between(arms, base)
    if len(both) < 2 or not edges:
        return [prose("not_both")]
    [measure] = beyond_base(arms, base)
    about = {
        "shares": [measure.shown(arm.mean(measure.of)) for arm in both],
        "labels": [arm.label for arm in both],
        "chance": f"{100 / base.first.config['recall']['stream']['values']:.0f}",
    }
    said = prose("recalled", low=f"{edges[0]:,}", high=f"{edges[1]:,}", **about)
    return [said, *claims(both, base, [measure], folder)]


def beside_claimed(arms: Sequence[Arm], measures: Sequence[Measure]) -> list[str]:
    """A table of the other arms' differences to the arm with slots, paired by seed, where there are some."""
    by_name = {arm.name: arm for arm in arms}
    if len(arms) < 3 or CLAIMED not in by_name:
        return []
    rows = [
        [arm.label, *(m.cell(arm.minus(by_name[CLAIMED], m.of)) for m in measures)]
        for arm in arms
        if arm.name != CLAIMED
    ]
    differences = table(["arm", *(m.label for m in measures)], rows, numbers=True)
    return ["The other arms, minus the arm with slots:", differences]


def how_it_is_asked(base: Arm) -> str:
    """The task, in a paragraph."""
    stream, measured_for = (base.first.config["recall"][name] for name in ("stream", "measured_for"))
    about = {name: stream[name] for name in ("keys", "values")}
    probability = f"{stream['set_probability']:.3g}"
    return prose("asked", **about, probability=probability, on_these=measured_for == "choosing")


def accuracy_figure(arms: Sequence[Arm], folder: Path) -> str:
    """A line for each arm; above them, how far one layer of each looks back."""
    figure, [above, axes] = plotting.panels([0.7, 3.5], sharex=True)
    looks, edges = plotting.looks_of([arm.name for arm in arms]), edges_of(arms[0])
    ends = places([sees_back(arm) for arm in arms], edges)
    for i, (arm, end) in enumerate(zip(arms, ends, strict=True)):
        above.plot([0, end], [-i, -i], **looks[arm.name] | {"marker": "|"})
    plotting.mark(axes, ends)
    above.set(yticks=[], ylim=(0.7 - len(arms), 0.7))
    above.set_title("how far one layer looks back", fontsize=9, loc="left")
    above.spines[:].set_visible(False)
    many = [series(arm, UNTOUCHED, looks[arm.name], arm.label) for arm in arms]
    plotting.draw_lines(axes, many)
    finish(axes, arms[0])
    above.tick_params(bottom=False, labelbottom=False)
    caption = prose("recall_accuracy", seeds=max(len(arm.results) for arm in arms))
    title = "Share of correct answers, by how long ago the value was set"
    return plotting.save_figure(figure, folder, "recall_accuracy", title, caption)


def control_figure(arms: Sequence[Arm], folder: Path) -> str:
    """A panel for each memory without its variants: recall with parts of it zeroed or swapped."""
    figure, panels_of = plotting.panels([2.3] * len(arms), sharex=True)
    for arm, axes in zip(arms, panels_of, strict=True):
        found = [name for name in LOOK_OF_A_CONTROL if name in controls_of(arm)]
        plotting.draw_lines(axes, [series(arm, name, LOOK_OF_A_CONTROL[name]) for name in found])
        finish(axes, arm, arm.label)
        model = arm.first.config["model"]
        ends = [model["segment_len"] + model["mem_len"], sees_back(arm)]
        memory, slots = places(ends, edges_of(arm))
        plotting.mark(axes, [memory, slots])
        if slots > memory:
            axes.axvspan(memory, slots, color="#000000", alpha=0.05, linewidth=0)
        axes.label_outer()
    caption = prose("recall_controls", seeds=max(len(arm.results) for arm in arms))
    title = "Share of correct answers with changed memories, by how long ago the value was set"
    return plotting.save_figure(figure, folder, "recall_controls", title, caption)


def series(arm: Arm, control: str, look: plotting.Look, label: str = "") -> plotting.Series:
    """The share of correct answers of each bin, in percent, in the middle of the bin."""
    points = [(i + 0.5, mean) for i, mean in enumerate(accuracy(arm, control)) if mean]
    return plotting.Series(label or control, points, look, scale=100)


def finish(axes: Axes, arm: Arm, title: str = "") -> None:
    """Draw chance, and set axes and their names; all bins are drawn equally wide, with // on the axis where
    their widths in positions change."""
    edges, chance = edges_of(arm), 100 / arm.first.config["recall"]["stream"]["values"]
    axes.axhline(chance, color=plotting.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    axes.text(0.08, chance + 1, "chance", fontsize=7, color="#666666")
    plotting.style(axes, "positions since the value was set", ANSWERED, title)
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45, fontsize=8)
    axes.set_xlim(0, len(edges) - 1)
    axes.set_ylim(0, 101)
    axes.grid(visible=False, axis="x")
    widths = np.diff(edges)
    for i in 1 + np.flatnonzero(widths[1:] != widths[:-1]):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
        axes.annotate("//", (i, 0), (4, 0), textcoords="offset points", ha="center", va="center", bbox=box,
                      fontsize=8)  # fmt: skip


def places(distances: Sequence[float], edges: Sequence[int]) -> list[float]:
    """The places of distances on an axis with equally wide bins."""
    return [float(x) for x in np.interp(distances, edges, range(len(edges)))]


def by_distance(arms: Sequence[Arm]) -> str:
    """A row for each bin, a column for each arm."""
    names = [f"{low:,} – {high - 1:,}" for low, high in itertools.pairwise(edges_of(arms[0]))]
    columns = zip(*(accuracy(arm) for arm in arms), strict=True)
    rows = [[name, *map(percent, row)] for name, row in zip(names, columns, strict=True)]
    return table(["positions since the value was set", *(arm.label for arm in arms)], rows, numbers=True)


def by_place(arms: Sequence[Arm]) -> str:
    """A row for each control of each arm, a column a place."""
    rows = [
        [arm.label, control, *(percent(at_place(arm, control, place)) for place in PLACES)]
        for arm in arms
        for control in controls_of(arm)
        if controls_of(arm)[1:]
    ]
    return table(["arm", "control", *PLACES], rows, numbers=True)


def at_place(arm: Arm, control: str, place: str) -> Mean | None:
    """The share of correct answers about values that were set in ``place``, over seeds."""
    return arm.mean(lambda result: measured(result, control)["by_place"][place])


def write_results(arms: Sequence[Arm], base: Arm, folder: Path) -> None:
    """Write the means of each arm, with half the widths of their 95 % intervals, as ``results.json``, and the
    results of each training run as ``results.csv``."""
    found = [
        {
            "name": arm.name,
            "label": arm.label,
            "seeds": list(arm.results),
            **{n: arm.first.facts[n] for n in ("keys", "sees_back", "parameters", "attention_operations")},
            "seconds": arm.mean("seconds"),
            "within_reach": arm.mean("within_reach"),
            "right": {
                control: {
                    "by_distance": accuracy(arm, control),
                    "by_place": {place: at_place(arm, control, place) for place in PLACES},
                }
                for control in controls_of(arm)
            },
        }
        for arm in arms
    ]
    write_json(folder / RESULTS, {"base": base.name, "edges": edges_of(arms[0]), "arms": found})
    lines = [
        [arm.name, seed, control, *line]
        for arm in arms
        for seed, result in arm.results.items()
        for control in controls_of(arm)
        for line in bins_of(measured(result, control))
    ]
    head = ["arm", "seed", "control", "from", "to", "asks", "accuracy"]
    write_text(folder / TABLE, csv_text(head, lines))
