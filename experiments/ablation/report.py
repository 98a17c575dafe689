"""The rows of the ablation, each an arm of both tasks; its report, its figures, and its numbers as
``results.json`` and ``results.csv``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.columns import Measured, differences_table, measured, seeds_csv
from memformers.common.files import write_json, write_text
from memformers.common.intervals import Mean
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.recall import SETTINGS, compressive, paper_ablation, sees_back, transformer_xl
from memformers.models.config import ModelConfig
from memformers.report import plotting
from memformers.report.arms import BITS, ArmRuns, Measure, arms_of
from memformers.report.markdown import number, plain, table
from memformers.report.page import write_page
from memformers.report.provenance import facts_table
from memformers.report.recall import right_between
from memformers.report.sections import claims, costs_table, warnings
from memformers.runs import plan
from memformers.runs.folder import FACTS, REPORT, RESULTS, TABLE
from memformers.runs.reader import read_runs


@dataclass(frozen=True)
class Row:
    """One memory of the ablation."""

    name: str
    """The name on the command line and of its arms."""
    label: str
    """The name in tables and figures."""
    paper: float | None = None
    """Bits per character on enwik8 (Rae et al. 2020, arXiv 1911.05507), if the paper has this row."""


BASE_ROW = Row("conv", "conv., attention", 0.973)
"""The row that the others are compared with: the paper's own choice."""
ROWS = (
    Row("transformer-xl", "Transformer-XL, equal keys"),
    Row("bptt", "conv., BPTT", 0.996),
    Row("max", "max pooling", 0.986),
    Row("auto-encoding", "conv., auto-encoding", 0.984),
    Row("mean", "mean pooling", 0.982),
    Row("most-used", "most-used", 0.980),
    Row("dilated", "dilated conv., attention", 0.977),
    BASE_ROW,
    Row("conv-from-mean", "conv., from the mean"),
    Row("upper-half", "conv., upper layers only"),
    Row("gated", "conv., attention, gated"),
)


def arms_of_rows(names: Sequence[str], model: ModelConfig) -> tuple[plan.Arm, ...]:
    """The arms of the rows of these names, in the order of the table; of all rows if none is named. All have
    the lengths of ``model``, with two exceptions: Transformer-XL has as many keys in its memory alone, and
    the row with slots only in the upper half of the layers has half as many slots."""
    arms = [
        *paper_ablation(model),
        transformer_xl("transformer-xl", keys_of_layers(model)),
        compressive("mean", model, compression="mean"),
        compressive("conv-from-mean", model, compression_start="mean"),
        compressive("gated", model, gate="gru"),
    ]
    by_name = {arm.name: arm for arm in arms}
    return tuple(
        replace(by_name[row.name], label=row.label) for row in ROWS if not names or row.name in names
    )


Arms = Mapping[str, Mapping[str, ArmRuns]]
"""By task, the rows that have finished training runs, by name, in the order of the table."""
TASKS = ("text", "recall")
FEWEST_TOKENS = 500_000
LOOKS: dict[str, plotting.LineStyle] = {
    "paper": plotting.BLACK | {"marker": "D", "linestyle": "none"},
    "bits_per_character": plotting.BLUE | {"linestyle": "none"},
    "right_beyond": plotting.ORANGE | {"linestyle": "none"},
    "right_within": plotting.GREEN | {"linestyle": "none"},
}
APART = 0.24
"""The distance between the marks of one row; rows have a distance of 1."""
MEANING = (
    "Bits per character are those of the held-out text, where fewer are better. Correct answers are those on "
    'a recall stream, where more are better and chance is 25 %. "Beyond" counts the questions about values '
    'that were set {} to {} positions ago, which one layer sees only in its slots. "Within" counts those '
    "about later values, which one layer of a Transformer-XL with the same number of keys sees too."
)
PAPER = (
    "The paper's results are bits per character on enwik8, without intervals (Rae et al. 2020, arXiv "
    "1911.05507)."
)
LIMITS = (
    "The ablation doesn't show which compression is best on other texts, or at the paper's size. Our "
    "networks are small and were trained for minutes; the paper's networks are large, and the paper gives no "
    "intervals. By chance, one interval in twenty leaves out zero, so a single interval that leaves out zero "
    "is weak evidence. In our BPTT, the gradient reaches back through one compression (bptt=1), and our "
    "most-used chooses among the positions of each slot; the paper may do this in another way. The row with "
    "slots only in the upper layers has half as many slots; all other rows have the same number of keys."
)


