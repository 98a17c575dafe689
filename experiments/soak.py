"""What a training run survives, and what a large text costs, on Linux.

``python -m experiments.soak`` trains on two processes, undisturbed and with faults at random moments, which
end a training run that is then resumed. In the end, both must be the same bits; else the exit code is 1.

``python -m experiments.soak --only large-text``, on a quiet machine, measures what it takes to divide a large
text, to train and to evaluate on it.
"""

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

from experiments.large_text import LargeText
from experiments.run_differences import find_differences
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.common.files import write_text
from memformers.common.machine import describe_environment
from memformers.common.processes import ending_as_exit, module_command, module_environment
from memformers.report.rendering import PLAIN
from memformers.report.rendering import markdown_table as table
from memformers.runs.metrics import read_metrics

DOCS = Path(__file__).parents[1] / "docs"

# The training run.
RANKS = 2
BATCH = 8
SEGMENT = 32
TOKENS_PER_STEP = BATCH * SEGMENT
LOG_EVERY = 5
MODEL = (
    "--model", "compressive", "--d-model", "64", "--n-heads", "4", "--d-ff", "128", "--n-layers", "2",
    "--segment-len", str(SEGMENT), "--mem-len", "32", "--c-mem-len", "16", "--dropout", "0.1",
)  # fmt: skip

# Its faults.
SIGKILL = "SIGKILL"
SIGTERM = "SIGTERM"
DISK_FULL = "disk full"
KINDS = (SIGKILL, SIGTERM, DISK_FULL)
REASONS = (
    r"stopped by SIG\w+ at token [\d,]+", r"Signal 9 \(SIGKILL\)", r"can't be written: .+?\.", r"error: .+",
)  # fmt: skip
"""Messages of a training run that ends, the most informative first."""
PATIENCE_SECONDS = 180.0
"""How long a training run may take to reach a step, and to end after a fault."""
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Soak:
    """Train on two processes with faults, and compare with the undisturbed training; or measure what a large
    text costs."""

    only: Literal["faults", "large-text"] = "faults"
    """Which of the two."""
    steps: Count = 2000
    """Training steps with faults, in all."""
    every: Count = 100
    """One fault in each interval of steps."""
    size: Count = 2**31
    """Bytes of the large text."""
    tokens: Count = 400_000
    """Tokens of each training run on it."""
    out: Path | None = None
    """The file to write: docs/soak.md, or docs/results/data/large_text/results.csv."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 * LOG_EVERY <= self.every <= self.steps:
            problem = f"every={self.every} must be between {2 * LOG_EVERY} and steps={self.steps}"
            raise UserError(f"{problem}: a fault is placed by records, which come every {LOG_EVERY} steps.")

    def run(self) -> None:
        with ending_as_exit(), tempfile.TemporaryDirectory(prefix="large-text-") as folder:
            try:
                if self.only == "faults":
                    default = "soak.md"
                    text = compare_trainings(self)
                else:
                    default = "results/data/large_text/results.csv"
                    text = LargeText(Path(folder), self.size, self.tokens).measure()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                sys.exit(str(error))
        out = self.out or DOCS / default
        write_text(out, text)
        print(f"{text}\nwritten: {out}")


class Fault(NamedTuple):
    step: int
    """The step whose record it follows."""
    kind: str
    rank: int


class Ended(NamedTuple):
    """How a start of the training run ended."""

    first_step: int
    """The step from which it was resumed."""
    last_step: int
    """The step after which the fault came."""
    outcome: str


def draw_faults(soak: Soak) -> list[Fault]:
    """One in each interval of ``every`` steps, the same number of each kind, in random order."""
    draw = random.Random(0)
    n_faults = soak.steps // soak.every
    kinds = [KINDS[i % len(KINDS)] for i in range(n_faults)]
    draw.shuffle(kinds)
    faults = []
    for i, kind in enumerate(kinds):
        step = i * soak.every + draw.randrange(LOG_EVERY, soak.every // 2 + 1)
        # Only the first rank writes, so only it can have a full disk.
        rank = 0 if kind == DISK_FULL else draw.randrange(RANKS)
        faults.append(Fault(step, kind, rank))
    return faults


def compare_trainings(soak: Soak) -> str:
    """Train twice; the page, if both results are equal. Otherwise exit with the differences."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"all is kept in {folder}")
    undisturbed = folder / "undisturbed"
    disturbed = folder / "disturbed"
    train_until(soak, undisturbed)

    # A start for each fault, and one that reaches the end.
    rows = []
    n_repeated = 0
    faults = draw_faults(soak)
    ended = train_until(soak, disturbed, faults[0])
    for number, fault in enumerate(faults, start=1):
        next_fault = faults[number] if number < len(faults) else None
        resumed = train_until(soak, disturbed, next_fault)
        n_repeated += max(ended.last_step - resumed.first_step, 0)
        kind = f"{fault.kind}, rank {fault.rank}"
        row = [str(number), str(ended.last_step), kind, ended.outcome, str(resumed.first_step)]
        print(*row, sep=" | ", flush=True)
        rows.append(row)
        ended = resumed

    different = find_differences(disturbed, undisturbed)
    if different:
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    head = ("fault", "after step", "what", "the training", "resumed from step")
    values = {
        "soak": soak,
        "ranks": RANKS,
        "machine": describe_environment(torch.device("cpu")),
        "rows": rows,
        "faults": table(head, rows),
        "again": n_repeated,
        "records": read_metrics(disturbed),
    }
    template = Path(__file__).with_suffix(".in.md").read_text(encoding="utf-8")
    return PLAIN.from_string(template).render(values) + "\n"


