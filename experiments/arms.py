"""An experiment as a list of arms: the command that trains each of them on each task, and their report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure

from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.common.files import csv_text, json_value, write_text
from memformers.common.intervals import Mean
from memformers.comparison.arms import Arm, read_arms, with_settings
from memformers.comparison.experiment import Experiment, run_experiments
from memformers.comparison.recall.setup import USUAL_JOBS
from memformers.comparison.task import Task
from memformers.data.benchmarks import PYTHON_SOURCE
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure, Quantity, arms_of
from memformers.report.claims import warnings
from memformers.report.data import Block, Cell, ReportData, Section, Table, Text, prose
from memformers.report.made import facts_of, facts_table
from memformers.report.numbers import DASH
from memformers.report.rendering import Report, claim_report, write_files
from memformers.report.sections import costs_table
from memformers.runs.folder import EXPERIMENT, FACTS, RESULTS, TABLE
from memformers.runs.plan import read_plan
from memformers.runs.reader import Run, read_runs
from memformers.training.config import TrainConfig

QUICK_TOKENS = 16_384  # of each training run with --quick
METHOD = (
    "± is half the width of a 95 % interval over seeds, by Student's t. Differences are paired by seed; one "
    "whose interval contains zero is grey. By chance, one interval in twenty leaves out zero. The report of "
    "each task, with its settings and curves, is in the folder of its name."
)
COSTS = {  # by their names in the report's table, and in a run's facts
    "keys per layer, without the segment's": "keys", "keys per layer, on average": "mean_keys",
    "state per stream": "state_bytes",
    "attention operations per token": "attention_operations", "parameters": "parameters",
}  # fmt: skip
Tasks = Mapping[str, Sequence[ArmRuns]]  # the arms of each task that has begun


def write_rows(path: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as JSON with a line for each value and for each element of a list."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=json_value)

    lists = {k: "[\n" + ",\n".join(map(line, v)) + "\n]" for k, v in data.items() if isinstance(v, list)}
    values = [f"{line(key)}: {lists.get(key) or line(value)}" for key, value in data.items()]
    write_text(path, "{\n" + ",\n".join(values) + "\n}\n")


@dataclass(frozen=True)
class Column:
    name: str  # which no other column of the experiment has
    measure: Measure
    arms: Sequence[ArmRuns]

    def mean(self, name: str) -> Mean | None:
        return next((arm.mean(self.measure.of) for arm in self.arms if arm.name == name), None)

    def difference(self, name: str, rival: str) -> Mean | None:
        pair = {arm.name: arm for arm in self.arms if arm.name in (name, rival)}
        return pair[name].minus(pair[rival], self.measure.of) if len(pair) == 2 else None


@dataclass(frozen=True)
class Variant:
    """An arm of a list: how it differs from the settings that a task's arms share."""

    name: str
    settings: Mapping[str, Any]
    label: str = ""
    rival: str = ""
    """The arm that it is compared with; empty: that of most arms."""

    def arm(self, base: TrainConfig) -> Arm:
        return Arm(self.name, with_settings(base, **self.settings), self.label)


Pairs = Sequence[tuple[str, str]]  # arms and their rivals
Drawn = tuple[Figure, str] | None  # a figure and what is said below it
Parts = Mapping[str, Sequence[Column]]  # the columns of each table, by its title; the first one has none


