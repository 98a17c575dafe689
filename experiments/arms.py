"""An experiment as a list of arms: the command that trains each of them on each task, and their report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.columns import (
    ArmsByTask,
    Column,
    ColumnsByTable,
    Drawing,
    Labels,
    Pairs,
    draw_differences,
    make_tables,
    write_results,
)
from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.comparison.arms import Arm, read_arms, with_settings
from memformers.comparison.experiment import Experiment, run_experiments
from memformers.comparison.recall.setup import USUAL_JOBS
from memformers.comparison.task import Task
from memformers.data.benchmarks import PYTHON_SOURCE
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure, arms_of
from memformers.report.claims import warnings
from memformers.report.data import Block, ReportData, Section, Text, prose
from memformers.report.made import facts_of, facts_table
from memformers.report.rendering import Report, claim_report, write_files
from memformers.report.sections import costs_table
from memformers.runs.folder import EXPERIMENT, FACTS
from memformers.runs.plan import read_plan
from memformers.runs.reader import Run, read_runs
from memformers.training.config import TrainConfig

QUICK_TOKENS = 16_384
"""Tokens of each training run with --quick."""
METHOD = (
    "± is half the width of a 95 % interval over seeds, by Student's t. Differences are paired by seed; one "
    "whose interval contains zero is grey. By chance, one interval in twenty leaves out zero. The report of "
    "each task, with its settings and curves, is in the folder of its name."
)
COSTS = {
    "keys per layer, without the segment's": "keys",
    "keys per layer, on average": "mean_keys",
    "state per stream": "state_bytes",
    "attention operations per token": "attention_operations",
    "parameters": "parameters",
}
"""Costs of an arm: their names in results.json, and in a run's facts."""


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


