"""The experiment: it trains every arm from every seed, each in a separate process, measures the trained
models, and writes the report that compares them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from memformers.common.command_line import cli_errors, command_as_given
from memformers.common.console import counted
from memformers.common.errors import TrainingsFailed, UserError
from memformers.common.fields import Count, check_fields, replace_nested
from memformers.common.files import config_from_dict, write_json
from memformers.common.machine import JOBS, choose_device, keep_freed_memory
from memformers.common.processes import run_modules
from memformers.comparison.arms import check_arms, settings_of
from memformers.models.config import ModelConfig, NetworkConfig
from memformers.models.facts import memory_facts
from memformers.models.registry import (
    check_importable,
    import_memory,
    import_path,
    lookup,
)
from memformers.report.keys import unequal_keys
from memformers.report.rendering import in_terminal, text_of
from memformers.runs.folder import (
    CARD,
    CONFIG,
    EXPERIMENT,
    OF_AN_EXPERIMENT,
    RESULT,
    Arm,
    Card,
    Plan,
    Planned,
    alone_in,
    check_named,
    check_report,
    known_card,
    note_launch,
    read_plan,
    refuse_overwrite,
    runs_of,
)
from memformers.tracking.discovery import DASHBOARD, find_dashboard, show_comparison
from memformers.training.checkpoints import differences
from memformers.training.config import TrainConfig
from memformers.training.distributed import with_precision

if TYPE_CHECKING:
    from memformers.report.rendering import Report

ENDING_SECONDS = 20.0
"""How long a training run may outlive the experiment that started it."""
Settings = dict[str, Any]
"""A run's settings, as its ``config.json`` has them."""


class Task:
    """What the runs of an experiment read, and what is measured of them."""

    name: str
    """In the plan of an experiment."""
    resumes = True
    """Whether a training run that was stopped continues; otherwise it starts again."""
    module: str
    """The module that trains a run in a separate process, as [`train_alone`][] does."""
    reporter = "memformers.report.document"
    """The module whose ``write_report(folder)`` writes the report and returns it. It is imported when all
    training runs have ended, so that none of them loads matplotlib."""

    def parse(self, settings: Settings, source: str) -> Any:
        """The settings of a run as a frozen dataclass; UserError, with their ``source``, if there is no
        such run."""
        raise NotImplementedError

    def read(self, runs: Mapping[str, Settings], folder: Path) -> Settings:
        """The settings that let all ``runs`` read the same source, if there is one. UserError for one that
        can't be used, or isn't that of the runs in ``folder``."""
        return {}

    def train(self, folder: Path) -> None:
        """Train the run that ``config.json`` in ``folder`` describes."""
        raise NotImplementedError

    def network(self, settings: Settings, source: str) -> NetworkConfig | None:
        """The network of the run with these ``settings``; None if it has no memory of this package."""
        return config_from_dict(ModelConfig, settings["model"], source)

    def measure(self, train: TrainConfig, folder: Path) -> None:
        """Measure the trained models in ``folder`` together."""