@dataclass(frozen=True)
class ArmsCommand(ExperimentCommand):
    """The options and the report of an experiment whose arms are a list."""

    title: ClassVar[str]
    method: ClassVar[str]
    base: ClassVar[str]  # the rival of arms that name no other one
    known: ClassVar[Sequence[Variant]] = ()
    usual: ClassVar[Sequence[str]] = ()  # the arms that are trained if none is named; empty: all
    arms: tuple[str, ...] = ()
    """Which arms: names from the list of the experiment, or your arms, such as 'mine:
    model=transformer-xl mem_len=320'. If none is given, those that the experiment is about."""
    seeds: Count = 3
    """How many times each arm is trained on each task. Intervals need at least 2."""
    jobs: Count = USUAL_JOBS
    """Training runs at a time, of one thread each."""
    quick: bool = False
    """Whether to only show that everything runs: one seed, and too few tokens to learn."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = [arm.name for arm in self.listed()]
        if unknown := [name for name in self.arms if ":" not in name and name not in known]:
            raise UserError(
                f"arm {unknown[0]!r} is unknown; there are {', '.join(known)}, and NAME: setting=value …"
            )
        if len(set(self.arms)) < len(self.arms):
            raise UserError(f"arms={' '.join(self.arms)} must name each arm once.")

    @classmethod
    def listed(cls) -> Sequence[Variant]:
        return cls.known

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        """By their tasks, the names of their sub-folders of ``folder``."""
        raise NotImplementedError

    def measures(self, task: str) -> Sequence[Measure]:
        """What the arms of a task are compared by; labels differ between tasks."""
        raise NotImplementedError

    def parts(self, tasks: Tasks) -> Parts:
        return {"": [Column(m.label, m, arms) for task, arms in tasks.items() for m in self.measures(task)]}

    def measure(self, folder: Path) -> None:
        """Measure what was trained in the ``folder`` of a task, beside what each run measured itself."""

    def result_of(self, run: Run) -> dict[str, Any]:
        """What is added to the result of a finished run for the measures."""
        return {}

    def about(self, arm: ArmRuns) -> dict[str, Any]:
        """What an arm costs, as far as it is known, and what else is kept of it."""
        return {shown: arm.first.facts[name] for shown, name in COSTS.items() if name in arm.first.facts}

    def chosen(self, base: TrainConfig, listed: Sequence[Variant] | None = None) -> tuple[Arm, ...]:
        """The arms to train, derived from ``base``, in the order of the ``listed`` ones, and then the
        user's."""
        names = self.arms or self.usual
        arms = []
        for variant in listed or self.listed():
            if not names or variant.name in names:
                arms.append(variant.arm(base))
        described = [text for text in names if ":" in text]
        return (*arms, *read_arms(described, base))

    def experiment_on(
        self, task: Task[Any], base: TrainConfig, listed: Sequence[Variant] | None = None
    ) -> Experiment:
        """The chosen arms on a ``task``."""
        n_seeds = 1 if self.quick else self.seeds
        return Experiment(task, base, self.chosen(base, listed), seeds=n_seeds, jobs=self.jobs, threads=1)

    def experiment(self, folder: Path) -> Report:
        """Train and measure what ``folder`` doesn't have yet, and write the report."""
        return run_experiments(
            self.experiments(folder),
            folder,
            self.report,
            self.dashboard,
            resume=self.resume,
            measure=self.measure,
        )

    def rivals_of(self, name: str) -> Iterator[str]:
        rivals = {arm.name: arm.rival for arm in self.listed()}
        while name != self.base:
            name = rivals.get(name) or self.base
            yield name

    def report(self, folder: Path) -> Report:
        """Write the report of all tasks in ``folder``, or of the one that it is, and their results."""
        inside = sorted(folder.glob(f"*/{EXPERIMENT}"), key=lambda path: (len(path.parent.name), path))
        places = [path.parent for path in inside if any(path.parent.glob(f"*/{FACTS}"))] or [folder]
        tasks = {place.resolve().name: self.arms_in(place) for place in places}
        parts, listed = self.parts(tasks), [arm.name for arm in self.listed()]
        trained = {arm.name: arm.label for arms in tasks.values() for arm in arms if arm.results}
        labels = {name: trained[name] for name in (*listed, *trained) if name in trained}
        pairs = [(name, rival) for name in labels for rival in self.rivals_of(name) if rival in labels]
        task, arms = list(tasks.items())[-1]
        about = {"made": facts_of(arms, places[-1]), "arms": {arm.label: self.about(arm) for arm in arms}}
        claim_report(folder)
        write_results([c for columns in parts.values() for c in columns], pairs, labels, folder, about)
        notes: list[Text] = []
        for place, (name, of_task) in zip(places, tasks.items(), strict=True):
            for warning in warnings(of_task, of_task[0], place):
                notes.append(prose("in_task", warning=warning, task=name))
        tables: list[Block] = []
        figures: list[Block] = []
        sections: list[Section] = []
        for title, columns in parts.items():
            shown = rows_tables(columns, pairs, labels)
            if title:
                sections.append(Section(title, shown))
                continue
            tables += shown
            if drawn := self.figure(columns, pairs, labels):
                figure, caption = drawn
                figures.append(plotting.save_figure(figure, folder, self.name, self.title, [caption]))
        sections.append(Section(f"What each arm costs: {task}", [costs_table(arms)]))
        made = [f"{self.method} {METHOD}", *facts_table(arms, places[-1])]
        sections.append(Section("How it was made", made))
        data = ReportData(self.title, notes, [], None, tables, figures, sections, tables[:1])
        return write_files(data, folder)

    def figure(self, columns: Sequence[Column], pairs: Pairs, labels: Mapping[str, str]) -> Drawn:
        """A panel for each column, in which each pair has its difference, and what is said below."""
        differences = {pair: row for pair in pairs if any(row := [c.difference(*pair) for c in columns])}
        if not differences:
            return None
        base = {labels[rival] for _, rival in differences}
        names = [labels[a] if len(base) == 1 else f"{labels[a]}, minus {labels[b]}" for a, b in differences]
        figure, panels = plotting.panels([0.5 + 0.2 * len(differences)] * len(columns))
        for i, (column, axes) in enumerate(zip(columns, panels, strict=True)):
            points = [(float(at), mean) for at, of in enumerate(differences.values()) if (mean := of[i])]
            line = plotting.BLUE | {"linestyle": "none"}
            series = plotting.Series("", points, line, scale=column.measure.scale)
            plotting.draw_marks(axes, [series], horizontal=True)
            plotting.style(axes, title=f"{column.name}: difference{column.measure.unit_of_differences}")
            plotting.categories(axes, names)
            axes.axvline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
        against = f' to "{base.pop()}"' if len(base) == 1 else "s of rivals"
        return figure, f"The difference{against}, paired by seed. Lines are 95 % intervals by Student's t."

    def arms_in(self, place: Path) -> list[ArmRuns]:
        plan, listed = read_plan(place), {arm.name: arm for arm in self.listed()}
        runs = read_runs(place, plan.task if plan else "text")
        for run in runs:
            run.label = listed[run.arm].label if run.arm in listed else run.label
            run.result = run.result and run.result | self.result_of(run)
        return sorted(arms_of(runs), key=lambda arm: [*listed, arm.name].index(arm.name))


