"""Writes the report of runs on a text, or of a recall experiment: ``report.md`` with figures, one
``report.html`` that holds everything, and the results as ``results.csv`` and ``results.json``."""

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
    measure_of,
)
from memformers.report.keys import keys_text, mean_keys
from memformers.report.markdown import (
    Report,
    Table,
    claim_report,
    fenced,
    in_terminal,
    number,
    plain,
    prose,
    table,
    write_page,
)
from memformers.report.plotting import CONTROL_LINES, Panel, Series, curves, line_styles, text_figures
from memformers.report.sections import (
    HELD_OUT_TEXT,
    bars,
    claims,
    costs_table,
    how_it_was_made,
    probe_parts,
    results_table,
    tokens_of_curves,
    tokens_of_losses,
    tokens_of_results,
    warnings,
    write_results,
)
from memformers.runs.folder import PLACES, PROBE, UNTOUCHED
from memformers.runs.plan import read_plan
from memformers.runs.reader import read_probe, read_runs

MAX_CLAIMS = 4
"""The most arms whose claims a terminal shows beside their table."""
IN_TABLE = ("loss", "bits_per_character", "bits_per_byte", "perplexity", "word_perplexity", "accuracy",
            "seconds", "evaluation_seconds", "peak_memory_bytes")  # fmt: skip
"""The numbers of a result in the table of each training run; the loss is in nats per token."""
SLOTS = "compressive"
"""The arm of a recall experiment that is compared with the base, a Transformer-XL with equal keys."""


def write_report(folder: Path) -> Report:
    """Write the report of a run's or an experiment's ``folder`` into it. Raises UserError for a folder
    without a run, and for files that no report wrote."""
    if (plan := read_plan(folder)) and plan.task == "recall":
        return write_recall_report(folder)
    arms = arms_of(runs := read_runs(folder))
    base, probe = base_of(arms), read_probe(folder)
    claim_report(folder)
    corpus = runs[0].facts["corpus"]["name"].partition(" (seed")[0]
    title = f"{'Memory compared' if len(arms) > 1 else arms[0].label} on {corpus}"
    notes: list[str] = [prose("probe_left_out")] if probe is None and (folder / PROBE).exists() else []
    notes += warnings(arms, base, folder)
    is_fair = len({(run.facts["corpus"]["sha256"], run.config["max_tokens"]) for run in runs}) == 1
    measure = measure_of(arms)
    claimed = claims(arms, base, measure, folder) if is_fair else []
    results = results_table(arms, base, [measure])
    read = tokens_of_results(arms)
    parts: list[str] = [f"# {plain(title)}", *(f"> {note}" for note in notes), *claimed, results]
    parts += tokens_of_losses(arms, probe)
    parts += text_figures(arms, base, folder, shown_curves(arms), read)
    parts += ["### Other units, and accuracy", units_table(arms)]
    parts += ["## What each model costs", costs_table(arms), *samples(arms)]
    if probe:
        parts += ["## How much memory helps", *probe_parts(arms, probe), prose("limits")]
    parts += how_it_was_made(arms, base, folder, prose("method", read=read))

    def numbers(arm: ArmRuns) -> dict[str, Any]:
        means = {name: arm.mean(name) for name in IN_TABLE}
        difference = arm.minus(base, measure.of) if arm is not base else None
        return means | {f"{measure.of}_minus_base": difference}

    lines = [
        [arm.name, seed, *(result.get(name) for name in IN_TABLE)]
        for arm in arms
        for seed, result in arm.results.items()
    ]
    write_results(folder, arms, base, numbers, ["arm", "seed", *IN_TABLE], lines)
    answer = [title, results, *notes, *claimed[: len(arms) <= MAX_CLAIMS + 1]]
    return write_page(parts, folder, bars(arms, measure), answer)


def probe_answer(folder: Path) -> str:
    """What the probe of the runs in ``folder`` says in a terminal."""
    probe = read_probe(folder)
    return in_terminal(probe_parts(arms_of(read_runs(folder)), probe)) if probe else ""


def units_table(arms: Sequence[ArmRuns]) -> Table:
    def mean(name: str, form: str, unit: str = "", scale: float = 1.0) -> Column:
        return lambda arm: number(arm.mean(name), form, unit, scale=scale)

    columns: dict[str, Column] = {
        "nats per token": mean("loss", ".3f"),
        "bits per byte": mean("bits_per_byte", ".3f"),
        "perplexity": mean("perplexity", ",.1f"),  # of words
        "perplexity per word": mean("word_perplexity", ",.1f"),  # of subwords
        "accuracy": mean("accuracy", ".1f", " %", 100),
    }
    return arms_table(arms, columns)