def band() -> tuple[int, int]:
    """The distances, in positions, that one layer reaches only with slots: from the end of Transformer-XL's
    memory with the same number of keys, to the end of the slots."""
    setting = SETTINGS["near"]
    equal_keys, slots = (sees_back(setting.run(arm).train.model) for arm in ("transformer-xl", "conv"))
    return equal_keys, slots


def measures(task: str) -> dict[str, Measure]:
    """The measures of ``task``: "beyond" and "within" refer to the distances that one layer of Transformer-XL
    with as many keys sees."""
    if task == "text":
        return {"bits_per_character": BITS}
    reaches = {"beyond": band(), "within": (0, band()[0])}
    return {
        f"right_{name}": Measure(
            f"correct answers {name}", right_between(*reach), ".1f", " %", " points", scale=100, better=1
        )
        for name, reach in reaches.items()
    }


def read_arms(folder: Path) -> Arms:
    """The rows in ``folder`` with the training runs of each, for each task of which any has finished."""
    found = {}
    for task in TASKS:
        arms = arms_of(read_runs(folder / task, task)) if any((folder / task).glob(f"*/{FACTS}")) else []
        by_name = {arm.name: arm for arm in arms if arm.results}
        if by_name:
            found[task] = {row.name: by_name[row.name] for row in ROWS if row.name in by_name}
    return found


Columns = Mapping[str, Measured]
"""The measures of both tasks, by their names in the results."""


def title_of(by_name: Mapping[str, ArmRuns]) -> str:
    """The name of the text or the stream of a task's arms."""
    return str(next(iter(by_name.values())).first.facts["corpus"]["name"])


def write_report(folder: Path) -> Path:
    """Write the report of the training runs in ``folder``, of which at least one has finished, and their
    numbers; returns its page."""
    arms = read_arms(folder)
    columns = {
        name: measured(f"{title_of(by_name)}: {measure.label}", measure, list(by_name.values()))
        for task, by_name in arms.items()
        for name, measure in measures(task).items()
    }
    rows = [row for row in ROWS if any(row.name in column.arms for column in columns.values())]
    write_results(columns, rows, folder)
    parts = ["# The ablation: compression functions and what they learn from"]
    told, costs, made = ["## What it shows"], ["## What each row costs"], ["## How it was made"]
    for task, by_name in arms.items():
        some = list(by_name.values())
        base = by_name.get(BASE_ROW.name)
        parts += warnings(some, base or some[0], folder / task, fewest_tokens=FEWEST_TOKENS)
        heading = f"### {plain(title_of(by_name))}"
        told.append(heading)
        told += (base and claims(some, base, list(measures(task).values()), folder)) or [
            f'Nothing is compared, since there are no training runs of "{BASE_ROW.label}" and of another row.'
        ]
        costs += [heading, costs_table(some, base or some[0])]
        made += [heading, facts_table(some, folder / task)]
    parts.append(MEANING.format(*band()))
    of_rows, names = [*columns.values()], {row.name: row.label for row in rows}
    if any(column.difference(name, BASE_ROW.name) for column in of_rows for name in names):
        differences = differences_table(of_rows, names, BASE_ROW.name, "row")
        parts += [f'## Differences to "{BASE_ROW.label}"', differences]
        told.append(differences_figure(columns, rows, folder))
    cells = [
        [row.label, number(row.paper, ".3f"), *(c.measure.shown(c.mean(row.name)) for c in of_rows)]
        for row in rows
    ]
    heads = ["row", "paper: enwik8", *(column.head for column in of_rows)]
    parts += [*told, LIMITS, "## Results beside the paper's", PAPER]
    parts += [table(heads, cells), values_figure(columns, rows, folder)]
    where = " and ".join(f"`{task}/{REPORT}`" for task in arms)
    made.append(
        f"± is half the width of a 95 % interval over seeds, by Student's t. All seeds have the same "
        f"held-out text, and each has measured streams of its own. Every setting, curve and sample is in "
        f"{where}; every value is in `{RESULTS}` and `{TABLE}`."
    )
    return write_page([*parts, *costs, *made], folder)