def train_until(soak: Soak, folder: Path, fault: Fault | None = None) -> Ended:
    """Train to a ``fault``, or to the end."""
    # Output goes through a pipe, since a file could not be written when the disk is full.
    process = subprocess.Popen(
        training_command(soak, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=module_environment() | {"OMP_NUM_THREADS": "1"},
    )
    try:
        step = 0
        if fault:
            step = wait_for_step(process, folder, fault.step)
            if process.poll() is None:
                strike(process.pid, fault)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS if fault else None)
    finally:
        process.terminate()
        process.wait()

    # How it ended, as its output says.
    reasons = [reason for pattern in REASONS for reason in re.findall(pattern, output)]
    outcome = "finished"
    if process.returncode:
        reason = reasons[0] if reasons else "no reason given"
        outcome = f"exit code {process.returncode}: {reason}"
    missed_fault = fault is not None and step < fault.step
    if missed_fault or (process.returncode and not fault):
        raise RuntimeError(f"the training ended with {outcome}:\n{output}")
    resumed = re.search(r"continues at token ([\d,]+)", output)
    first_step = int(resumed[1].replace(",", "")) // TOKENS_PER_STEP if resumed else 0
    return Ended(first_step, step, outcome)


def training_command(soak: Soak, folder: Path) -> list[str]:
    tokens = soak.steps * TOKENS_PER_STEP
    return [
        *module_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        "-m", "memformers", "train", "--resume", "--out", str(folder), "--data", "builtin", *MODEL,
        "--parallel", "ddp", "--batch-size", str(BATCH), "--max-tokens", str(tokens), "--evaluations", "4",
        "--log-every", str(LOG_EVERY), "--checkpoint-every", str(tokens // 100), "--dashboard", "off",
    ]  # fmt: skip


def wait_for_step(process: "subprocess.Popen[str]", folder: Path, step: int) -> int:
    """The last step that the ``process`` has recorded in ``folder``, once it is ``step`` or the process has
    ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        last_step = last_recorded_step(folder)
        if last_step >= step or process.poll() is not None:
            return last_step
        if time.monotonic() > deadline:
            raise RuntimeError(f"step {step} didn't come in {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(POLL_SECONDS)


def last_recorded_step(folder: Path) -> int:
    records = read_metrics(folder)
    return int(records[-1]["tokens"]) // TOKENS_PER_STEP if records else 0


def strike(torchrun: int, fault: Fault) -> None:
    """Let the ``fault`` happen to its rank, a process below ``torchrun``."""
    for process in psutil.Process(torchrun).children(recursive=True):
        if process.environ().get("RANK") != str(fault.rank):
            continue
        if fault.kind == DISK_FULL:
            process.rlimit(psutil.RLIMIT_FSIZE, (1, 1))  # from now on, no file may grow beyond a byte
        else:
            process.send_signal(getattr(signal, fault.kind))
        return
    raise RuntimeError(f"rank {fault.rank} is not running")


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(Soak).run()
