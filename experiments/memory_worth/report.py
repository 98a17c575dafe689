"""The report of what memory is worth: the gain of each memory by budget and by how far back a word last
occurred, what swapped and zeroed slots cost, and each seed's numbers as JSON and CSV."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from experiments.columns import Measured, measured, seeds_csv
from experiments.memory_worth.arms import ALL, KINDS, VARIANTS, rivals_of
from memformers.common.files import read_json, write_json, write_text
from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure, Quantity, arms_of
from memformers.report.markdown import number, table
from memformers.report.page import write_page
from memformers.report.provenance import facts_table
from memformers.report.sections import costs_table, warnings
from memformers.runs.folder import RESULTS, TABLE
from memformers.runs.reader import read_runs

BITS_PER_BYTE = Measure("bits per byte", "bits_per_byte")
MEASURED = "by_distance.json"
"""In a run's folder: the loss by group, in nats per token."""
READ, EDGES = 4096, (1, 64, 128, 256, 512, 1024, 2048)
"""Tokens of each document that are read, and edges of the groups of distances, in tokens."""
DISTANCE, ALL_TOKENS = "by_distance", "all"
SLOTS_CHANGED, TWICE = ("slots zeroed", "slots swapped"), "memory twice as long"
"""Ways to read, beside that of the training."""
GROUPS = {
    DISTANCE: "tokens since the word last began",
    "by_place": "tokens of the document before it",
    "by_word": "the token is of",
}
"""The groupings of tokens, each with the head of its column."""
LOOKS = {
    "xl-64": plotting.PINK, "slots-32-32": plotting.SKY, "xl-256": plotting.ORANGE,
    "slots-64-192": plotting.GREEN, "slots-64-192-c2": plotting.BLUE, "slots-64-192-c8": plotting.BLACK,
    "more-positions": plotting.SKY | {"marker": "D"}, "most-positions": plotting.PINK | {"marker": "v"},
    "more-positions-upper": plotting.GREEN | {"marker": "D"},
    "most-positions-upper": plotting.BLACK | {"marker": "D"},
    "most-positions-upper-c2": plotting.SKY | {"marker": "v"},
    "means-upper": plotting.BLUE | {"marker": "v"}, "xl-upper": plotting.ORANGE | {"marker": "v"},
    "xl-832": plotting.AMBER,
}  # fmt: skip
Budgets = Mapping[int, Sequence[ArmRuns]]
"""By the tokens of a training run, the arms that have finished and measured training runs."""


def in_group(title: str, group: str, control: str = "untouched") -> Quantity:
    """The loss of a group of tokens under a control, in nats per token, of a run's result."""

    def of(result: Mapping[str, Any]) -> float | None:
        found: float | None = result[title].get(group, {}).get(control)
        return found

    return of


def read_arms_of(folder: Path) -> list[ArmRuns]:
    """The arms in ``folder``, whose results have the losses by group too."""
    runs = [run for run in read_runs(folder) if run.result and (run.folder / MEASURED).exists()]
    for run in runs:
        run.label = ALL[run.arm].label if run.arm in ALL else run.label
        run.result = {**(run.result or {}), **read_json(run.folder / MEASURED)}
    return arms_of(runs)


