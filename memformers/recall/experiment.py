"""The whole recall experiment: it trains all arms from all seeds, and writes the report that compares
them."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memformers.common.errors import TrainingsFailed, UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.common.machine import choose_device
from memformers.common.processes import run_modules
from memformers.recall.arms import Arm
from memformers.recall.config import RecallConfig, run_of
from memformers.recall.summary import RESULTS, TABLE, write_summary
from memformers.report.recall_page import write_recall_report
from memformers.runs.folder import (
    OF_A_COMPARISON,
    PLAN,
    RESULT,
    check_named,
    check_nothing_is_lost,
    flatten,
    new_run_id,
    plan_run,
    read_card,
)
from memformers.tracking.discovery import DASHBOARD, find_dashboard, show_comparison
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed
from memformers.training.resume import alone_in

ARMS = ("arms", "others")
"""The fields of a setting that contain its arms; all other fields are the same for all arms."""
MAY_DIFFER = {"train.device"}
"""Settings that may differ between trainings that an experiment already has and those that are added."""


@dataclass(frozen=True)
class Plan:
    """Which arms are trained from which seeds, by the names of their folders."""

    arms: tuple[Arm, ...]
    seeds: int

    @property
    def runs(self) -> dict[str, tuple[Arm, int]]:
        """The runs by name: all arms of the first seed, then those of the next."""
        return {f"{arm.name}-{seed}": (arm, seed) for seed in range(self.seeds) for arm in self.arms}


def recall(config: RecallConfig, folder: Path, dashboard: str = "", *, resume: bool = False) -> Path:
    """Train and measure every arm from every seed, each in a sub-folder of ``folder``, and write the
    report; returns the path of its page.

    With ``resume``, finished trainings are kept, a training that was stopped begins again, and new arms and
    seeds are added to those of ``folder``.

    A training that fails doesn't stop the others: the report is written and lists it. Raises ValueError for a
    folder that already holds an experiment (with ``resume``: with other settings), and
    [`memformers.common.errors.TrainingsFailed`][] when a training failed.
    """
    check_named(folder)
    dashboard = find_dashboard(dashboard)
    choose_device(config.device)
    plan = Plan(config.chosen, config.n_seeds)
    if (folder / PLAN).exists():
        if not resume:
            raise UserError(f"{folder} already holds an experiment; name a new folder, or resume this one.")
        plan = united(config, plan, folder)
    else:
        check_nothing_is_lost(folder, (*OF_A_COMPARISON, RESULTS, TABLE, *plan.runs))
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, Distributed()):
        settings = {name: value for name, value in asdict(config.setting).items() if name not in ARMS}
        arms = [asdict(arm) for arm in plan.arms]
        write_json(folder / PLAN, {"setting": settings, "arms": arms, "seeds": plan.seeds})
        show_comparison(folder, dashboard)
        failed = train_all(config, plan, folder, dashboard)
        if not any((folder / name / RESULT).exists() for name in plan.runs):
            raise TrainingsFailed(f"no training ended well, so there is nothing to report; see {folder}.")
        report = write_report(folder)
    if failed:
        raise TrainingsFailed(f"the training of {', '.join(failed)} failed; the others are in {report}.")
    return report


def write_report(folder: Path) -> Path:
    """Summarize the trainings in ``folder`` and write the report; returns the path of its page."""
    return write_recall_report(write_summary(folder), folder)


def united(config: RecallConfig, plan: Plan, folder: Path) -> Plan:
    """``plan`` together with the plan in ``folder``; ValueError if its settings differ."""
    saved = read_json(folder / PLAN)
    if not {"setting", "arms", "seeds"} <= saved.keys():
        raise UserError(f"{folder / PLAN} is not the plan of a recall experiment; name a new folder.")
    train = asdict(config_from_dict(TrainConfig, saved["setting"]["train"], str(folder / PLAN)))
    settings = (saved["setting"] | {"train": train}, asdict(config.setting))
    before, now = (json.loads(json.dumps(setting)) for setting in settings)
    if changes := differences(before, {k: v for k, v in now.items() if k not in ARMS}):
        raise UserError(
            f"{folder} has results with other settings: {changes}. Leave them out, or name a new folder."
        )
    ours = {arm["name"]: arm for name in ARMS for arm in now[name]}
    older: dict[str, Any] = {"settings": {}}  # fields that arms of earlier versions didn't have
    if other := [arm["name"] for arm in saved["arms"] if ours.get(arm["name"]) != older | arm]:
        raise UserError(f"{folder} has results of {', '.join(other)} with other settings; name a new folder.")
    begun = {arm["name"] for arm in saved["arms"]}
    arms = tuple(arm for arm in config.base.all_arms if arm.name in begun | {arm.name for arm in plan.arms})
    all_of_it = Plan(arms, max(plan.seeds, saved["seeds"]))
    new = [n for n, (arm, seed) in all_of_it.runs.items() if arm.name not in begun or seed >= saved["seeds"]]
    check_nothing_is_lost(folder, new)
    return all_of_it


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences of two settings, in words; empty if there is none."""
    old, new = dict(flatten(before)), dict(flatten(now))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{n} {old.get(n)} → {new.get(n)}" for n in names if n not in MAY_DIFFER)


def train_all(config: RecallConfig, plan: Plan, folder: Path, dashboard: str) -> list[str]:
    """Run the trainings that aren't finished; returns the names of those that failed."""
    # Of each seed, the arm that takes longest first, so that at the end no long training runs alone.
    order = sorted(plan.runs, key=lambda n: (plan.runs[n][1], -config.setting.sees_back(plan.runs[n][0])))
    due = [name for name in order if not (folder / name / RESULT).exists()]
    jobs = min(config.jobs, len(due))
    done = len(plan.runs) - len(due)
    print(
        f"{len(plan.runs)} trainings of {config.setting.train.tokens:,} tokens, {done} of them done, "
        f"{config.jobs} at a time, threads of each: {config.threads} → {folder}",
        flush=True,
    )
    prepare(config, plan, due, folder)
    environment = {DASHBOARD: dashboard, "OMP_NUM_THREADS": str(config.threads)}
    commands = [["memformers.recall", str(folder / name)] for name in due]
    ended = run_modules(commands, jobs, environment=environment)
    try:
        return sorted(due[number] for number, code in ended if code)
    except (KeyboardInterrupt, SystemExit):
        print(f"finished trainings are kept in {folder}; continue with --resume.", file=sys.stderr)
        raise


def prepare(config: RecallConfig, plan: Plan, due: Sequence[str], folder: Path) -> None:
    """Make the folders of the trainings in ``due``, which contain only their settings, and the ids by which a
    dashboard shows all of them as one group, each compared with the first."""
    ids = {name: new_run_id() if name in due else read_card(folder / name).run for name in plan.runs}
    for name in due:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        run_of(config.setting, *plan.runs[name], config.jobs).save(folder / name)
        other = next((ids[n] for n in plan.runs if n != name), "")
        plan_run(folder / name, ids[name], f"recall {folder.resolve().name}", other)
