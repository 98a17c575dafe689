"""The faults of a training, and how it continued after each."""

import os
import random
import re
import resource
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from experiments.soak.programs import LOG_EVERY, RANKS, TOKENS_A_STEP, Dashboard, Training, running, until

KINDS = ("SIGKILL", "SIGTERM", "disk full", "dashboard down")


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
        """Raise ValueError for a soak without a fault, or without a folder for the page."""
        if not 2 * LOG_EVERY <= self.every <= self.steps:
            raise ValueError(
                f"every={self.every} must be between {2 * LOG_EVERY} and steps={self.steps}: a fault is "
                f"placed by records, which come every {LOG_EVERY} steps."
            )
        if not self.out.parent.is_dir():
            raise ValueError(f"out={self.out} lies in no folder that there is.")


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
    Trainings that still run at the end of ``stack`` are ended."""
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
