"""The experiment: it trains every arm from every seed, each in a separate process, measures the trained
models, and writes the report that compares them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from memformers.common.command_line import command_as_given
from memformers.common.console import counted
from memformers.common.errors import TrainingsFailed, UserError
from memformers.common.fields import Count, check_fields, replace_nested
from memformers.common.files import write_json
from memformers.common.machine import JOBS, choose_device
from memformers.common.processes import run_modules
from memformers.comparison.arms import Arm, check_arms
from memformers.comparison.task import Task
from memformers.models.config import SHARED_SETTINGS, applies_to
from memformers.models.facts import memory_facts
from memformers.models.registry import check_importable, import_path, lookup
from memformers.report.keys import unequal_keys
from memformers.report.rendering import in_terminal, text_of
from memformers.runs.card import RunCard, known_card, note_launch
from memformers.runs.folder import (
    CARD,
    CONFIG,
    EXPERIMENT,
    OF_AN_EXPERIMENT,
    RESULT,
    alone_in,
    check_named,
    check_report,
    refuse_overwrite,
)
from memformers.runs.plan import Plan, Planned, PlannedArm, read_plan, runs_of
from memformers.tracking.discovery import DASHBOARD, find_dashboard, show_comparison
from memformers.tracking.trackers import find_trackers
from memformers.training.config import TrainConfig
from memformers.training.distributed import with_precision
from memformers.training.resuming import differences

if TYPE_CHECKING:
    from memformers.report.rendering import Report

ENDING_SECONDS = 20.0
"""How long a training run may outlive the experiment that started it."""


@dataclass(frozen=True)
class Experiment:
    """Arms × seeds × a task."""

    task: Task[Any]
    base: TrainConfig
    """The settings that the arms were derived from, of the first seed."""
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
        check_arms(self.arms)


def run_experiment(
    experiment: Experiment,
    folder: Path,
    dashboard: str = "",
    *,
    resume: bool = False,
    ending_seconds: float = ENDING_SECONDS,
) -> "Report":
    """Train every arm from every seed, each into a sub-folder of ``folder``, measure them, and write the
    report. With ``resume``, training runs that were stopped continue, finished ones are left alone, and new
    arms and seeds are added, once processes of an experiment that was killed have ended, for which it waits
    ``ending_seconds``.

    A training run that fails doesn't stop the others: the report is written, and says so. Raises UserError
    for a folder that already holds an experiment (with ``resume``: of other settings) or would lose a file,
    and for what no training could start from; [`memformers.common.errors.TrainingsFailed`][] when a training
    run failed.
    """
    check_named(folder)
    dashboard = find_dashboard(dashboard)
    find_trackers()
    task = experiment.task

    # What is planned: the arms of before, those of now, and their runs.
    saved = read_plan(folder)
    experiment = replace(experiment, base=with_one_precision(experiment.base, saved))
    arms = merge_arms(experiment, saved, folder, resume)
    plan = make_plan(experiment, arms, saved, folder)
    configs = {arm.name: arm.config for arm in arms}
    runs = {name: with_seed(configs[run.arm], run.seed) for name, run in plan.runs.items()}

    # What all runs share, although their settings leave it open.
    for config in configs.values():
        check_importable(config.model.model)
    data = task.find_data(runs, folder)
    precision = experiment.base.step.precision

    with alone_in(folder):
        # The files from which each run starts.
        write_json(folder / EXPERIMENT, plan)
        due = {name: config for name, config in runs.items() if not (folder / name / RESULT).exists()}
        for name in due:  # one of an experiment that was killed may be about to end
            with alone_in(folder / name, seconds=ending_seconds):
                if not task.resumes:
                    rmtree(folder / name, ignore_errors=True)
        plan_runs(plan.runs, folder)
        for name, config in due.items():
            shared = data if config.step.precision != "auto" else {**data, "precision": precision}
            write_json(folder / name / CONFIG, replace_nested(config, **shared))

        # The training, the measurement and the report.
        show_comparison(folder, dashboard)
        print_unequal_keys(task, arms)
        failed = train_all(experiment, plan, due, folder, dashboard)
        if not any((folder / name / RESULT).exists() for name in runs):
            raise TrainingsFailed(f"no training ended well, so there is nothing to report; see {folder}.")
        try:
            task.measure(experiment.base, folder)
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
    # A failed training doesn't stop the other experiments.
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


def with_one_precision(base: TrainConfig, saved: Plan | None) -> TrainConfig:
    """``base`` with the precision of the ``saved`` plan, or else this machine's, in place of "auto"."""
    if saved and base.step.precision == "auto":
        saved_step = saved.settings.get("step", {})
        base = replace_nested(base, precision=saved_step.get("precision", "auto"))
    return with_precision(base, choose_device(base.step.device))


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    return config if config.seed == seed else replace(config, seed=seed)


