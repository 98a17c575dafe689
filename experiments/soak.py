"""What a training run survives, and what a large text costs, on Linux.

``python -m experiments.soak`` trains on two processes, undisturbed and with faults at random moments, which
end a training run that is then resumed. In the end, both must be the same bits; else the exit code is 1.

``python -m experiments.soak --only large-text``, on a quiet machine, measures what it takes to divide a large
text, to train and to evaluate on it. Memory is the most that the processes of a command together hold in RAM
(PSS, in which a page that several share counts once).
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import psutil
import torch

from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.common.files import csv_text, numbered, read_json, write_text
from memformers.common.machine import describe_environment
from memformers.common.processes import ending_as_exit, module_command, module_environment
from memformers.data.builtin import write_play
from memformers.report.rendering import PLAIN
from memformers.report.rendering import markdown_table as table
from memformers.runs.folder import CONFIG
from memformers.runs.metrics import read_metrics
from memformers.training.checkpoints import differences

DOCS = Path(__file__).parents[1] / "docs"
RANKS, BATCH, SEGMENT, LOG_EVERY = 2, 8, 32, 5
TOKENS_A_STEP = BATCH * SEGMENT
MODEL = (
    "--model", "compressive", "--d-model", "64", "--n-heads", "4", "--d-ff", "128", "--n-layers", "2",
    "--segment-len", str(SEGMENT), "--mem-len", "32", "--c-mem-len", "16", "--dropout", "0.1",
)  # fmt: skip
SMALL = (
    "--model", "compressive", "--d-model", "32", "--n-heads", "2", "--n-layers", "1", "--d-ff", "32",
    "--segment-len", "128", "--mem-len", "64", "--c-mem-len", "32", "--batch-size", "16", "--device", "cpu",
    "--evaluations", "1", "--dashboard", "off", "--log-every", "1",
)  # fmt: skip
KINDS = ("SIGKILL", "SIGTERM", "disk full")
Fault = tuple[int, str, int]  # the step whose record it follows, its kind, and the rank
SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors")
TIMES = {"seconds", "evaluation_seconds", "tokens_per_second"}
REASONS = (  # messages of a training run, the most informative first
    r"stopped by SIG\w+ at token [\d,]+", r"Signal 9 \(SIGKILL\)", r"can't be written: .+?\.", r"error: .+",
)  # fmt: skip
PATIENCE_SECONDS, SAMPLE_SECONDS = 180.0, 0.1  # to end after a fault; between two samples of memory
MIB, MB = 2**20, 10**6


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
                text = soak(self) if self.only == "faults" else large_text(self, Path(folder))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                sys.exit(str(error))
        usual = "soak.md" if self.only == "faults" else "results/data/large_text/results.csv"
        out = self.out or DOCS / usual
        write_text(out, text)
        print(f"{text}\nwritten: {out}")


def faults(soak: Soak) -> list[Fault]:
    """One in each interval of ``every`` steps, the same number of each kind, in random order."""
    draw = random.Random(0)
    count = soak.steps // soak.every
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    draw.shuffle(kinds)
    faults = list[Fault]()
    for i, kind in enumerate(kinds):
        step = i * soak.every + draw.randrange(LOG_EVERY, soak.every // 2 + 1)
        faults.append(
            (step, kind, 0 if kind == "disk full" else draw.randrange(RANKS))
        )  # the first rank writes
    return faults


def train_until(soak: Soak, folder: Path, fault: Fault | None = None) -> tuple[int, int, str]:
    """Train to the end or a ``fault``. Returns the steps of start and fault, and how it ended."""
    (step, kind, rank), tokens = fault or (0, "", 0), soak.steps * TOKENS_A_STEP
    command = [
        *module_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        "-m", "memformers", "train", "--resume", "--out", str(folder), "--data", "builtin", *MODEL,
        "--parallel", "ddp", "--batch-size", str(BATCH), "--max-tokens", str(tokens), "--evaluations", "4",
        "--log-every", str(LOG_EVERY), "--checkpoint-every", str(tokens // 100), "--dashboard", "off",
    ]  # fmt: skip
    # Through a pipe, since a file could not be written when the disk is full.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=module_environment() | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (struck := last_step(folder)) < step and process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} didn't come in {PATIENCE_SECONDS:.0f} seconds")
            time.sleep(0.02)
        if kind and process.poll() is None:
            strike(process.pid, kind, rank)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS if kind else None)
    finally:
        process.terminate()
        process.wait()
    reasons = [reason for pattern in REASONS for reason in re.findall(pattern, output)]
    ended = f"exit code {process.returncode}: {reasons[0] if reasons else 'no reason given'}"
    if struck < step or (process.returncode and not kind):
        raise RuntimeError(f"the training ended with {ended}:\n{output}")
    begun = re.search(r"continues at token ([\d,]+)", output)
    resumed = int(begun[1].replace(",", "")) // TOKENS_A_STEP if begun else 0
    return resumed, struck, ended if process.returncode else "finished"


def last_step(folder: Path) -> int:
    records = read_metrics(folder)
    return int(records[-1]["tokens"]) // TOKENS_A_STEP if records else 0


def strike(torchrun: int, kind: str, rank: int) -> None:
    below = psutil.Process(torchrun).children(recursive=True)
    struck = next((process for process in below if process.environ().get("RANK") == str(rank)), None)
    if struck is None:
        raise RuntimeError(f"rank {rank} is not running")
    if kind == "disk full":  # from now on, no file may grow beyond a byte
        struck.rlimit(psutil.RLIMIT_FSIZE, (1, 1))
    else:
        struck.send_signal(getattr(signal, kind))


def soak(soak: Soak) -> str:
    """Train twice; the page, if both results are equal. Otherwise exit with the differences."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"all is kept in {folder}")
    folders = (folder / "disturbed", folder / "undisturbed")
    train_until(soak, folders[1])
    rows, again, due = list[list[str]](), 0, faults(soak)
    starts = (train_until(soak, folders[0], fault) for fault in (*due, None))
    for (_, kind, rank), ((_, struck, ended), (resumed, *_)) in zip(due, pairwise(starts), strict=True):
        again += max(struck - resumed, 0)
        rows.append([str(len(rows) + 1), str(struck), f"{kind}, rank {rank}", ended, str(resumed)])
        print(*rows[-1], sep=" | ", flush=True)
    if different := parts_that_differ(*folders):
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    head = ("fault", "after step", "what", "the training", "resumed from step")
    values = {
        "soak": soak, "ranks": RANKS, "machine": describe_environment(torch.device("cpu")),
        "rows": rows, "faults": table(head, rows), "again": again, "records": read_metrics(folders[0]),
    }  # fmt: skip
    text = Path(__file__).with_suffix(".in.md").read_text(encoding="utf-8")
    return PLAIN.from_string(text).render(values) + "\n"


