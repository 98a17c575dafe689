"""The columns of a report on arms: each measures all arms, and all differences between an arm and its rival.
They become tables, a figure, ``results.json`` and ``results.csv``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from memformers.common.files import csv_text, json_value, write_text
from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure, Quantity
from memformers.report.data import Block, Cell, Table
from memformers.report.numbers import DASH
from memformers.runs.folder import RESULTS, TABLE

ArmsByTask = Mapping[str, Sequence[ArmRuns]]
"""The arms of each task that has begun."""
Labels = Mapping[str, str]
"""The label of each arm by its name, in the order of the rows."""
Pairs = Sequence[tuple[str, str]]
"""Arms and their rivals."""
Drawing = tuple[Figure, str] | None
"""A figure and the text below it."""
Row = list[str | Cell]


@dataclass(frozen=True)
class Column:
    name: str
    """No other column of the experiment has it."""
    measure: Measure
    arms: Sequence[ArmRuns]

    def mean(self, name: str) -> Mean | None:
        """The mean of the arm ``name`` over its seeds."""
        for arm in self.arms:
            if arm.name == name:
                return arm.mean(self.measure.of)
        return None

    def difference(self, name: str, rival: str) -> Mean | None:
        """The mean of the arm ``name`` minus its ``rival``, paired by seed."""
        arms = {arm.name: arm for arm in self.arms}
        if name not in arms or rival not in arms:
            return None
        return arms[name].minus(arms[rival], self.measure.of)


ColumnsByTable = Mapping[str, Sequence[Column]]
"""The columns of each table, by its title; the first table has the title ""."""


def correct(label: str, share: Quantity) -> Measure:
    """The ``share`` of correct answers, in percent."""
    return Measure(label, share, ".1f", " %", " points", 100, 1)


def make_tables(columns: Sequence[Column], pairs: Pairs, labels: Labels) -> list[Block]:
    """The means of all arms, and the differences of all pairs."""
    means: list[Row] = []
    for name, label in labels.items():
        mean_cells = [column.measure.shown(column.mean(name)) for column in columns]
        means.append([label, *mean_cells])
    differences: list[Row] = []
    for name, rival in pairs:
        cells = [column.measure.cell(column.difference(name, rival)) for column in columns]
        differences.append([f"{labels[name]}, minus {labels[rival]}", *cells])
    return [*make_table("arm", columns, means), *make_table("difference", columns, differences)]


def make_table(head: str, columns: Sequence[Column], rows: Sequence[Row]) -> list[Table]:
    """A table of the ``rows``, which are a name and its cells, that have a value; none without."""
    rows_with_values = [row for row in rows if set(row[1:]) - {DASH}]
    if not rows_with_values:
        return []
    names = [column.name for column in columns]
    return [Table([head, *names], rows_with_values, has_numbers=True)]


def draw_differences(columns: Sequence[Column], pairs: Pairs, labels: Labels) -> Drawing:
    """A panel for each column, in which each pair has its difference, and the text below."""
    # By pair, its difference in each column.
    differences: dict[tuple[str, str], list[Mean | None]] = {}
    for pair in pairs:
        by_column = [column.difference(*pair) for column in columns]
        if any(by_column):
            differences[pair] = by_column
    if not differences:
        return None

    # Where all pairs have one rival, the caption names it; otherwise, each line does.
    rivals = {labels[rival] for _, rival in differences}
    has_one_rival = len(rivals) == 1
    names = []
    for name, rival in differences:
        names.append(labels[name] if has_one_rival else f"{labels[name]}, minus {labels[rival]}")

    height = 0.5 + 0.2 * len(differences)  # inches, 0.2 for each line
    figure, panels = plotting.panels([height] * len(columns))
    for i, (column, axes) in enumerate(zip(columns, panels, strict=True)):
        points = []
        for line_number, by_column in enumerate(differences.values()):
            difference = by_column[i]
            if difference:
                points.append((float(line_number), difference))
        line = plotting.BLUE | {"linestyle": "none"}
        series = plotting.Series("", points, line, scale=column.measure.scale)
        plotting.draw_marks(axes, [series], horizontal=True)
        plotting.style(axes, title=f"{column.name}: difference{column.measure.unit_of_differences}")
        plotting.categories(axes, names)
        axes.axvline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    against = f' to "{rivals.pop()}"' if has_one_rival else "s of rivals"
    return figure, f"The difference{against}, paired by seed. Lines are 95 % intervals by Student's t."


def write_results(
    columns: Sequence[Column], pairs: Pairs, labels: Labels, folder: Path, facts: Mapping[str, Any]
) -> None:
    """Write ``facts``, the means of arms and the differences of pairs as results.json, and values from seeds
    as results.csv."""
    means = []
    for name, label in labels.items():
        by_column = {column.name: column.mean(name) for column in columns}
        means.append({"arm": name, "label": label, **measured_only(by_column)})
    differences = []
    for name, rival in pairs:
        by_column = {column.name: column.difference(name, rival) for column in columns}
        differences.append({"arm": name, "minus": rival, **measured_only(by_column)})
    # Arms without a measure have no value for it, rather than null.
    write_rows(folder / RESULTS, {**facts, "results": [*means, *differences]})

    by_seed = []
    for column in columns:
        for arm in column.arms:
            for seed, value in arm.values(column.measure.of).items():
                by_seed.append((column.name, arm.name, seed, value))
    write_text(folder / TABLE, csv_text(("measure", "arm", "seed", "value"), by_seed))


def measured_only(by_column: Mapping[str, Mean | None]) -> dict[str, Mean]:
    return {name: mean for name, mean in by_column.items() if mean}


def write_rows(path: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as JSON with a line for each value and for each element of a list."""
    lines = []
    for name, value in data.items():
        text = json_line(value)
        if isinstance(value, list):
            elements = ",\n".join(map(json_line, value))
            text = f"[\n{elements}\n]"
        lines.append(f"{json_line(name)}: {text}")
    values = ",\n".join(lines)
    write_text(path, f"{{\n{values}\n}}\n")


def json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=json_value)
