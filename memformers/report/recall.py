"""The report of a recall experiment: the share of correct answers by how long ago the value was set."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from memformers.common.errors import UserError
from memformers.common.files import write_json, write_text
from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import Arm, Column, Measure, Result, arms_of, arms_table, base_of
from memformers.report.columns import Measured, differences_table
from memformers.report.markdown import csv_text, number, plain, table, write_page
from memformers.report.provenance import how_it_was_made
from memformers.report.sections import claims, costs_table, warnings
from memformers.runs.finished import read_runs
from memformers.runs.folder import RESULTS, TABLE

FEWEST_TOKENS = 500_000
CLAIMED = "compressive"
"""The arm that is compared with the base, a Transformer-XL with as many keys."""
WITHIN = Measure("correct answers within its reach", "within_reach", ".1f", " %", " points", 100, 1)
UNTOUCHED = "untouched"
LOOK_OF_A_CONTROL = {
    UNTOUCHED: plotting.BLACK | {"linestyle": "-", "marker": "o"},
    "slots zeroed": plotting.GREEN,
    "slots swapped": plotting.SKY,
    "memory zeroed": plotting.ORANGE | {"linestyle": ":"},
    "memory swapped": plotting.AMBER,
}
ANSWERED = "answered correctly (%)"
WIDER = "// on the axis marks where its scale changes: the bins after it span more positions. "
PLACES = ("segment", "memory", "slots", "beyond")
CONTROLS = (
    "Shares of correct answers by the place where the value was set: in the segment that the model reads, in "
    "the memory, in the compressed slots, or farther back than one layer looks (beyond). A control changes "
    "only the memory with which the model reads a segment; the next segment gets the memory that was "
    "computed without the change."
)


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
    parts = ["# Recall by distance: memories with equal numbers of keys"]
    parts += warnings(arms, base, folder, fewest_tokens=FEWEST_TOKENS)
    parts += [results_table(done, base), *claim(done, base, folder), *beside_claimed(done, base)]
    parts += [how_it_is_asked(base), accuracy_figure(done, folder)]
    parts += [control_figure(controlled, folder)] if controlled else []
    more: dict[str, Column] = {
        "one layer looks back (positions)": lambda arm: f"{sees_back(arm):,}",
        WITHIN.label: lambda arm: WITHIN.shown(arm.mean(WITHIN.of)),
    }
    parts += ["## What each arm costs", costs_table(done, base, more)]
    parts += ["## Correct answers by distance", by_distance(done)]
    if any(controls_of(arm)[1:] for arm in done):
        parts += ["## Causal controls by the place of the value", CONTROLS, by_place(done)]
    method = "Training times do not include measurements. "
    return write_page([*parts, *how_it_was_made(done, base, folder, method)], folder)


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


def results_table(arms: Sequence[Arm], base: Arm) -> str:
    """How accurately each arm recalls, a row for each arm."""
    columns: dict[str, Column] = {
        "seeds": lambda arm: f"{len(arm.results)}",
        "keys": lambda arm: number(arm.first.facts["keys"], ",.10g"),
        "correct within its reach": lambda arm: WITHIN.shown(arm.mean(WITHIN.of)),
    }
    if measure := beyond_base(arms, base):
        columns[f"correct, {measure.label.partition(' were ')[2]}"] = lambda arm: measure.shown(
            arm.mean(measure.of)
        )
    return arms_table(arms, columns)


def beyond_base(arms: Sequence[Arm], base: Arm) -> Measure | None:
    """The correct answers in the distance bins that one layer of the arm with slots sees, and one layer of
    ``base`` doesn't; None without such bins."""
    low, high = sees_back(base), max((sees_back(arm) for arm in arms if arm.name == CLAIMED), default=0)
    edges = [edge for edge in edges_of(arms[0]) if low <= edge <= high]  # of the whole bins between them
    if len(edges) < 2:
        return None
    label = f"correct answers about values that were set {edges[0]:,} to {edges[-1]:,} positions ago"
    return Measure(label, right_between(edges[0], edges[-1]), ".1f", " %", " points", 100, 1)


def claim(arms: Sequence[Arm], base: Arm, folder: Path) -> list[str]:
    """The claim about the worth of the slots, as far as the seeds support one: by the values that one layer
    sees with slots, and not with an equally long memory."""
    if base.first.config["recall"]["measured_for"] == "choosing":
        return ["Nothing is claimed, since these are the streams on which settings are chosen."]
    both = [arm for arm in arms if arm is base or arm.name == CLAIMED]
    measure = beyond_base(arms, base)
    if len(both) < 2 or not measure:
        return [
            "Nothing is claimed, since a claim compares Transformer-XL with the Compressive Transformer, and "
            "this experiment doesn't have both."
        ]
    shares = [measure.shown(arm.mean(measure.of)) for arm in both]
    chance = 100 / base.first.config["recall"]["stream"]["values"]
    asked = measure.label.partition(" about ")[2]
    return [
        f"Of the questions about {asked}, {shares[0]} are answered correctly by the first model "
        f"({plain(both[0].label)}), and {shares[1]} by the second ({plain(both[1].label)}); chance is "
        f"{chance:.0f} %. One layer of the first model doesn't look back so far; one layer of the second "
        f"does.",
        *claims(both, base, [measure], folder),
    ]