def parts_that_differ(*folders: Path) -> list[str]:
    ends = [numbered(run / "checkpoints")[0] for run in folders]
    names = [name for name in SAME if len({(end / name).read_bytes() for end in ends}) > 1]
    one, other = ([{k: r[k] for k in r.keys() - TIMES} for r in read_metrics(run)] for run in folders)
    settings = differences(*(read_json(run / CONFIG) for run in folders))
    return names + [settings] * bool(settings) + ["the records"] * (one != other)


def write_words(path: Path, size: int, seed: int = 0) -> None:
    """Write ``size`` bytes: a part of the built-in play, again and again, of which some letters have two."""
    block = write_play(min(size, MIB), seed).replace("th", "þ").encode()
    with path.open("wb") as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at].decode(errors="ignore").encode())


def in_ram(process: int) -> int:
    """Bytes that a process and its descendants hold in RAM (PSS); of those that have just ended, none."""
    root, held = psutil.Process(process), 0
    for member in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            held += member.memory_full_info().pss
    return held


def measured(
    *arguments: str | Path, until: Callable[[], bool] = lambda: False, kill: bool = False
) -> tuple[float, float, float]:
    """The seconds that a command of memformers took, the most MiB in RAM of all its processes, and the
    seconds until ``until`` was true, when with ``kill`` it gets SIGKILL."""
    command = module_command("memformers", *map(str, arguments))
    start, peak, reached = time.perf_counter(), 0, 0.0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=module_environment())
        while process.poll() is None:
            peak = max(peak, in_ram(process.pid))
            if not reached and until():
                reached = time.perf_counter() - start
                if kill:
                    process.send_signal(signal.SIGKILL)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        if process.returncode != (-signal.SIGKILL if kill else 0):
            log.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{log.read().decode()[-2000:]}")
    return seconds, peak / MIB, reached


