"""A training on two processes to which something happens every so many steps: it must end as if nothing had.

Run it with ``python experiments/soak.py``, on Linux; it writes docs/soak.md. It trains the Compressive
Transformer with dropout, first undisturbed, then with faults at random moments: SIGKILL and SIGTERM to a
random rank, a disk that is full, a dashboard that is killed. A training that a fault ended is resumed. In the
end the weights, the optimizer's state, the memories and the records of both must be the same bits; else the
exit code is 1.
"""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TypeVar

import torch

from memformers.command_line import parse_arguments, plain_errors
from memformers.environment import describe_environment
from memformers.processes import module_command, module_environment, sigterm_as_exit
from memformers.sealed import numbered
from memformers.tracking import read_metrics

RANKS, BATCH, SEGMENT, LOG_EVERY = 2, 8, 32, 5
TOKENS_A_STEP = BATCH * SEGMENT
MODEL = [
    "--model", "compressive", "--d-model", "64", "--heads", "4", "--d-ff", "128", "--n-layers", "2",
    "--segment-len", str(SEGMENT), "--mem-len", "32", "--c-mem-len", "16", "--dropout", "0.1",
]  # fmt: skip
KINDS = ("SIGKILL", "SIGTERM", "disk full", "dashboard down")
SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json")
PATIENCE_SECONDS = 180.0
REASONS = (
    r"stopped by SIG\w+ at token [\d,]+",
    r"Signal 9 \(SIGKILL\)",
    r"can't be written: .+?\.",
    r"error: .+",
)
"""What a training may say, the more telling first."""


@dataclass(frozen=True)
class Soak:
    """Train on two processes with faults, and compare with the undisturbed training."""

    steps: int = 2000
    """Training steps in all."""
    every: int = 100
    """One fault in each so many steps."""
    seed: int = 0
    """Chooses the moments, the order of the kinds, and the ranks."""
    out: Path = Path(__file__).parents[1] / "docs" / "soak.md"
    """The file to write the table into."""

    def __post_init__(self) -> None:
        """Raise ValueError for a soak with no fault in it."""
        if not 2 * LOG_EVERY <= self.every <= self.steps:
            raise ValueError(
                f"every={self.every} must be between {2 * LOG_EVERY} and steps={self.steps}: a fault is "
                f"placed by records, which come every {LOG_EVERY} steps."
            )


@dataclass(frozen=True)
class Fault:
    """Something to happen once ``step`` is recorded."""

    step: int
    kind: str
    rank: int


@dataclass(frozen=True)
class Outcome:
    """What a fault did: at which step it came, how the training ended, and from where it went on."""

    fault: Fault
    struck: int
    ended: str
    went_on: int


def faults(soak: Soak) -> list[Fault]:
    """One fault in each stretch of ``every`` steps, as many of each kind, in random order."""
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


