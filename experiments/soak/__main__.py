"""A training run on two processes with a fault at regular intervals: it must end as the undisturbed one.

Run it with ``python -m experiments.soak``, on Linux; it writes docs/soak.md. It trains the Compressive
Transformer with dropout, first undisturbed, then with faults at random moments: SIGKILL and SIGTERM to a
random rank, a disk that is full, a dashboard that is killed. A training run that a fault ended is resumed. In
the end the weights, the optimizer's state, the memories and the records of both must be the same bits; else
the exit code is 1.
"""

import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import torch

from experiments.soak.programs import LOG_EVERY, RANKS, TOKENS_A_STEP, Dashboard, Training, running, until
from memformers.common.atomic_dir import numbered
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.common.machine import describe_environment
from memformers.common.processes import ending_as_exit
from memformers.report.markdown import table
from memformers.runs.folder import CONFIG, read_metrics
from memformers.training.resume import differences

KINDS = ("SIGKILL", "SIGTERM", "disk full", "dashboard down")
SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json")
TIMES = {"seconds", "evaluation_seconds", "tokens_per_second"}
HEAD = ("fault", "after step", "what", "the training", "resumed from step", "next loss", "undisturbed")


@dataclass(frozen=True)
class Soak:
    """Train on two processes with faults, and compare with the undisturbed training."""

    steps: int = 2000
    """Training steps in all."""
    every: int = 100
    """One fault in each interval of steps."""
    seed: int = 0
    """Chooses the moments, the order of the kinds, and the ranks."""
    out: Path = Path(__file__).parents[2] / "docs" / "soak.md"
    """The file to write the table into."""

    def __post_init__(self) -> None:
        """Raise UserError for a soak without a fault, or without a folder for the page."""
        if not 2 * LOG_EVERY <= self.every <= self.steps:
            raise UserError(
                f"every={self.every} must be between {2 * LOG_EVERY} and steps={self.steps}: a fault is "
                f"placed by records, which come every {LOG_EVERY} steps."
            )
        if not self.out.parent.is_dir():
            raise UserError(f"out={self.out} lies in no folder that there is.")


@dataclass(frozen=True)
class Fault:
    """A fault that happens when ``step`` is recorded."""

    step: int
    kind: str
    rank: int


@dataclass(frozen=True)
class Outcome:
    """The effect of a fault: its step, how the training ended, and the step from which it continued."""

    fault: Fault
    struck: int
    ended: str
    resumed: int

    @property
    def cells(self) -> list[str]:
        """The columns of the table that are known when a fault has happened."""
        kind = self.fault.kind
        to = "the dashboard" if kind == "dashboard down" else f"rank {self.fault.rank}"
        return [str(self.struck), f"{kind}, {to}", self.ended, str(self.resumed)]


def faults(soak: Soak) -> list[Fault]:
    """One fault in each interval of ``every`` steps, the same number of each kind, in random order."""
    draw = random.Random(soak.seed)
    count = soak.steps // soak.every
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    draw.shuffle(kinds)
    # A disk can only be full for the rank that writes, which is the first.
    return [
        Fault(i * soak.every + draw.randrange(LOG_EVERY, soak.every // 2 + 1), kind,
              0 if kind == "disk full" else draw.randrange(RANKS))
        for i, kind in enumerate(kinds)
    ]  # fmt: skip


def strike(fault: Fault, training: Training, dashboard: Dashboard) -> str:
    """Let ``fault`` happen to ``training``; returns how it ended, or an empty string if it continues."""
    if fault.kind == "dashboard down":
        dashboard.end()
        return ""
    pid = training.rank(fault.rank)
    if fault.kind == "disk full":  # from now on, no file may grow beyond a byte
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))
    else:
        os.kill(pid, getattr(signal, fault.kind))
    return training.wait()