def large_text(settings: Soak, folder: Path) -> str:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rows = list[tuple[str, str, str]]()
    sizes = {"held_out": MB, "large": settings.size, "short": MB, "part": settings.size // 10}
    for name, size in sizes.items():
        write_words(folder / f"{name}.txt", size, seed=int(name == "held_out"))

    def row(what: str, measured: str, goal: str = "") -> None:
        rows.append((what, measured, goal))
        print(f"{what}: {measured}" + f" (goal: {goal})" * bool(goal), flush=True)

    def divide(source: str, tokenizer: str, out: str) -> tuple[float, float, float]:
        learned = ("--vocab-size", "1024") if tokenizer == "bpe" else ()
        how = ("--tokenizer", tokenizer, *learned, "--validation", folder / "held_out.txt")
        return measured("prepare", folder / f"{source}.txt", *how, "--out", folder / out)

    goals = {"byte": "≥ 20 MB/s", "character": "", "word": "", "bpe": "≥ 4 MB/s"}
    for tokenizer, goal in goals.items():
        name = "subwords" if tokenizer == "bpe" else f"{tokenizer}s"
        seconds, peak, _ = divide("large", tokenizer, name)
        row(f"tokenize as {name}", f"{(folder / 'large.txt').stat().st_size / MB / seconds:.1f} MB/s", goal)
        row(f"tokenize as {name}: memory", f"{peak:,.0f} MiB", "≤ 500 MiB")
        if tokenizer != "bpe":
            shutil.rmtree(folder / name)
    divide("short", "bpe", "short")

    def train(name: str, data: str, *more: str, kill: bool = False) -> tuple[float, float, float]:
        def begun() -> bool:
            least = kill * settings.tokens / 2
            return any("loss.train" in r and r["tokens"] > least for r in read_metrics(folder / name))

        command = (
            "train",
            "--data",
            folder / data,
            "--max-tokens",
            str(settings.tokens),
            "--out",
            folder / name,
        )
        often = "--checkpoint-every", str(settings.tokens // 10)
        return measured(*command, *SMALL, *often, *more, until=begun, kill=kill)

    (_, small, _), (_, peak, first) = train("run-short", "short"), train("run-large", "subwords")
    row("first step of a training run", f"{first:.1f} s", "≤ 10 s")
    row("memory of a training run", f"{peak:,.0f} MiB")
    row("… more than on a text of 1 MB", f"{peak - small:+,.0f} MiB", "≤ 100 MiB")
    speeds = [
        median(r["tokens_per_second"] for r in read_metrics(folder / run) if "tokens_per_second" in r)
        for run in ("run-large", "run-short")
    ]
    row("tokens per second", f"{speeds[0]:,.0f}; on 1 MB: {speeds[1]:,.0f}", "the same")
    train("run-killed", "subwords", kill=True)
    train("run-killed", "subwords", "--resume")
    differ = ", ".join(parts_that_differ(folder / "run-large", folder / "run-killed"))
    row("resumed after SIGKILL", f"{differ} differ" if differ else "the same bits", "the same bits")
    part, of = folder / "part.txt", folder / "of"
    how = "--checkpoint", folder / "run-large", "--text", part, "--streams", "32", "--out", of
    seconds, peak, _ = measured("evaluate", *how)
    read = read_json(of / "evaluation.json")["tokens"]
    row(f"evaluate {part.stat().st_size / MB:,.0f} MB", f"{read / seconds:,.0f} tokens/s")
    row("evaluate: memory", f"{peak:,.0f} MiB", "≤ 500 MiB")
    return csv_text(("what", "measured", "goal"), rows)


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(Soak).run()