@dataclass(frozen=True)
class Experiment:
    """Arms × seeds × a task."""

    task: Task
    train: TrainConfig
    """The training that all arms share, of the first seed."""
    more: Settings
    """Settings of the task that are not in TrainConfig, by the task's name."""
    arms: tuple[Arm, ...]
    seeds: Count = 1
    jobs: Count = 1
    """The number of training runs at a time."""
    threads: Count | None = None
    """Of each; None for PyTorch's choice."""
    scale: float = 1.0
    """The fraction of the usual number of tokens; below 1, the experiment is a trial."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_arms(self.arms, self.shared, self.task.parse)

    @property
    def shared(self) -> Settings:
        return {**asdict(self.train), **self.more}


def run_experiment(
    experiment: Experiment, folder: Path, dashboard: str = "", *, resume: bool = False
) -> "Report":
    """Train every arm from every seed, each into a sub-folder of ``folder``, measure them, and write the
    report. With ``resume``, training runs that were stopped continue, finished ones are left alone, and new
    arms and seeds are added.

    A training run that fails doesn't stop the others: the report is written, and says so. Raises UserError
    for a folder that already holds an experiment (with ``resume``: of other settings) or would lose a file,
    and for what no training could start from; [`memformers.common.errors.TrainingsFailed`][] when a training
    run failed.
    """
    check_named(folder)
    dashboard, saved = find_dashboard(dashboard), read_plan(folder)
    train, task = experiment.train, experiment.task
    if train.step.precision == "auto" and saved:  # all arms share one
        train = replace_nested(train, precision=saved.settings.get("step", {}).get("precision", "auto"))
    experiment = replace(experiment, train=with_precision(train, choose_device(train.step.device)))
    plan = merge_plans(experiment, saved, folder, resume)
    arms = {arm.name: settings_of(arm, experiment.shared) for arm in plan.arms}
    runs = {name: {**arms[run.arm], "seed": run.seed} for name, run in plan.runs.items()}
    for run in runs.values():
        check_importable(run["model"]["model"])
    pinned = task.read(runs, folder)
    with alone_in(folder):
        write_json(folder / EXPERIMENT, plan)
        due = [name for name in runs if not (folder / name / RESULT).exists()]
        for name in due:  # one of an experiment that was killed may be about to end
            with alone_in(folder / name, seconds=ENDING_SECONDS):
                if not task.resumes:
                    rmtree(folder / name, ignore_errors=True)
        plan_runs(plan.runs, folder)
        for name in due:
            source = {k: runs[name][k] | x if isinstance(x, dict) else x for k, x in pinned.items()}
            write_json(folder / name / CONFIG, runs[name] | source)
        show_comparison(folder, dashboard)
        print_unequal_keys(task, plan.arms, arms)
        failed = train_all(experiment, plan, {name: runs[name] for name in due}, folder, dashboard)
        if not any((folder / name / RESULT).exists() for name in runs):
            raise TrainingsFailed(f"no training ended well, so there is nothing to report; see {folder}.")
        try:
            task.measure(experiment.train, folder)
        finally:  # whatever the measurement met
            report: Report = import_module(task.reporter).write_report(folder)
    if failed:
        raise TrainingsFailed(f"the training of {', '.join(failed)} failed; the others are in {report}.")
    show_comparison(folder, dashboard)
    return report


def run_experiments(
    experiments: Mapping[str, Experiment],
    folder: Path,
    report: Callable[[Path], "Report"],
    dashboard: str = "",
    *,
    resume: bool = False,
    measure: Callable[[Path], None] = lambda folder: None,
) -> "Report":
    """Run each of ``experiments`` in a sub-folder of its name, ``measure`` what was trained there, and write
    the ``report`` of all of them. Raises as [`run_experiment`][] does."""
    check_named(folder)
    if not any(folder.glob(f"*/{EXPERIMENT}")):
        refuse_overwrite(folder, OF_AN_EXPERIMENT)
    elif not resume:
        raise UserError(f"{folder} already holds experiments; name a new folder, or resume this one.")
    failed = []
    for name, experiment in experiments.items():
        try:
            run_experiment(experiment, folder / name, dashboard, resume=resume)
        except TrainingsFailed as error:
            failed.append(f"{name}: {error}")
        if any((folder / name).glob(f"*/{RESULT}")):
            measure(folder / name)
    if any(folder.glob(f"*/*/{RESULT}")):
        written = report(folder)
        if not failed:
            return written
        failed.append(f"The results so far are in {written}.")
    raise TrainingsFailed(" ".join(failed))


def merge_plans(experiment: Experiment, saved: Plan | None, folder: Path, resume: bool) -> Plan:
    """UserError for a ``saved`` plan that doesn't fit, and for files that would be lost."""
    name, shared = experiment.task.name, experiment.shared
    if saved and not resume:
        raise UserError(f"{folder} already holds an experiment; name a new folder, or resume this one.")
    before = saved or Plan(name, shared, (), scale=experiment.scale)
    if before.task != name:
        raise UserError(f"{folder} is an experiment on {before.task}, not on {name}; name a new folder.")
    if changes := differences(before.settings, shared):
        raise UserError(
            f"{folder} is an experiment with other settings: {changes}. Use those, or name a new folder."
        )
    arms = {arm.name: arm for arm in before.arms}
    for arm in experiment.arms:
        old, new = (settings_of(a, shared) for a in (arms.setdefault(arm.name, arm), arm))
        if changes := differences(old, new):
            raise UserError(
                f"{folder} has an arm {arm.name} with other settings: {changes}. Give it another name, or "
                f"name a new folder. (In a comparison with the Compressive Transformer, Transformer-XL's "
                f"memory is longer, unless --no-equal-keys is given.)"
            )
    check_arms(list(arms.values()), shared, experiment.task.parse)
    first = experiment.train.seed
    runs = runs_of(list(arms), range(first, first + max(experiment.seeds, before.seeds)))
    new_names = [name for name in runs if name not in before.runs]
    refuse_overwrite(folder, new_names if saved else [*OF_AN_EXPERIMENT, *new_names])
    check_report(folder)
    commands = tuple(dict.fromkeys((*before.commands, command_as_given())))
    return replace(before, arms=tuple(arms.values()), runs=runs, commands=commands)


