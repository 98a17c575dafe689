"""What a large text costs: to divide it into tokens, to train and to evaluate on it, on Linux.

``python -m experiments.soak --only large-text`` runs it. Memory is the most that the processes of a command
together hold in RAM (PSS, in which a page that several share counts once).
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from experiments.run_differences import find_differences
from memformers.common.files import csv_text, read_json
from memformers.common.processes import module_command, module_environment
from memformers.data.builtin import write_play
from memformers.runs.metrics import read_metrics

MB = 10**6
MIB = 2**20
SAMPLE_SECONDS = 0.1
"""Seconds between two samples of memory."""
TOKENIZERS = {"byte": "≥ 20 MB/s", "character": "", "word": "", "bpe": "≥ 4 MB/s"}
"""Each tokenizer with the speed that it is to have."""
MODEL = (
    "--model", "compressive", "--d-model", "32", "--n-heads", "2", "--n-layers", "1", "--d-ff", "32",
    "--segment-len", "128", "--mem-len", "64", "--c-mem-len", "32", "--batch-size", "16", "--device", "cpu",
    "--evaluations", "1", "--dashboard", "off", "--log-every", "1",
)  # fmt: skip
"""A small model, which reads fast."""


class Measured(NamedTuple):
    seconds: float
    mebibytes: float
    """The most in RAM of all processes of the command."""
    seconds_until: float
    """Seconds until the event that was waited for; 0 if it didn't come."""


