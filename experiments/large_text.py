"""What a large text costs: time and memory to divide it into tokens, to train on it and to evaluate on it,
beside the same training run on a text of 1 MB.

Run it with ``python -m experiments.large_text``, on Linux and on a quiet machine; it writes
docs/results/large_texts.md. The text is made by a program and removed in the end. Each step is a process of
its own, as people start it. Memory is what its processes together hold in RAM (PSS, in which a page that
several share counts once), the highest of samples.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.soak.__main__ import parts_that_differ
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.fields import Checked, Count
from memformers.common.files import read_json
from memformers.common.machine import describe_environment
from memformers.common.processes import module_command, module_environment
from memformers.report.markdown import table
from memformers.runs.folder import RESULT, read_metrics

EVERY_SECONDS = 0.1
"""The time between two samples of memory."""
MIB, MB = 2**20, 10**6
BLOCK = 2**20
"""Bytes that are drawn at once; the text is an order of some such blocks."""
MODEL = (
    "--model", "compressive", "--d-model", "32", "--heads", "2", "--n-layers", "1", "--d-ff", "32",
    "--segment-len", "128", "--mem-len", "64", "--c-mem-len", "32", "--batch-size", "16", "--device", "cpu",
    "--evaluations", "1", "--dashboard", "off", "--log-every", "1",
)  # fmt: skip


@dataclass(frozen=True)
class LargeText(Checked):
    """Measure what a large text costs."""

    size: Count = 2**31
    """Bytes of the text."""
    tokens: Count = 400_000
    """Tokens of each training run."""
    vocab_size: Count = 1024
    """Subwords that are learned."""
    out: Path = Path(__file__).parents[1] / "docs" / "results" / "large_texts.md"
    """The file to write the table into."""


@dataclass(frozen=True)
class Measured:
    """What a command took."""

    seconds: float
    peak: float
    """Bytes in RAM of all its processes together."""
    reached: float
    """Seconds until what was waited for had come."""


def write_words(path: Path, size: int, seed: int = 0) -> None:
    """Write a text of ``size`` bytes, lines of drawn words, some of them with letters of two bytes."""
    draw, letters = random.Random(seed), "etaoinshrdluäöéñ"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(30_000)]
    often = [1 / rank for rank in range(1, len(words) + 1)]
    blocks = []
    for _ in range(min(32, -(-size // BLOCK))):
        drawn = draw.choices(words, often, k=BLOCK // 3)
        lines = (" ".join(drawn[i : i + 12]) for i in range(0, len(drawn), 12))
        blocks.append("\n".join(lines).encode()[:BLOCK].decode(errors="ignore").encode() + b"\n")
    written = 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(
                draw.choice(blocks)[: size - written].decode(errors="ignore").encode() or b"\n"
            )


def processes_of(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def in_ram(root: int) -> int:
    """Bytes that a process and its descendants hold in RAM (PSS); of those that have just ended, none."""
    total = 0
    for process in processes_of(root):
        try:
            said = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in said.splitlines() if line.startswith("Pss:"))
    return total


def run(*arguments: str | Path, until: Callable[[], bool] = lambda: False, kill: bool = False) -> Measured:
    """Run a command of memformers and measure it; ``until`` says when that has come which is waited for, and
    with ``kill``, the command then gets SIGKILL. RuntimeError if it fails."""
    command = module_command("memformers", *map(str, arguments))
    start, peak, reached = time.perf_counter(), 0, 0.0
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=module_environment())
        while process.poll() is None:
            peak = max(peak, in_ram(process.pid))
            if not reached and until():
                reached = time.perf_counter() - start
                if kill:
                    process.send_signal(signal.SIGKILL)
            time.sleep(EVERY_SECONDS)
        seconds = time.perf_counter() - start
        if process.returncode != (-signal.SIGKILL if kill else 0):
            said.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{said.read().decode()[-2000:]}")
    return Measured(seconds, peak, reached)


def measure(settings: LargeText, folder: Path) -> list[list[str]]:
    """The rows of the table: what was done, what came, and the goal."""
    text, short, part = folder / "large.txt", folder / "short.txt", folder / "part.txt"
    held_out = folder / "held_out.txt"  # of which a run reads all at its end
    write_words(held_out, MB, seed=1)
    write_words(text, settings.size)
    write_words(short, MB)
    write_words(part, settings.size // 10)
    size, rows = text.stat().st_size, []

    def row(what: str, found: str, goal: str) -> None:
        rows.append([what, found, goal])
        print(f"{what}: {found}" + f" (goal: {goal})" * bool(goal), flush=True)

    def divide(source: Path, tokenizer: str, out: str) -> Measured:
        learned = ("--vocab-size", str(settings.vocab_size)) if tokenizer == "bpe" else ()
        how = ("--tokenizer", tokenizer, *learned, "--validation", held_out)
        return run("prepare", source, *how, "--out", folder / out)

    for name, tokenizer, goal in (
        ("bytes", "byte", "≥ 20 MB/s"),
        ("characters", "character", ""),
        ("words", "word", ""),
        ("subwords", "bpe", "≥ 4 MB/s"),
    ):
        found = divide(text, tokenizer, name)
        row(f"divide into {name}", f"{size / MB / found.seconds:.1f} MB/s", goal)
        row(f"divide into {name}: memory", f"{found.peak / MIB:,.0f} MiB", "≤ 500 MiB")
        if tokenizer != "bpe":
            shutil.rmtree(folder / name)
    divide(short, "bpe", "short")

    def train(name: str, data: Path, *more: str, kill: bool = False) -> Measured:
        out = folder / name
        tokens = str(settings.tokens)

        def begun() -> bool:
            steps = read_metrics(out) if (out / "metrics.jsonl").exists() else []
            return any("loss.train" in r and r["tokens"] > kill * settings.tokens / 2 for r in steps)

        command: list[str | Path] = ["train", "--data", data, "--tokens", tokens, "--out", out]
        return run(*command, *MODEL, *more, until=begun, kill=kill)

    often = ("--checkpoint-every", str(settings.tokens // 10))
    small, large = (train(name, folder / name[4:], *often) for name in ("run-short", "run-subwords"))
    row("first step of a training run", f"{large.reached:.1f} s", "≤ 10 s")
    more = (large.peak - small.peak) / MIB
    row("memory of a training run", f"{large.peak / MIB:,.0f} MiB", "")
    row("… more than on a text of 1 MB", f"{more:+,.0f} MiB", "≤ 100 MiB")
    speeds = [median_speed(folder / name) for name in ("run-subwords", "run-short")]
    row("tokens per second", f"{speeds[0]:,.0f}; on 1 MB: {speeds[1]:,.0f}", "the same")
    train("run-killed", folder / "subwords", *often, kill=True)
    train("run-killed", folder / "subwords", *often, "--resume")
    differ = parts_that_differ(folder / "run-subwords", folder / "run-killed")
    row(
        "resumed after SIGKILL", ", ".join(differ) + " differ" if differ else "the same bits", "the same bits"
    )
    model, of = folder / "run-subwords", folder / "of"
    found = run("evaluate", "--checkpoint", model, "--text", part, "--streams", "32", "--out", of)
    read = read_json(of / "evaluation.json")["tokens"]
    row(f"evaluate {part.stat().st_size / MB:,.0f} MB", f"{read / found.seconds:,.0f} tokens/s", "")
    row("evaluate: memory", f"{found.peak / MIB:,.0f} MiB", "≤ 500 MiB")
    return rows


def median_speed(run: Path) -> float:
    """The median of a run's tokens per second."""
    assert (run / RESULT).exists(), run
    speeds = sorted(r["tokens_per_second"] for r in read_metrics(run) if "tokens_per_second" in r)
    return speeds[len(speeds) // 2]


def page(settings: LargeText, rows: list[list[str]]) -> str:
    """The page: how it was measured, and the table."""
    machine = describe_environment(torch.device("cpu"))
    said = (
        f"Written by `python -m experiments.large_text` on {machine['cores']} cores ({machine['device']}), "
        f"with torch {machine['packages']['torch']}. The text, lines of drawn words, has {settings.size:,} "
        f"bytes; subwords are {settings.vocab_size:,}; each run reads {settings.tokens:,} tokens with "
        f"a small Compressive Transformer. Memory is what all processes of a command together hold in RAM "
        f"(PSS), including pages of mapped files, the highest of samples every {EVERY_SECONDS:g} s."
    )
    return f"# Large texts\n\n{said}\n\n{table(['what', 'measured', 'goal'], rows)}\n"


def main(settings: LargeText) -> None:
    """Measure, and write the page."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="large-text-") as folder:
        rows = measure(settings, Path(folder))
    settings.out.write_text(page(settings, rows), encoding="utf-8")
    print(f"written to {settings.out}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(LargeText))