@dataclass(frozen=True)
class ArmsCommand(ExperimentCommand):
    """The options and the report of an experiment whose arms are a list."""

    # What an experiment defines: its constants, and `plan_experiments` and `measures_of` below.
    title: ClassVar[str]
    method: ClassVar[str]
    base: ClassVar[str]
    """The rival of arms that name no other one."""
    variants: ClassVar[Sequence[Variant]] = ()
    default_arms: ClassVar[Sequence[str]] = ()
    """The arms that are trained if no arm is named; empty: all."""

    # The options of its command.
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
        known_names = [variant.name for variant in self.list_variants()]
        for name in self.arms:
            if ":" not in name and name not in known_names:
                names = ", ".join(known_names)
                raise UserError(f"arm {name!r} is unknown; there are {names}, and NAME: setting=value …")
        if len(set(self.arms)) < len(self.arms):
            raise UserError(f"arms={' '.join(self.arms)} must name each arm once.")

    @classmethod
    def list_variants(cls) -> Sequence[Variant]:
        return cls.variants

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        """By their tasks, the names of their sub-folders of ``folder``."""
        raise NotImplementedError

    def measures_of(self, task: str) -> Sequence[Measure]:
        """What the arms of a ``task`` are compared by; labels differ between tasks."""
        raise NotImplementedError

    # What an experiment can change.

    def measure_runs(self, folder: Path) -> None:
        """Measure what was trained in the ``folder`` of a task, beside what each run measured itself."""

    def extra_results(self, run: Run) -> dict[str, Any]:
        """What is added to the result of a finished ``run`` for the measures."""
        return {}

    def columns_by_table(self, arms_by_task: ArmsByTask) -> ColumnsByTable:
        columns = []
        for task, arms in arms_by_task.items():
            for measure in self.measures_of(task):
                columns.append(Column(measure.label, measure, arms))
        return {"": columns}

    def draw_figure(self, columns: Sequence[Column], pairs: Pairs, labels: Labels) -> Drawing:
        return draw_differences(columns, pairs, labels)

    # Training.

    def experiment(self, folder: Path) -> Report:
        """Train and measure what ``folder`` doesn't have yet, and write the report."""
        return run_experiments(
            self.plan_experiments(folder),
            folder,
            self.write_report,
            self.dashboard,
            resume=self.resume,
            measure=self.measure_runs,
        )

    def plan_experiment(
        self, task: Task[Any], base: TrainConfig, variants: Sequence[Variant] | None = None
    ) -> Experiment:
        """The chosen arms on a ``task``."""
        n_seeds = 1 if self.quick else self.seeds
        arms = self.choose_arms(base, variants)
        return Experiment(task, base, arms, seeds=n_seeds, jobs=self.jobs, threads=1)

    def choose_arms(self, base: TrainConfig, variants: Sequence[Variant] | None = None) -> tuple[Arm, ...]:
        """The arms to train, derived from ``base``, in the order of ``variants``, by default those of the
        list; then the user's."""
        names = self.arms or self.default_arms
        arms = []
        for variant in variants or self.list_variants():
            if not names or variant.name in names:
                arms.append(variant.arm(base))
        described = [text for text in names if ":" in text]
        return (*arms, *read_arms(described, base))

    # The report.

    def write_report(self, folder: Path) -> Report:
        """Write the report of all tasks in ``folder``, or of the one that it is, and their results."""
        # What was trained.
        folders = list_task_folders(folder)
        arms_by_task = {path.resolve().name: self.read_arms_in(path) for path in folders}
        last_folder = folders[-1]
        last_task = last_folder.resolve().name
        last_arms = arms_by_task[last_task]

        # What is compared, and by which measures.
        columns_by_table = self.columns_by_table(arms_by_task)
        labels = self.labels_of(arms_by_task)
        pairs = self.pairs_of(labels)

        # The results as files.
        claim_report(folder)
        all_columns = [column for columns in columns_by_table.values() for column in columns]
        costs = {arm.label: costs_of(arm) for arm in last_arms}
        facts = {"made": facts_of(last_arms, last_folder), "arms": costs}
        write_results(all_columns, pairs, labels, folder, facts)

        # The results on a page: the table without a title with its figure, then a section for each other one.
        notes: list[Text] = []
        for path, (task, arms) in zip(folders, arms_by_task.items(), strict=True):
            for warning in warnings(arms, arms[0], path):
                notes.append(prose("in_task", warning=warning, task=task))
        tables: list[Block] = []
        figures: list[Block] = []
        sections: list[Section] = []
        for title, columns in columns_by_table.items():
            blocks = make_tables(columns, pairs, labels)
            if title:
                sections.append(Section(title, blocks))
                continue
            tables += blocks
            drawing = self.draw_figure(columns, pairs, labels)
            if drawing:
                figure, caption = drawing
                figures.append(plotting.save_figure(figure, folder, self.name, self.title, [caption]))
        sections.append(Section(f"What each arm costs: {last_task}", [costs_table(last_arms)]))
        how_made = [f"{self.method} {METHOD}", *facts_table(last_arms, last_folder)]
        sections.append(Section("How it was made", how_made))
        report = ReportData(self.title, notes, [], None, tables, figures, sections, tables[:1])
        return write_files(report, folder)

    def read_arms_in(self, folder: Path) -> list[ArmRuns]:
        """The arms of one task, in the order of the list, then the user's."""
        plan = read_plan(folder)
        variants = {variant.name: variant for variant in self.list_variants()}
        runs = read_runs(folder, plan.task if plan else "text")
        for run in runs:
            if run.arm in variants:
                run.label = variants[run.arm].label
            if run.result:
                run.result = run.result | self.extra_results(run)
        positions = {name: position for position, name in enumerate(variants)}
        return sorted(arms_of(runs), key=lambda arm: positions.get(arm.name, len(variants)))

    def labels_of(self, arms_by_task: ArmsByTask) -> dict[str, str]:
        """The labels of the arms that finished on any task, by name, in the order of the list, then the
        user's."""
        finished = {}
        for arms in arms_by_task.values():
            for arm in arms:
                if arm.results:
                    finished[arm.name] = arm.label
        listed_names = [variant.name for variant in self.list_variants()]
        return {name: finished[name] for name in (*listed_names, *finished) if name in finished}

    def pairs_of(self, labels: Labels) -> list[tuple[str, str]]:
        """Each arm with each of its rivals, if both finished."""
        pairs = []
        for name in labels:
            for rival in self.rivals_of(name):
                if rival in labels:
                    pairs.append((name, rival))
        return pairs

    def rivals_of(self, name: str) -> Iterator[str]:
        """The rival of an arm, the rival's rival and so on, to the base."""
        rivals = {variant.name: variant.rival for variant in self.list_variants()}
        while name != self.base:
            name = rivals.get(name) or self.base
            yield name


def list_task_folders(folder: Path) -> list[Path]:
    """The sub-folders of ``folder`` with experiments that have begun; ``folder`` itself if there are none."""
    plans = folder.glob(f"*/{EXPERIMENT}")
    # The shortest name first: budgets are numbers of tokens.
    ordered = sorted(plans, key=lambda path: (len(path.parent.name), path))
    begun = [path.parent for path in ordered if any(path.parent.glob(f"*/{FACTS}"))]
    return begun or [folder]


def costs_of(arm: ArmRuns) -> dict[str, Any]:
    """What an ``arm`` costs, as far as it is known."""
    facts = arm.first.facts
    return {shown: facts[name] for shown, name in COSTS.items() if name in facts}


def prepared_python_source(folder: Path, vocab_size: int) -> str:
    """The path of the Python source code of this machine in subwords, prepared in ``folder``."""
    tokens = folder.resolve() / "tokens"
    if not tokens.exists():
        prepare(CorpusSpec(tokenizer="bpe", vocab_size=vocab_size, corpus=PYTHON_SOURCE), tokens)
    return str(tokens)