def merge_arms(experiment: Experiment, saved: Plan | None, folder: Path, resume: bool) -> list[Arm]:
    """The arms of the ``saved`` plan, then the new ones; UserError for a plan that doesn't fit."""
    if saved is None:
        return list(experiment.arms)
    name = experiment.task.name
    if not resume:
        raise UserError(f"{folder} already holds an experiment; name a new folder, or resume this one.")
    if saved.task != name:
        raise UserError(f"{folder} is an experiment on {saved.task}, not on {name}; name a new folder.")
    changes = differences(saved.settings, asdict(experiment.base))
    if changes:
        raise UserError(
            f"{folder} is an experiment with other settings: {changes}. Use those, or name a new folder."
        )
    # What was planned, and then what is asked for, which may be the same.
    arms: dict[str, Arm] = {}
    for planned in saved.arms:
        config = experiment.task.read_config(used_settings(planned.config), f"arm {planned.name}")
        arms[planned.name] = Arm(planned.name, config, planned.label)
    for arm in experiment.arms:
        planned_arm = arms.setdefault(arm.name, arm)
        changes = differences(asdict(planned_arm.config), asdict(arm.config))
        if changes:
            raise UserError(
                f"{folder} has an arm {arm.name} with other settings: {changes}. Give it another name, or "
                f"name a new folder. (In a comparison with the Compressive Transformer, Transformer-XL's "
                f"memory is longer, unless --no-equal-keys is given.)"
            )
    check_arms(list(arms.values()))
    return list(arms.values())


def used_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The ``settings`` of a run without those that its model doesn't use, which a plan of an earlier version
    may have, since its arms were not complete."""
    network = settings.get("model", {})
    model = network.get("model", "")

    def without_unused(group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in group.items() if applies_to(name, model) or name in SHARED_SETTINGS}

    return {**without_unused(settings), "model": without_unused(network)}


def make_plan(experiment: Experiment, arms: Sequence[Arm], saved: Plan | None, folder: Path) -> Plan:
    """The plan of all runs; UserError for files that would be lost."""
    # Seeds that an earlier command has asked for stay.
    first = experiment.base.seed
    n_seeds = max(experiment.seeds, saved.seeds if saved else 0)
    runs = runs_of([arm.name for arm in arms], range(first, first + n_seeds))
    planned = saved.runs if saved else {}
    new_names = [name for name in runs if name not in planned]
    refuse_overwrite(folder, new_names if saved else [*OF_AN_EXPERIMENT, *new_names])
    check_report(folder)
    # Each command once, for the report.
    commands = (*saved.commands, command_as_given()) if saved else (command_as_given(),)
    return Plan(
        task=experiment.task.name,
        settings=saved.settings if saved else asdict(experiment.base),
        arms=tuple(PlannedArm(arm.name, asdict(arm.config), arm.label) for arm in arms),
        runs=runs,
        commands=tuple(dict.fromkeys(commands)),
        scale=saved.scale if saved else experiment.scale,
        task_info=experiment.task.info,
    )


def train_all(
    experiment: Experiment, plan: Plan, due: Mapping[str, TrainConfig], folder: Path, dashboard: str
) -> list[str]:
    """Train the runs that are ``due``; returns the names of those that failed."""
    names = list(due)
    n_done = len(plan.runs) - len(due)
    print(f"{counted(len(plan.runs), 'training')}, {n_done} done → {folder}", flush=True)
    environment = {DASHBOARD: dashboard, JOBS: str(experiment.jobs)}
    if experiment.threads:
        environment["OMP_NUM_THREADS"] = str(experiment.threads)

    # Each process gets the file of its memory as an argument, since a config alone runs no code.
    commands = []
    for name, config in due.items():
        command = [experiment.task.module, str(folder / name)]
        model = config.model.model
        if ":" in model:
            command.append(import_path(lookup(model)))
        commands.append(command)

    def begin(number: int) -> None:
        print(f"\n── {n_done + number + 1} of {len(plan.runs)}: {names[number]} ──", flush=True)
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


def print_unequal_keys(task: Task[Any], arms: Sequence[Arm]) -> None:
    """Say before the training which of the ``arms`` will hold different numbers of keys although they are
    configured with the same."""
    facts = {}
    for arm in arms:
        network = task.network(arm.config)
        if network:
            facts[arm.label or arm.name] = memory_facts(network)
    for warning in unequal_keys(facts):
        print(in_terminal([f"NOTE: {text_of(warning)}"]), flush=True)


def plan_runs(runs: Mapping[str, Planned], folder: Path) -> None:
    """Make folders for the runs, and the cards with which dashboards show them as one group."""
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True)
        if not known_card(folder / name):  # a resumed run keeps its card
            write_json(folder / name / CARD, RunCard(f"comparison {folder.resolve().name}", name=name))