def values_figure(columns: Columns, rows: Sequence[Row], folder: Path) -> str:
    """A panel for the paper's figures, and one for each task."""
    paper = [(float(i), Mean(row.paper, float("nan"), 1)) for i, row in enumerate(rows) if row.paper]
    found = {"the paper, enwik8: bits per character": [plotting.Series("", paper, LOOKS["paper"])]}
    for name, column in columns.items():
        label = "" if column.measure is BITS else column.measure.label
        panel = f"{title_of(column.arms)}: {'answered correctly (%)' if label else BITS.label}"
        means = [column.mean(row.name) for row in rows]
        found.setdefault(panel, []).append(series(name, column, means, label))
    caption = (
        "The rows of the table, in the paper's order. The first panel has the paper's results on enwik8. "
        "Fewer bits are better. Lines are 95 % intervals over seeds, by Student's t."
    )
    return rows_figure("ablation", "Results of each row", caption, found, rows, folder)


def differences_figure(columns: Columns, rows: Sequence[Row], folder: Path) -> str:
    """A panel for each measure, with a line at zero."""
    found = {
        f"{c.measure.label}, difference{c.measure.unit_of_differences and ' (points)'}": [
            series(name, c, [c.difference(row.name, BASE_ROW.name) for row in rows])
        ]
        for name, c in columns.items()
    }
    caption = (
        f'The value of each row minus that of "{BASE_ROW.label}" from the same seed. Lines are 95 % '
        f"intervals by Student's t; a row is claimed to differ only if its interval leaves out zero."
    )
    title = f'Differences to "{BASE_ROW.label}"'
    return rows_figure("differences", title, caption, found, rows, folder)


def series(name: str, column: Measured, values: Sequence[Mean | None], label: str = "") -> plotting.Series:
    """The ``values`` of all rows, in the ``column`` of this ``name``, in a figure."""
    points = [(float(i), value) for i, value in enumerate(values) if value]
    return plotting.Series(label, points, LOOKS[name], scale=column.measure.scale)


def rows_figure(
    name: str,
    title: str,
    caption: str,
    found: Mapping[str, Sequence[plotting.Series]],
    rows: Sequence[Row],
    folder: Path,
) -> str:
    """Panels by their titles, one below the other, each with all rows, the first on top."""
    figure, places = plotting.panels([0.5 + 0.2 * len(rows)] * len(found))
    for axes, (of_panel, many) in zip(places, found.items(), strict=True):
        plotting.draw_marks(axes, many, APART, horizontal=True)
        plotting.style(axes, title=of_panel)
        plotting.categories(axes, [row.label for row in rows], horizontal=True)
        if name == "differences":
            axes.axvline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    return plotting.save_figure(figure, folder, name, title, caption)


def write_results(columns: Columns, rows: Sequence[Row], folder: Path) -> None:
    """Write every value, mean and paired difference into ``folder``; half widths are of 95 % intervals by
    Student's t, None for one seed."""
    found = [
        {
            "name": row.name,
            "label": row.label,
            "paper_enwik8": row.paper,
            "measures": {name: column.mean(row.name) for name, column in columns.items()},
            "differences": {name: c.difference(row.name, BASE_ROW.name) for name, c in columns.items()},
        }
        for row in rows
    ]
    write_json(folder / RESULTS, {"base": BASE_ROW.name, "beyond": band(), "rows": found})
    by_name = [replace(column, head=name) for name, column in columns.items()]
    write_text(folder / TABLE, seeds_csv(by_name, ["measure", "row", "seed", "value"]))