def train_all(
    experiment: Experiment, plan: Plan, due: Mapping[str, Settings], folder: Path, dashboard: str
) -> list[str]:
    """Train the runs that are ``due``; returns the names of those that failed."""
    names, done = list(due), len(plan.runs) - len(due)
    print(f"{counted(len(plan.runs), 'training')}, {done} done → {folder}", flush=True)
    environment = {DASHBOARD: dashboard, JOBS: str(experiment.jobs)}
    if experiment.threads:
        environment["OMP_NUM_THREADS"] = str(experiment.threads)
    commands = []
    for name in names:
        command = [experiment.task.module, str(folder / name)]
        model = due[name]["model"]["model"]
        if ":" in model:
            command.append(import_path(lookup(model)))
        commands.append(command)

    def begin(number: int) -> None:
        print(f"\n── {done + number + 1} of {len(plan.runs)}: {names[number]} ──", flush=True)
        note_launch(folder / names[number])

    ended = run_modules(
        commands,
        min(experiment.jobs, len(names)),
        environment=environment,
        begin=begin,
    )
    try:
        failed = {names[number] for number, code in ended if code}
    except (KeyboardInterrupt, SystemExit):
        print(f"finished training runs are kept in {folder}.", file=sys.stderr)
        raise
    return [name for name in plan.runs if name in failed]


def print_unequal_keys(task: Task, arms: Sequence[Arm], settings: Mapping[str, Settings]) -> None:
    """Say before the training which of the ``arms``, whose ``settings`` are by their names, will hold
    different numbers of keys although they are configured with the same."""
    facts = {}
    for arm in arms:
        if network := task.network(settings[arm.name], arm.name):
            facts[arm.label or arm.name] = memory_facts(network)
    for warning in unequal_keys(facts):
        print(in_terminal([f"NOTE: {text_of(warning)}"]), flush=True)


def plan_runs(runs: Mapping[str, Planned], folder: Path) -> None:
    """Make folders for the runs, and the cards with which dashboards show them as one group."""
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True)
        if not known_card(folder / name):  # a resumed run keeps its card
            write_json(folder / name / CARD, Card(f"comparison {folder.resolve().name}", name=name))


def train_alone(task: Task) -> None:
    """Train the run in the folder named on the command line, with the file of its memory if it has one. Each
    run has a process, so that no state (labml's, peak memory, random numbers) can change the next one."""
    with cli_errors():
        keep_freed_memory()
        folder, *code = sys.argv[1:]
        for path in code:
            import_memory(path)
        task.train(Path(folder))