class Training:
    """The training of ``folder`` as torchrun's processes, begun or resumed, shown at ``dashboard``."""

    def __init__(self, soak: Soak, folder: Path, dashboard: str):
        tokens = soak.steps * TOKENS_A_STEP
        self.folder = folder
        command = [
            *module_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
            "-m", "memformers.cli", "train", "--resume", "--out", str(folder), "--data", "builtin", *MODEL,
            "--parallel", "ddp", "--batch-size", str(BATCH), "--tokens", str(tokens), "--evaluations", "4",
            "--log-every", str(LOG_EVERY), "--checkpoint-every", str(tokens // 100), "--dashboard", dashboard,
        ]  # fmt: skip
        # Through a pipe: a file of its own would be full with the disk.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=module_environment() | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.said = ""
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.said += line

    @property
    def step(self) -> int:
        """The last step that is recorded."""
        records = read_metrics(self.folder)
        return int(records[-1]["tokens"]) // TOKENS_A_STEP if records else 0

    def reach(self, step: int) -> None:
        """Wait for ``step``; RuntimeError if the training ends before."""
        until(lambda: self.step >= step or self.process.poll() is not None)
        if self.step < step:
            raise RuntimeError(f"the training ended before step {step}:\n{self.said}")

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise RuntimeError(f"rank {number} is not running:\n{self.said}")

    def end(self) -> None:
        """Stop it, if it still runs."""
        self.process.terminate()
        self.process.wait()

    def wait(self) -> str:
        """How it ended: torchrun's exit code, and the reason that a rank or torchrun gave."""
        code = self.process.wait(PATIENCE_SECONDS)
        self.listener.join()
        reasons = [said for reason in REASONS for said in re.findall(reason, self.said)]
        return f"exit code {code}: {reasons[0] if reasons else 'no reason given'}" if code else "finished"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; RuntimeError if it never comes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing happened for {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(0.02)


class Dashboard:
    """labml's dashboard, which can be killed and started again at the same address."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, "0"
        self.start()

    def start(self) -> None:
        """Start it, at the port it had before."""
        command = module_command(
            "memformers.cli", "dashboard", "--folder", str(self.folder), "--port", self.port
        )
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=module_environment(), text=True)
        assert self.process.stdout
        said = self.process.stdout.readline()
        if not (address := re.search(r"http://\S+:(\d+)", said)):
            raise RuntimeError(f"the dashboard didn't start: {said or 'it said nothing'}")
        self.address, self.port = address[0], address[1]

    def end(self) -> None:
        """End it, with SIGKILL."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


Program = TypeVar("Program", Training, Dashboard)


@contextmanager
def running(program: Program) -> Iterator[Program]:
    """A block after which ``program`` is ended, if it still runs."""
    try:
        yield program
    finally:
        program.end()


def strike(fault: Fault, training: Training, dashboard: Dashboard) -> str:
    """Let ``fault`` happen to ``training``; returns how that ended, or an empty string if it goes on."""
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
    """Train into ``folder`` with all faults; what each did, and how often the training was started.

    Trainings still running when ``stack`` is left are ended.
    """
    outcomes, starts = [], 1
    api = f"{dashboard.address}/api/v1/default"
    training = stack.enter_context(running(Training(soak, folder, api)))
    for fault in faults(soak):
        training.reach(fault.step)
        struck = training.step
        ended = strike(fault, training, dashboard)
        if ended:
            training = stack.enter_context(running(Training(soak, folder, api)))
            starts += 1
            went_on = went_on_at(training)
        else:
            training.reach(min(struck + soak.every // 4, soak.steps))
            dashboard.start()
            ended, went_on = "nothing: it trained on", struck
        outcomes.append(Outcome(fault, struck, ended, went_on))
        print(row(*cells(len(outcomes), outcomes[-1])), flush=True)
    if (ended := training.wait()) != "finished":
        raise RuntimeError(f"the training ended with {ended}:\n{training.said}")
    return outcomes, starts


def went_on_at(training: Training) -> int:
    """The step that a resumed training went on from."""
    said = re.compile(r"goes on at token ([\d,]+)")
    until(lambda: bool(said.search(training.said)) or training.process.poll() is not None)
    if not (found := said.search(training.said)):
        raise RuntimeError(f"the training wasn't resumed:\n{training.said}")
    return int(found[1].replace(",", "")) // TOKENS_A_STEP


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """What is not the same in two finished runs."""
    ends = [numbered(run / "checkpoints")[0] for run in (folder, undisturbed)]
    names = [name for name in SAME if len({(end / name).read_bytes() for end in ends}) > 1]
    records = [[without_times(r) for r in read_metrics(run)] for run in (folder, undisturbed)]
    return names + (["the records"] if records[0] != records[1] else [])


def without_times(record: dict[str, float]) -> dict[str, float]:
    """A record's values but those of the clock."""
    return {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")}


def cells(number: int, outcome: Outcome) -> list[object]:
    """The columns of the table that are known when a fault has happened."""
    fault = outcome.fault
    to = "the dashboard" if fault.kind == "dashboard down" else f"rank {fault.rank}"
    return [number, outcome.struck, f"{fault.kind}, {to}", outcome.ended, outcome.went_on]


def loss_after(folder: Path, step: int) -> float:
    """The training loss of the next record after ``step``."""
    losses = (r["loss.train"] for r in read_metrics(folder)
              if "loss.train" in r and r["tokens"] > step * TOKENS_A_STEP)  # fmt: skip
    return next(losses)


def page(soak: Soak, outcomes: list[Outcome], starts: int, seconds: float, folders: tuple[Path, Path]) -> str:
    """The file: what was done, and a line for each fault."""
    again = sum(max(outcome.struck - outcome.went_on, 0) for outcome in outcomes)
    folder, undisturbed = folders
    last = [[r["loss.valid"] for r in read_metrics(f) if "loss.valid" in r][-1] for f in folders]
    machine = describe_environment(torch.device("cpu"))
    said = (
        f"Written by `python experiments/soak.py` (torch {machine['packages']['torch']}, {machine['cores']} "
        f"cores). The Compressive Transformer, with dropout, trained {soak.steps:,} steps on {RANKS} "
        f"processes (`--parallel ddp`), with a random fault in every {soak.every} steps and a checkpoint in "
        f"every {soak.steps // 100}. A full disk is a limit of one byte on the files that the rank may "
        f"write. The dashboard is killed, and started again {soak.every // 4} steps later."
    )
    end = (
        f"{len(outcomes)} faults, {starts} starts, at least {again:,} steps made again, {seconds:,.0f} s. "
        f"The training ended with the same bits as the undisturbed one: weights, optimizer, memories, random "
        f"states and all {len(read_metrics(folder)):,} records. Validation loss at the end: {last[0]:.6f} "
        f"nats, undisturbed {last[1]:.6f}."
    )
    table = [
        row("fault", "after step", "what", "the training", "went on from step", "next loss", "undisturbed"),
        row(*["---"] * 7),
        *(
            row(*cells(i, o), *(f"{loss_after(f, o.struck):.6f}" for f in (folder, undisturbed)))
            for i, o in enumerate(outcomes, 1)
        ),
    ]
    return "\n\n".join(["# Soak", fill(said, 115), "\n".join(table), fill(end, 115)]) + "\n"


def row(*entries: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, entries)) + " |"


def main(soak: Soak) -> None:
    """Train twice, compare, and write the page if both ended the same; else say what differs, and where."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    folders = (folder / "disturbed", folder / "undisturbed")
    try:
        with sigterm_as_exit(), ExitStack() as stack:
            dashboard = stack.enter_context(running(Dashboard(folder / "dashboard")))
            training = stack.enter_context(running(Training(soak, folders[1], "off")))
            if (ended := training.wait()) != "finished":
                raise RuntimeError(f"the undisturbed training ended with {ended}:\n{training.said}")
            begun = time.monotonic()
            outcomes, starts = disturbed(soak, folders[0], dashboard, stack)
            seconds = time.monotonic() - begun
    except RuntimeError as error:
        sys.exit(f"{error}\nall is kept in {folder}")
    if different := differences(*folders):
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    text = page(soak, outcomes, starts, seconds, folders)
    soak.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {soak.out}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Soak))
