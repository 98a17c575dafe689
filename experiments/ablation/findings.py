"""The results of the ablation's trainings, over seeds: ``results.json`` and ``results.csv``."""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.ablation.rows import BASE_ROW, ROWS, Row
from memformers.common.files import replacing, write_json
from memformers.common.intervals import Mean, mean_of
from memformers.comparison.recall import SETTINGS, sees_back
from memformers.report.arms import Arm, Result
from memformers.report.recall import right_between
from memformers.runs.finished import FinishedRun, read_run
from memformers.runs.folder import RESULT, RESULTS, TABLE
from memformers.runs.plan import read_plan


@dataclass(frozen=True)
class Measure:
    """A quantity in the result of each training on one task."""

    name: str
    task: str
    label: str
    of: Callable[[Result], float | None]
    """Returns None if there was nothing to measure."""
    scale: float
    """The factor by which it is multiplied when it is shown: 100 for percent."""
    better: int
    """Whether more of it is better, 1, or less, −1."""


def band() -> tuple[int, int]:
    """The distances, in positions, that one layer reaches only with slots: from the end of Transformer-XL's
    memory with the same number of keys, to the end of the slots."""
    setting = SETTINGS["near"]
    equal_keys, slots = (sees_back(setting.run(arm).train.model) for arm in ("transformer-xl", "conv"))
    return equal_keys, slots


MEASURES = (
    Measure("bits_per_character", "text", "bits per character", lambda r: r["bits_per_character"], 1, -1),
    Measure("right_beyond", "recall", "right, beyond", lambda r: right_between(*band())(r), 100, 1),
    Measure("right_within", "recall", "right, within", lambda r: right_between(0, band()[0])(r), 100, 1),
)
"""The measures of both tasks: "beyond" and "within" refer to the distances that one layer of Transformer-XL
with as many keys sees."""


@dataclass(frozen=True)
class Findings:
    """The results of an ablation."""

    arms: dict[str, dict[str, Arm]]
    """By task, the finished runs of each row, by the row's name."""
    missing: tuple[str, ...]
    """Planned trainings that did not finish, in words."""

    @property
    def rows(self) -> list[Row]:
        """The rows that have results, in the order of the table."""
        return [row for row in ROWS if any(row.name in arms for arms in self.arms.values())]

    @property
    def measures(self) -> list[Measure]:
        """The measures of the tasks that have results."""
        return [measure for measure in MEASURES if measure.task in self.arms]

    @property
    def compared(self) -> bool:
        """Whether any row can be compared with the base."""
        return any(self.difference(measure, row) for measure in self.measures for row in self.rows)

    def first(self, task: str) -> FinishedRun:
        """A run that represents all runs of ``task`` in the properties that they share."""
        return next(iter(self.arms[task].values())).first

    def title(self, task: str) -> str:
        """The name of ``task``: that of its text or stream."""
        return str(self.first(task).facts["corpus"]["name"])

    def by_seed(self, measure: Measure, row: Row) -> dict[int, float]:
        """The values of ``row``, by seed."""
        arm = self.arms.get(measure.task, {}).get(row.name)
        found = {} if arm is None else {seed: measure.of(r) for seed, r in arm.results.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, measure: Measure, row: Row) -> Mean | None:
        """The mean over seeds; None without a value."""
        values = list(self.by_seed(measure, row).values())
        return mean_of(values) if values else None

    def difference(self, measure: Measure, row: Row) -> Mean | None:
        """The difference of ``row`` to the base, paired by seed, over the seeds of both: from the same seed
        they begin with the same weights and read the same data. None for the base, and without a common
        seed."""
        if row == BASE_ROW:
            return None
        ours, base = self.by_seed(measure, row), self.by_seed(measure, BASE_ROW)
        found = [ours[seed] - base[seed] for seed in ours if seed in base]
        return mean_of(found) if found else None


def read_findings(folder: Path) -> Findings:
    """All results of the two experiments in ``folder`` so far."""
    arms: dict[str, dict[str, Arm]] = {}
    missing: list[str] = []
    for task in ("text", "recall"):
        found: dict[str, list[FinishedRun]] = {}
        for place, row, seed in planned_runs(folder / task):
            if (place / RESULT).exists():
                found.setdefault(row.name, []).append(read_run(place))
            else:
                missing.append(f"{task}, {row.label}, seed {seed}")
        if found:
            arms[task] = {name: Arm(name, tuple(runs)) for name, runs in found.items()}
    return Findings(arms, tuple(missing))


def planned_runs(folder: Path) -> Iterator[tuple[Path, Row, int]]:
    """The runs of the experiment in ``folder`` that are rows of ours, finished or not."""
    rows = {row.name: row for row in ROWS}
    plan = read_plan(folder)
    for name, run in plan.runs.items() if plan else ():
        if run.arm in rows:
            yield folder / name, rows[run.arm], run.seed


def write_results(findings: Findings, folder: Path) -> None:
    """Write every value, mean and paired difference into ``folder``; half widths are of 95 % intervals by
    Student's t, None for one seed."""
    rows = [
        {
            "name": row.name,
            "label": row.label,
            "paper_enwik8": row.paper,
            "measures": {m.name: as_json(findings.mean(m, row)) for m in findings.measures},
            "differences": {m.name: as_json(findings.difference(m, row)) for m in findings.measures},
        }
        for row in findings.rows
    ]
    data = {"base": BASE_ROW.name, "beyond": band(), "missing": findings.missing, "rows": rows}
    write_json(folder / RESULTS, data)
    with replacing(folder / TABLE) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines(findings))


def as_json(value: Mean | None) -> dict[str, float | int | None] | None:
    """A mean without NaN, which JSON doesn't have."""
    if value is None:
        return None
    half = None if math.isnan(value.half_width) else value.half_width
    return {"mean": value.mean, "half_width": half, "seeds": value.n}


def lines(findings: Findings) -> Iterator[Sequence[Any]]:
    """The table: a line for each training and measure."""
    yield "row", "measure", "seed", "value"
    for row in findings.rows:
        for measure in findings.measures:
            for seed, value in findings.by_seed(measure, row).items():
                yield row.name, measure.name, seed, value