def shown_curves(arms: Sequence[ArmRuns]) -> str:
    """Which part of the held-out text the curves are over."""
    n_read = tokens_of_curves(arms)
    results = tokens_of_results(arms)
    if not n_read:
        return results
    return prose("read_in_parts", read=n_read, table="all of it" if results == HELD_OUT_TEXT else results)


def samples(arms: Sequence[ArmRuns]) -> list[str]:
    """The text that each arm generated at the end, and its prompt."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample and arm.first.result}
    prompts = {label: (run.result or {})["prompt"] for label, run in runs.items()}
    if not runs:
        return []
    parts: list[str] = ["## Samples", prose("samples")]
    if shared := len(set(prompts.values())) == 1:
        title = "All models continue the same prompt:" if len(runs) > 1 else "The prompt:"
        parts.append(f"{title}\n\n{fenced(next(iter(prompts.values())))}")
    for label, run in runs.items():
        parts.append(f"**{plain(label)}**")
        if not shared:
            parts.append(f"The prompt:\n\n{fenced(prompts[label])}\n\nThe text that the model wrote:")
        parts.append(fenced(run.sample))
    return parts


def write_recall_report(folder: Path) -> Report:
    arms = arms_of(read_runs(folder, "recall"))
    base, done = base_of(arms), [arm for arm in arms if arm.results]
    if not done:
        raise UserError(f"no training in {folder} has finished, so there is nothing to report.")
    claim_report(folder)
    controlled = [arm for arm in done if control_names(arm)[1:]]
    beyond = beyond_base(done, base)
    measures = [MEASURES["recall"], *beyond.values()]
    keys: dict[str, Column] = {"keys": lambda arm: keys_text(arm.first.facts)}
    title, notes = "Recall by distance, equal keys", warnings(arms, base, folder)
    claimed, results = recall_claim(done, base, beyond, folder), results_table(done, base, measures, keys)
    parts: list[str] = [f"# {title}", *(f"> {note}" for note in notes), *claimed, results]
    slots = next((arm for arm in done if arm.name == SLOTS), None)
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
    share = MEASURES["recall"].shown
    columns = zip(names, *(map(share, accuracy(arm)) for arm in done), strict=True)
    head = ["tokens since the value was set", *(arm.label for arm in done)]
    parts += ["### Correct answers by distance", table(head, [*columns], numbers=True)]
    if controlled:
        rows = [
            [arm.label, control, *(share(at_place(arm, control, place)) for place in PLACES)]
            for arm in controlled
            for control in control_names(arm)
        ]
        parts += ["### Causal controls by the place of the value", prose("controls")]
        parts.append(table(["model", "control", *PLACES], rows, numbers=True))
    parts += how_it_was_made(done, base, folder, "Training times do not include measurements.")
    lines = [
        [arm.name, seed, control, *line]
        for arm in done
        for seed, result in arm.results.items()
        for control in control_names(arm)
        for line in bins_of(measured(result, control))
    ]
    head = ["arm", "seed", "control", "from", "to", "asks", "accuracy"]
    write_results(folder, done, base, recall_numbers, head, lines, edges=edges_of(done[0]))
    return write_page(parts, folder, bars(done, measures[-1]), [title, results, *notes, *claimed[:2]])


def recall_numbers(arm: ArmRuns) -> dict[str, Any]:
    """What ``results.json`` has of an arm."""
    right = {
        control: {
            "by_distance": accuracy(arm, control),
            "by_place": {place: at_place(arm, control, place) for place in PLACES},
        }
        for control in control_names(arm)
    }
    names = ("keys", "sees_back", "parameters", "attention_operations")
    facts = {name: arm.first.facts[name] for name in names}
    facts["mean_keys"] = mean_keys(arm.first.facts)
    return facts | {name: arm.mean(name) for name in ("seconds", "within_reach")} | {"right": right}


def right_between(low: int, high: int) -> Callable[[Result], float | None]:
    """The share of correct answers in the distance bins between ``low`` and ``high``."""

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


def edges_of(arm: ArmRuns) -> list[int]:
    return list(next(iter(arm.results.values()))["recall"]["edges"])


def control_names(arm: ArmRuns) -> list[str]:
    """The names of the measurements of ``arm``: with the unchanged memory, and under each control."""
    return [UNTOUCHED, *next(iter(arm.results.values()))["controls"]]


def measured(result: Result, control: str) -> Mapping[str, Any]:
    return dict(result["controls"].get(control, result["recall"]))


def accuracy(arm: ArmRuns, control: str = UNTOUCHED) -> list[Mean | None]:
    """The share of correct answers in each bin, over seeds."""

    def of(i: int) -> Quantity:
        return lambda result: measured(result, control)["accuracy"][i]

    return [arm.mean(of(i)) for i in range(len(edges_of(arm)) - 1)]


def at_place(arm: ArmRuns, control: str, place: str) -> Mean | None:
    return arm.mean(lambda result: measured(result, control)["by_place"][place])


def beyond_base(arms: Sequence[ArmRuns], base: ArmRuns) -> dict[str, Measure]:
    """The correct answers in the whole bins that one layer of the arm with slots sees, and one of ``base``
    doesn't."""
    low, high = sees_back(base), max((sees_back(arm) for arm in arms if arm.name == SLOTS), default=0)
    edges = [edge for edge in edges_of(arms[0]) if low <= edge <= high]  # of the whole bins between them
    if len(edges) < 2:
        return {}
    far = f"set {edges[0]:,} to {edges[-1]:,} tokens ago"
    label, of = f"correct answers about values that were {far}", right_between(edges[0], edges[-1])
    return {far: Measure(label, of, ".1f", " %", " points", 100, 1)}