def beside_claimed(arms: Sequence[Arm], base: Arm) -> list[str]:
    """A table of the other arms' differences to the arm with slots, paired by seed, where there are some."""
    by_name = {arm.name: arm for arm in arms}
    if len(arms) < 3 or CLAIMED not in by_name:
        return []
    measures = [WITHIN, *filter(None, [beyond_base(arms, base)])]
    columns = [Measured(measure.label, measure, by_name) for measure in measures]
    labels = {name: arm.label for name, arm in by_name.items()}
    return ["The other arms, minus the arm with slots:", differences_table(columns, labels, CLAIMED)]


def how_it_is_asked(base: Arm) -> str:
    """The task, in a paragraph."""
    stream, measured_for = (base.first.config["recall"][name] for name in ("stream", "measured_for"))
    chosen_on = "these" if measured_for == "choosing" else "others (python -m experiments.slots)"
    return (
        f"The models read a stream of symbols. With probability {stream['set_probability']:.3g}, a token "
        f"sets one of {stream['keys']} keys to one of {stream['values']} values; otherwise it asks for a "
        f"key. After a question, the model must predict the value that was last set for the key. For each "
        f"question, a band of distances is drawn first (below 64 positions, and then each octave), and then "
        f"a key in this band. The streams that are measured are the same for all arms, and others for each "
        f"seed. No model was trained on them, and settings were chosen on {chosen_on}."
    )


def bands_of(arms: Sequence[Arm]) -> str:
    """What the bands of a figure of ``arms`` are."""
    seeds = max(len(arm.results) for arm in arms)
    bands = f"Bands are 95 % intervals over {seeds} seeds, by Student's t."
    return bands if seeds > 1 else "There is only one seed, so there are no bands."


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
    caption = (
        "The share of questions that are answered correctly, by how many positions ago the value was set. "
        "Vertical lines, and the bars at the top, show how far one layer of each arm looks back from the end "
        f"of its segment. {WIDER}"
    )
    title = "Share of correct answers, by how long ago the value was set"
    return plotting.save_series(
        figure, folder, "recall_accuracy", title, caption + bands_of(arms), {ANSWERED: many}
    )


def control_figure(arms: Sequence[Arm], folder: Path) -> str:
    """A panel for each memory without its variants: recall with parts of it zeroed or swapped."""
    figure, panels_of = plotting.panels([2.3] * len(arms), sharex=True)
    drawn = {}
    for arm, axes in zip(arms, panels_of, strict=True):
        found = [name for name in LOOK_OF_A_CONTROL if name in controls_of(arm)]
        drawn[arm.label] = [series(arm, name, LOOK_OF_A_CONTROL[name]) for name in found]
        plotting.draw_lines(axes, drawn[arm.label])
        finish(axes, arm, arm.label)
        model = arm.first.config["model"]
        ends = [model["segment_len"] + model["mem_len"], sees_back(arm)]
        memory, slots = places(ends, edges_of(arm))
        plotting.mark(axes, [memory, slots])
        if slots > memory:
            axes.axvspan(memory, slots, color="#000000", alpha=0.05, linewidth=0)
        axes.label_outer()
    caption = (
        "The same models without further training. Before each segment, a part of the memory was zeroed, or "
        "swapped with that of another stream. Grey marks the distances at which one layer sees only slots. "
        f"{WIDER}"
    )
    title = "Share of correct answers with changed memories, by how long ago the value was set"
    return plotting.save_series(figure, folder, "recall_controls", title, caption + bands_of(arms), drawn)


def series(arm: Arm, control: str, look: plotting.Look, label: str = "") -> plotting.Series:
    """The share of correct answers of each bin, in percent, in the middle of the bin."""
    found = [(i, mean) for i, mean in enumerate(accuracy(arm, control)) if mean]
    names = [ranges(arm)[i] for i, _ in found]
    return plotting.Series(
        label or control, [(i + 0.5, mean) for i, mean in found], look, scale=100, names=names
    )


def ranges(arm: Arm) -> list[str]:
    """The distance bins, by their first and last distance."""
    return [f"{low:,} – {high - 1:,}" for low, high in itertools.pairwise(edges_of(arm))]


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
    columns = [accuracy(arm) for arm in arms]
    rows = [[name, *(percent(c[i]) for c in columns)] for i, name in enumerate(ranges(arms[0]))]
    return table(["positions since the value was set", *(arm.label for arm in arms)], rows)


def by_place(arms: Sequence[Arm]) -> str:
    """A row for each control of each arm, a column a place."""
    rows = [
        [arm.label, control, *(percent(at_place(arm, control, place)) for place in PLACES)]
        for arm in arms
        for control in controls_of(arm)
        if controls_of(arm)[1:]
    ]
    return table(["arm", "control", *PLACES], rows)


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