def disturbed(soak: Soak, folder: Path, dashboard: Dashboard, stack: ExitStack) -> tuple[list[Outcome], int]:
    """Train in ``folder`` with all faults; returns their effects, and how often the training was started.
    Training runs that still run at the end of ``stack`` are ended."""
    outcomes, starts = [], 1
    api = f"{dashboard.address}/api/v1/default"
    training = stack.enter_context(running(Training(soak.steps, folder, api)))
    for fault in faults(soak):
        training.reach(fault.step)
        struck = training.step
        ended = strike(fault, training, dashboard)
        if ended:
            training = stack.enter_context(running(Training(soak.steps, folder, api)))
            starts += 1
            resumed = resumed_at(training)
        else:
            training.reach(min(struck + soak.every // 4, soak.steps))
            dashboard.start()
            ended, resumed = "nothing: it continued", struck
        outcomes.append(Outcome(fault, struck, ended, resumed))
        print(len(outcomes), *outcomes[-1].cells, sep=" | ", flush=True)
    if (ended := training.wait()) != "finished":
        raise RuntimeError(f"the training ended with {ended}:\n{training.said}")
    return outcomes, starts


def resumed_at(training: Training) -> int:
    """The step from which a resumed training continued."""
    said = re.compile(r"continues at token ([\d,]+)")
    until(lambda: bool(said.search(training.said)) or training.process.poll() is not None)
    if not (found := said.search(training.said)):
        raise RuntimeError(f"the training wasn't resumed:\n{training.said}")
    return int(found[1].replace(",", "")) // TOKENS_A_STEP


def main(soak: Soak) -> None:
    """Train twice, and write the page if both results are equal; otherwise print the differences."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    folders = (folder / "disturbed", folder / "undisturbed")
    try:
        with ending_as_exit(), ExitStack() as stack:
            dashboard = stack.enter_context(running(Dashboard(folder / "dashboard")))
            training = stack.enter_context(running(Training(soak.steps, folders[1], "off")))
            if (ended := training.wait()) != "finished":
                raise RuntimeError(f"the undisturbed training ended with {ended}:\n{training.said}")
            begun = time.monotonic()
            outcomes, starts = disturbed(soak, folders[0], dashboard, stack)
            seconds = time.monotonic() - begun
    except RuntimeError as error:
        sys.exit(f"{error}\nall is kept in {folder}")
    if different := parts_that_differ(*folders):
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    text = page(soak, outcomes, starts, seconds, folders)
    soak.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {soak.out}")


def parts_that_differ(*folders: Path) -> list[str]:
    """The differences between two finished runs, in words."""
    ends = [numbered(run / "checkpoints")[0] for run in folders]
    names = [name for name in SAME if len({(end / name).read_bytes() for end in ends}) > 1]
    one, other = ([{k: r[k] for k in r.keys() - TIMES} for r in read_metrics(run)] for run in folders)
    settings = differences(*(read_json(run / CONFIG) for run in folders))
    return names + [settings] * bool(settings) + ["the records"] * (one != other)


def page(soak: Soak, outcomes: list[Outcome], starts: int, seconds: float, folders: tuple[Path, Path]) -> str:
    """The page: the setting, and a line for each fault."""
    again = sum(max(outcome.struck - outcome.resumed, 0) for outcome in outcomes)
    records = [read_metrics(folder) for folder in folders]
    last = [[r["loss.valid"] for r in of_one if "loss.valid" in r][-1] for of_one in records]
    machine = describe_environment(torch.device("cpu"))
    said = (
        f"Written by `python -m experiments.soak` (torch {machine['packages']['torch']}, {machine['cores']} "
        f"cores). The Compressive Transformer, with dropout, trained {soak.steps:,} steps on {RANKS} "
        f"processes (`--parallel ddp`), with a random fault in every {soak.every} steps and a checkpoint in "
        f"every {soak.steps // 100}. A full disk is a limit of one byte on the files that the rank may "
        f"write. The dashboard is killed, and started again {soak.every // 4} steps later."
    )
    end = (
        f"{len(outcomes)} faults, {starts} starts, at least {again:,} steps made again, {seconds:,.0f} s. "
        f"The training ended with the same bits as the undisturbed one: weights, optimizer, memories, random "
        f"states and all {len(records[0]):,} records. Validation loss at the end: {last[0]:.6f} "
        f"nats, undisturbed {last[1]:.6f}."
    )
    rows = [
        [str(number), *outcome.cells, *(f"{loss_after(found, outcome.struck):.6f}" for found in records)]
        for number, outcome in enumerate(outcomes, 1)
    ]
    return "\n\n".join(["# Soak", fill(said, 115), table(HEAD, rows).strip(), fill(end, 115)]) + "\n"


def loss_after(records: list[dict[str, float]], step: int) -> float:
    """The training loss of the next record after ``step``."""
    return next(r["loss.train"] for r in records if "loss.train" in r and r["tokens"] > step * TOKENS_A_STEP)


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Soak))