def recall_claim(
    arms: Sequence[ArmRuns], base: ArmRuns, beyond: Mapping[str, Measure], folder: Path
) -> list[str]:
    if base.first.config["recall"]["measured_for"] == "choosing":
        return [prose("choosing")]
    both = [arm for arm in arms if arm is base or arm.name == SLOTS]
    if len(both) < 2 or not beyond:
        return [prose("not_both")]
    [(far, measure)] = beyond.items()
    chance = 100 / base.first.config["recall"]["stream"]["values"]
    shares = [(measure.shown(arm.mean(measure.of)), arm.label) for arm in both]
    shown = prose("recalled", far=far, shares=shares, chance=f"{chance:.0f}")
    return [shown, *claims(both, base, measure, folder)]


def recall_figures(arms: Sequence[ArmRuns], controlled: Sequence[ArmRuns], folder: Path) -> list[str]:
    """Correct answers by distance: of all ``arms``, and of each ``controlled`` one with a changed memory."""
    lines, seeds = line_styles([arm.name for arm in arms]), max(len(arm.results) for arm in arms)
    x, y = "tokens since the value was set", "answered correctly (%)"

    def series(arm: ArmRuns, control: str, line: plotting.LineStyle, label: str) -> Series:
        points = [(i + 0.5, mean) for i, mean in enumerate(accuracy(arm, control)) if mean]
        return Series(label, points, line, scale=100)  # in the middle of each bin

    def draw_reaches(axes: Axes) -> None:
        draw_bins(axes, arms[0])
        for arm in arms:
            color = lines[arm.name]["color"]
            axes.axvline(axis_position(sees_back(arm), arm), color=color, linewidth=0.8, zorder=0)

    def draw_slots(axes: Axes, arm: ArmRuns) -> None:
        draw_bins(axes, arm)
        model = arm.first.config["model"]
        memory = axis_position(model["segment_len"] + int(np.max(model["mem_len"])), arm)
        end = max(axis_position(sees_back(arm), arm), memory)
        axes.axvspan(memory, end, color="#000000", alpha=0.05, linewidth=0)

    def controls(arm: ArmRuns) -> Panel:
        of_control = CONTROL_LINES | {UNTOUCHED: plotting.BLACK | {"linestyle": "-", "marker": "o"}}
        many = [series(arm, control, of_control[control], control) for control in control_names(arm)]
        return Panel(y, many, arm.label, partial(draw_slots, arm=arm))

    by_arm = Panel(y, [series(arm, UNTOUCHED, lines[arm.name], arm.label) for arm in arms], "", draw_reaches)
    figures = {
        "recall_accuracy": ("Share of correct answers, by how long ago the value was set", [by_arm]),
        "recall_controls": ("The same with changed memories", [*map(controls, controlled)]),
    }
    drawn = [
        curves(folder, name, title, prose(name, seeds=seeds), x, panels)
        for name, (title, panels) in figures.items()
    ]
    return [figure for figure in drawn if figure]


def draw_bins(axes: Axes, arm: ArmRuns) -> None:
    """All bins are equally wide, with // where they begin to span more."""
    edges, chance = edges_of(arm), 100 / arm.first.config["recall"]["stream"]["values"]
    axes.axhline(chance, color=plotting.GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    beside = axes.get_yaxis_transform()
    axes.text(1.01, chance, "chance", transform=beside, va="center", fontsize=7, color="#666666")
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=45, fontsize=8)
    axes.set_xlim(0, len(edges) - 1)
    axes.set_ylim(0, 101)
    axes.grid(visible=False, axis="x")
    widths = np.diff(edges)
    mark: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8}
    mark["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    for i in 1 + np.flatnonzero(widths[1:] != widths[:-1]):
        axes.annotate("//", (i, 0), (4, 0), **mark)


def axis_position(distance: float, arm: ArmRuns) -> float:
    edges = edges_of(arm)
    return float(np.interp(distance, edges, range(len(edges))))