def prepared_python_source(folder: Path, vocab_size: int) -> str:
    """The path of the Python source code of this machine in subwords, prepared in ``folder``."""
    tokens = folder.resolve() / "tokens"
    if not tokens.exists():
        prepare(CorpusSpec(tokenizer="bpe", vocab_size=vocab_size, corpus=PYTHON_SOURCE), tokens)
    return str(tokens)


def correct(label: str, share: Quantity) -> Measure:
    return Measure(label, share, ".1f", " %", " points", 100, 1)


def rows_tables(columns: Sequence[Column], pairs: Pairs, labels: Mapping[str, str]) -> list[Block]:
    """The means of all arms, and the differences of all pairs."""
    means: list[list[str | Cell]] = []
    for name, label in labels.items():
        means.append([label, *(c.measure.shown(c.mean(name)) for c in columns)])
    differences: list[list[str | Cell]] = []
    for name, rival in pairs:
        cells = [c.measure.cell(c.difference(name, rival)) for c in columns]
        differences.append([f"{labels[name]}, minus {labels[rival]}", *cells])
    return [*rows_table("arm", columns, means), *rows_table("difference", columns, differences)]


def rows_table(head: str, columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> list[Table]:
    """A table of the ``rows``, each its name and its cells, that have a value; none without."""
    rows = [row for row in rows if set(row[1:]) - {DASH}]
    return [Table([head, *(c.name for c in columns)], rows, has_numbers=True)] if rows else []


def write_results(
    columns: Sequence[Column], pairs: Pairs, labels: Mapping[str, str], folder: Path, about: Mapping[str, Any]
) -> None:
    """Write ``about``, the means of arms and the differences of pairs as results.json, and values from seeds
    as results.csv."""
    lines: list[dict[str, Any]] = [
        {"arm": name, "label": label} | {c.name: mean for c in columns if (mean := c.mean(name))}
        for name, label in labels.items()
    ]
    lines += [
        {"arm": name, "minus": rival} | {c.name: mean for c in columns if (mean := c.difference(name, rival))}
        for name, rival in pairs
    ]
    write_rows(folder / RESULTS, {**about, "results": lines})
    by_seed = ((c.name, arm.name, arm.values(c.measure.of)) for c in columns for arm in c.arms)
    rows = [[*names, seed, value] for *names, values in by_seed for seed, value in values.items()]
    write_text(folder / TABLE, csv_text(["measure", "arm", "seed", "value"], rows))