def write_report(folder: Path) -> Path:
    """Write the report of all budgets in ``folder``, with each seed's results as CSV and JSON; returns its
    page."""
    places = sorted(
        (path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    everything = {int(path.name): arms for path in places if (arms := read_arms_of(path))}
    write_results(everything, folder)
    kinds = {b: [arm for arm in arms if arm.name not in VARIANTS] for b, arms in everything.items()}
    budgets = {b: arms for b, arms in kinds.items() if arms} or everything
    largest, arms = max(budgets.items())
    last = folder / str(largest)
    parts = ["# What memory is worth on a long text", *warnings(arms, arms[0], last)]
    without = any(arm.name == "none" for arm in arms)  # what a gain is measured against
    gains = [gains_figure(budgets, folder), gains_table(budgets)] if without else []
    where = [groups_figure(largest, arms, folder)] if without else []
    for title in GROUPS:
        where += [groups_table(arms, title)] * without + [groups_pairs_table(arms, title)]
    parts += [
        *section("The gain of each memory", *gains),
        *section("At equal keys", pairs_table(budgets, KINDS)),
        *section("With one setting changed", pairs_table(everything, VARIANTS)),
        *section("Where it pays", *where),
        *section("Swapped and zeroed slots", controls_table(arms, SLOTS_CHANGED)),
        *section("Memory twice as long as in training", controls_table(arms, [TWICE])),
        *section(f"What each costs, at {largest:,} tokens", costs_table(arms, arms[0])),
        *section("How it was made", METHOD, facts_table(arms, last)),
    ]
    return write_page(parts, folder)


def section(title: str, *parts: str) -> list[str]:
    """Those of the ``parts`` that show something, under their ``title``; nothing if none does."""
    shown = [part for part in parts if part]
    return [f"## {title}", *shown] if shown else []


METHOD = (
    "Each arm is trained from the same seeds, with the same network, on the same segments in the same order; "
    "only the memory differs. ± is half the width of a 95 % interval over seeds, by Student's t, of the "
    "difference from the same seed; it says nothing about other texts. No setting of the training was chosen "
    f"on this text. Losses by distance are of the first {READ:,} tokens of some of the held-out documents "
    "that are so long, each read from an empty memory. A word may be a name of a program. Its distance is "
    "the number of tokens from where it last began to where it begins again; all of its tokens count. "
    "Words of several tokens are those that are too rare to be a token, names of programs above all."
)


def gain(arm: ArmRuns, arms: Sequence[ArmRuns], quantity: Quantity) -> Mean | None:
    """The quantity of ``arm`` minus that of no memory, paired by seed; None for no memory itself."""
    base = next((other for other in arms if other.name == "none"), None)
    return arm.minus(base, quantity) if base and base is not arm else None


def line_styles(names: Sequence[str]) -> dict[str, plotting.LineStyle]:
    """The look of each arm, the same in all figures."""
    others = [name for name in names if name not in LOOKS and name != "none"]
    return LOOKS | dict(zip(others, cycle(plotting.PALETTE), strict=False))


def labels_of(budgets: Budgets) -> dict[str, str]:
    """The label of each arm that was trained at any budget, by its name, in the order of the known arms."""
    found = {arm.name: arm.label for arms in budgets.values() for arm in arms}
    return {name: found[name] for name in (*KINDS, *found) if name in found}


def columns_of(budgets: Budgets) -> list[Measured]:
    """A column of bits per byte for each budget."""
    return [measured(f"{budget:,} tokens", BITS_PER_BYTE, arms) for budget, arms in budgets.items()]


def gains_table(budgets: Budgets) -> str:
    """The bits per byte without memory at each budget, and a row for each memory: how many more it has."""
    columns, show = columns_of(budgets), BITS_PER_BYTE.shown_difference
    rows = [
        [label, *(BITS_PER_BYTE.shown(column.mean(name)) for column in columns)]
        if name == "none"
        else [f"{label}, minus that", *(show(column.difference(name, "none")) for column in columns)]
        for name, label in labels_of(budgets).items()
    ]
    return table(["bits per byte", *(column.head for column in columns)], rows)


def pairs_table(budgets: Budgets, names: Iterable[str]) -> str:
    """A row for each of the ``names`` and each of its rivals that it was trained beside: the difference in
    bits per byte at each budget, paired by seed; empty if there is none."""
    columns, rows = columns_of(budgets), []
    for name, rival in [(arm, rival) for arm in names for rival in rivals_of(arm)]:
        means = [column.difference(name, rival) for column in columns]
        if any(means):
            shown = map(BITS_PER_BYTE.shown_difference, means)
            rows.append([f"{ALL[name].label}, minus {ALL[rival].label}", *shown])
    return table(["bits per byte", *(column.head for column in columns)], rows) if rows else ""


def gains_figure(budgets: Budgets, folder: Path) -> str:
    """The bits per byte that each memory saves against no memory, by the tokens of the training; empty if
    there is no memory."""
    labels = {name: label for name, label in labels_of(budgets).items() if name != "none"}
    looks, many = line_styles([*labels]), []
    for name in labels:
        of = zip(budgets, (column.difference(name, "none") for column in columns_of(budgets)), strict=True)
        points = [(float(budget), saved(mean)) for budget, mean in of if mean]
        many.append(plotting.Series(labels[name], points, looks[name]))
    if not many:
        return ""
    figure, [axes] = plotting.panels([2.9])
    plotting.draw_lines(axes, many)
    plotting.style(axes, "tokens of the training run", "bits per byte saved")
    plotting.octave_axis(axes, list(budgets))
    axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    caption = (
        "How many bits per byte of the held-out text each memory saves against the network without memory."
    )
    return plotting.save_figure(figure, folder, "gains", "The gain by budget", caption)


def groups_of(arms: Sequence[ArmRuns], title: str = DISTANCE) -> list[str]:
    """The groups of tokens of a grouping, in order."""
    return list(dict.fromkeys(name for arm in arms for r in arm.results.values() for name in r[title]))


def groups_figure(budget: int, arms: Sequence[ArmRuns], folder: Path) -> str:
    """What each memory saves against no memory, by how far back the word last occurred; empty if there is no
    memory."""
    groups = groups_of(arms)
    looks, many = line_styles([arm.name for arm in arms]), []
    for arm in (arm for arm in arms if arm.name != "none"):
        means = [gain(arm, arms, in_group(DISTANCE, group)) for group in groups]
        points = [(float(i), saved(mean)) for i, mean in enumerate(means) if mean]
        many.append(plotting.Series(arm.label, points, looks[arm.name]))
    if not many:
        return ""
    figure, [axes] = plotting.panels([3.2])
    plotting.draw_marks(axes, many, plotting.APART / 2)
    plotting.style(axes, "tokens since the word last began", "nats per token saved")
    plotting.categories(axes, groups, rotation=40)
    axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    caption = (
        f"How much each memory lowers the loss of words, after training runs of {budget:,} tokens. First: "
        "words that had not occurred in the document."
    )
    return plotting.save_figure(figure, folder, "distances", "The gain by distance", caption)


def saved(more: Mean) -> Mean:
    """A gain as what it saves, a positive number where a memory is better."""
    return Mean(-more.mean, more.half_width, more.n)


def groups_table(arms: Sequence[ArmRuns], title: str) -> str:
    """A row for each group of a grouping: how many tokens it has, the loss without memory, and how much more
    it is with each memory, in nats per token."""
    base, *others = arms
    rows = []
    for group in groups_of(arms, title):
        tokens, loss = base.first.result and base.first.result[title].get(group), in_group(title, group)
        shown = (number(gain(arm, arms, loss), ".3f", signed=True) for arm in others)
        rows.append([group, f"{tokens['tokens'] if tokens else 0:,}", number(base.mean(loss), ".3f"), *shown])
    heads = [GROUPS[title], "tokens", base.label, *(f"{arm.label}, minus that" for arm in others)]
    return table(heads, rows)


def groups_pairs_table(arms: Sequence[ArmRuns], title: str) -> str:
    """A row for each group of a grouping: how much more the loss is with slots than with as many positions,
    in nats per token; pairs of one seed only where no pair has more. Empty if no such pair was trained."""
    by_name = {arm.name: arm for arm in arms}
    every = [(arm, by_name[r]) for n, arm in by_name.items() for r in rivals_of(n) if r in by_name]
    over_seeds = [(arm, rival) for arm, rival in every if min(len(arm.results), len(rival.results)) > 1]
    pairs = over_seeds or every
    rows = [
        [
            group,
            *(number(arm.minus(rival, in_group(title, group)), ".3f", signed=True) for arm, rival in pairs),
        ]
        for group in groups_of(arms, title)
    ]
    heads = [GROUPS[title], *(f"{arm.label}, minus {rival.label}" for arm, rival in pairs)]
    return table(heads, rows) if pairs else ""


def controls_table(arms: Sequence[ArmRuns], controls: Sequence[str]) -> str:
    """A row for each group, and a column for each arm and control that it was read under: how much the loss
    rises, in nats per token. Empty if no arm was read under one."""
    groups, columns = groups_of(arms), {}
    for arm in arms:
        for control in controls:
            means = [arm.minus(arm, in_group(DISTANCE, g, control), in_group(DISTANCE, g)) for g in groups]
            if any(means):
                columns[f"{arm.label}: {control}"] = [number(mean, ".3f", signed=True) for mean in means]
    rows = [*zip(groups, *columns.values(), strict=True)]
    return table([GROUPS[DISTANCE], *columns], rows) if columns else ""


def write_results(budgets: Budgets, folder: Path) -> None:
    """Write each seed's numbers as JSON, and its bits per byte as CSV."""
    found = {
        str(budget): {
            arm.name: {
                seed: {k: r[k] for k in ("loss", "bits_per_byte", *GROUPS)} for seed, r in arm.results.items()
            }
            for arm in arms
        }
        for budget, arms in budgets.items()
    }
    write_json(folder / RESULTS, found)
    columns = [measured(str(budget), BITS_PER_BYTE, arms) for budget, arms in budgets.items()]
    write_text(folder / TABLE, seeds_csv(columns, ["tokens", "memory", "seed", "bits per byte"]))