@dataclass(frozen=True)
class LargeText:
    """The measurements on texts of ``size`` bytes and less in ``folder``, and runs of ``n_tokens``."""

    folder: Path
    size: int
    n_tokens: int

    def measure(self) -> str:
        """All measurements, as CSV."""
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self.write_texts()
        table = Table()
        self.measure_tokenizers(table)
        self.measure_training(table)
        self.measure_resuming(table)
        self.measure_evaluation(table)
        return csv_text(("what", "measured", "goal"), table.rows)

    def write_texts(self) -> None:
        write_words(self.folder / "held_out.txt", MB, seed=1)
        write_words(self.folder / "large.txt", self.size)
        write_words(self.folder / "short.txt", MB)
        write_words(self.folder / "part.txt", self.size // 10)

    def measure_tokenizers(self, table: "Table") -> None:
        """Divide the large text into each kind of tokens; the subwords are kept for training."""
        n_bytes = (self.folder / "large.txt").stat().st_size
        for tokenizer, goal in TOKENIZERS.items():
            name = "subwords" if tokenizer == "bpe" else f"{tokenizer}s"
            measured = self.tokenize("large", tokenizer, name)
            table.add(f"tokenize as {name}", f"{n_bytes / MB / measured.seconds:.1f} MB/s", goal)
            table.add(f"tokenize as {name}: memory", f"{measured.mebibytes:,.0f} MiB", "≤ 500 MiB")
            if tokenizer != "bpe":
                shutil.rmtree(self.folder / name)

    def measure_training(self, table: "Table") -> None:
        """Train on the large text, beside the same on a short one."""
        self.tokenize("short", "bpe", "short")
        on_short = self.train("run-short", "short")
        on_large = self.train("run-large", "subwords")
        table.add("first step of a training run", f"{on_large.seconds_until:.1f} s", "≤ 10 s")
        table.add("memory of a training run", f"{on_large.mebibytes:,.0f} MiB")
        more = on_large.mebibytes - on_short.mebibytes
        table.add("… more than on a text of 1 MB", f"{more:+,.0f} MiB", "≤ 100 MiB")
        speed = self.speed_of("run-large")
        speed_on_short = self.speed_of("run-short")
        table.add("tokens per second", f"{speed:,.0f}; on 1 MB: {speed_on_short:,.0f}", "the same")

    def measure_resuming(self, table: "Table") -> None:
        """Train on the large text again, killed half-way and resumed."""
        self.train("run-killed", "subwords", kill=True)
        self.train("run-killed", "subwords", "--resume")
        different = find_differences(self.folder / "run-large", self.folder / "run-killed")
        outcome = f"{', '.join(different)} differ" if different else "the same bits"
        table.add("resumed after SIGKILL", outcome, "the same bits")

    def measure_evaluation(self, table: "Table") -> None:
        part = self.folder / "part.txt"
        out = self.folder / "evaluation"
        checkpoint = self.folder / "run-large"
        measured = measure_command(
            "evaluate", "--checkpoint", checkpoint, "--text", part, "--streams", "32", "--out", out
        )
        n_tokens = read_json(out / "evaluation.json")["tokens"]
        n_bytes = part.stat().st_size
        table.add(f"evaluate {n_bytes / MB:,.0f} MB", f"{n_tokens / measured.seconds:,.0f} tokens/s")
        table.add("evaluate: memory", f"{measured.mebibytes:,.0f} MiB", "≤ 500 MiB")

    def tokenize(self, text: str, tokenizer: str, out: str) -> Measured:
        arguments = ["--tokenizer", tokenizer]
        if tokenizer == "bpe":
            arguments += ["--vocab-size", "1024"]
        arguments += ["--validation", str(self.folder / "held_out.txt"), "--out", str(self.folder / out)]
        return measure_command("prepare", self.folder / f"{text}.txt", *arguments)

    def train(self, run: str, data: str, *options: str, kill: bool = False) -> Measured:
        """Train a ``run``, and wait for its first step; with ``kill``, kill it half-way."""
        least_tokens = self.n_tokens / 2 if kill else 0

        def has_begun() -> bool:
            for record in read_metrics(self.folder / run):
                if "loss.train" in record and record["tokens"] > least_tokens:
                    return True
            return False

        budget = ("--max-tokens", str(self.n_tokens), "--checkpoint-every", str(self.n_tokens // 10))
        folders = ("--data", self.folder / data, "--out", self.folder / run)
        return measure_command("train", *folders, *budget, *MODEL, *options, until=has_begun, kill=kill)

    def speed_of(self, run: str) -> float:
        """Tokens per second, the median over the records of a ``run``."""
        speeds = []
        for record in read_metrics(self.folder / run):
            if "tokens_per_second" in record:
                speeds.append(record["tokens_per_second"])
        return median(speeds)


class Table:
    """Rows that are printed as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, name: str, measured: str, goal: str = "") -> None:
        self.rows.append((name, measured, goal))
        suffix = f" (goal: {goal})" if goal else ""
        print(f"{name}: {measured}{suffix}", flush=True)


def write_words(path: Path, size: int, seed: int = 0) -> None:
    """Write ``size`` bytes: a part of the built-in play, again and again, of which some letters have two."""
    block = write_play(min(size, MIB), seed).replace("th", "þ").encode()
    with path.open("wb") as file:
        for begin in range(0, size, len(block)):
            # The last block may be cut within a letter.
            text = block[: size - begin].decode(errors="ignore")
            file.write(text.encode())


def never() -> bool:
    return False


def measure_command(
    *arguments: str | Path, until: Callable[[], bool] = never, kill: bool = False
) -> Measured:
    """What a command of memformers costs, and when ``until`` was true; with ``kill`` it gets SIGKILL then."""
    command = module_command("memformers", *map(str, arguments))
    peak_bytes = 0
    seconds_until = 0.0
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=module_environment())
        while process.poll() is None:
            peak_bytes = max(peak_bytes, bytes_in_ram(process.pid))
            if not seconds_until and until():
                seconds_until = time.perf_counter() - start
                if kill:
                    process.send_signal(signal.SIGKILL)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        if process.returncode != (-signal.SIGKILL if kill else 0):
            log.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{log.read().decode()[-2000:]}")
    return Measured(seconds, peak_bytes / MIB, seconds_until)


def bytes_in_ram(process_id: int) -> int:
    """Bytes that a process and its descendants hold in RAM (PSS); of those that have just ended, none."""
    process = psutil.Process(process_id)
    n_bytes = 0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            n_bytes += member.memory_full_info().pss
    return n_bytes
