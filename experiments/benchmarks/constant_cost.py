"""What grows with a text or with the number of runs: tokens per second and resident memory of training and
evaluation over texts of two lengths, and the seconds of the live page and the report of many long runs.

    python -m experiments.benchmarks.constant_cost text
    python -m experiments.benchmarks.constant_cost pages --runs 200 --records 10000

Of a training, only reading, batching and evaluation windows depend on the text's length, so a tiny model and
the same number of steps show it. Texts are files of token ids, which are mapped as the package maps them.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import numpy as np
import torch
import tyro

from memformers import MemoryLM, ModelConfig, TrainConfig, train
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.fields import Checked, Count, replace_nested
from memformers.dashboard import live
from memformers.data.streams import plain_reading, training_segments
from memformers.evaluation.evaluate import evaluate_reading
from memformers.report.document import write_report
from memformers.runs.folder import CARD, METRICS
from memformers.runs.reader import Runs
from memformers.tracking.recorder import Tracking
from memformers.training.trainer import Trainer

VOCABULARY = 65
EVALUATED_TOKENS = 131_072
MODEL = ModelConfig(vocab_size=VOCABULARY, d_model=32, n_heads=2, d_ff=64, n_layers=1, segment_len=64)
TRAINING = TrainConfig(MODEL, batch_size=32, memory_warmup=0.0)


@dataclass(frozen=True)
class Options(Checked):
    """What to measure."""

    what: Annotated[Literal["text", "pages"], tyro.conf.Positional]
    """Training and evaluation over texts of two lengths, or the pages of many runs."""
    tokens: tuple[Count, Count] = (10_000_000, 300_000_000)
    """The lengths of both texts (text)."""
    rounds: Count = 5
    """How often both texts take turns, each in a separate process (text)."""
    steps: Count = 300
    """Training steps in a round (text)."""
    runs: Count = 200
    """How many runs there are (pages)."""
    records: Count = 10_000
    """How many records each of them has (pages)."""


def read_text(path: Path, steps: int) -> dict[str, float]:
    """Train a tiny model on the ids in the file ``path``, and evaluate it on its first ones: tokens per CPU
    second, and MiB that are resident afterwards."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = np.memmap(path, np.uint8, "r")
    model = MemoryLM(MODEL)
    config = replace_nested(TRAINING, max_tokens=10**12, precision="float32")
    segments = training_segments(
        tokens, config.batch_size, MODEL.segment_len, chunk_len=config.chunk_len, seed=config.seed
    )
    trainer = Trainer(model, segments, config)
    model.train()
    for _ in range(10):  # fills the memory
        trainer.step(next(segments))
    began = time.process_time()
    for _ in range(steps):
        trainer.step(next(segments))
    trained = time.process_time()
    prefix = tokens[:EVALUATED_TOKENS]
    reading = plain_reading(len(prefix), 16, MODEL.segment_len)
    evaluate_reading(model, prefix, reading, lambda losses: None)
    evaluated = time.process_time()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return {
        "training, tokens/s": steps * config.tokens_per_step / (trained - began),
        "evaluation, tokens/s": EVALUATED_TOKENS / (evaluated - trained),
        "resident, MiB": resident / 2**20,
    }


def compare_texts(options: Options) -> None:
    """Print the medians for both texts, and the longer one's as a multiple of the shorter one's."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.bin" for n in options.tokens]
        for path, n_tokens in zip(paths, options.tokens, strict=True):
            np.random.default_rng(0).integers(VOCABULARY, size=n_tokens, dtype=np.uint8).tofile(path)
        rounds: list[list[dict[str, float]]] = []
        for _ in range(options.rounds):
            of_round = []
            for path in paths:
                command = [sys.executable, "-m", __spec__.name, "text", "--of", str(path)]
                command += ["--steps", str(options.steps)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                of_round.append(json.loads(output))
            rounds.append(of_round)
    for name in rounds[0][0]:
        short, long = (median(of_round[i][name] for of_round in rounds) for i in (0, 1))
        ratio = median(of_round[1][name] / of_round[0][name] for of_round in rounds)
        print(f"{name}: {short:,.0f} and {long:,.0f}, {ratio:.3f} times")


def write_runs(folder: Path, n_runs: int, n_records: int) -> None:
    """Runs of one tiny training, each with this number of records, as the package writes them."""
    first = folder / "run-000"
    config = replace_nested(TRAINING, max_tokens=4 * TRAINING.tokens_per_step, evaluations=1)
    model = replace(MODEL, vocab_size=None)  # that of the text
    train(replace(config, model=model, data="builtin"), first, dashboard="off")
    last = json.loads((first / METRICS).read_text(encoding="utf-8").splitlines()[0])
    for i in range(n_runs):
        run = folder / f"run-{i:03}"
        if run != first:
            shutil.copytree(first, run)
        (run / METRICS).unlink()
        (run / CARD).unlink()
        with Tracking(run, run.name, {}, dashboard="off") as tracking:
            for step in range(1, n_records + 1):
                tracking.record({**last, "tokens": 2048 * step, "loss.train": 3.0 + i / step})


def seconds_of(call: Callable[[], object]) -> tuple[float, object]:
    """The seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def time_pages(options: Options) -> None:
    """Print the seconds of the first and second request for the page, and of the report."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "many"
        folder.mkdir()
        write_runs(folder, options.runs, options.records)
        seconds, read = seconds_of(lambda: Runs(folder))
        assert isinstance(read, Runs)
        print(f"reading all records: {seconds:.2f} s", flush=True)
        for label in ("first", "second"):
            seconds, _ = seconds_of(read.update)
            described, page = seconds_of(lambda: json.dumps(live.describe(read, "loss.train")))
            size = len(str(page)) / 2**20
            print(f"{label} page: {seconds:.2f} s for new records, {described:.2f} s for the page of "
                  f"{size:.1f} MiB", flush=True)  # fmt: skip
        for label in ("first", "second"):
            seconds, _ = seconds_of(lambda: write_report(folder))
            print(f"{label} report: {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    with cli_errors():
        if "--of" in sys.argv:  # a process for one text
            print(json.dumps(read_text(Path(sys.argv[3]), int(sys.argv[5]))))
        else:
            chosen = parse_arguments(Options)
            compare_texts(chosen) if chosen.what == "text" else time_pages(chosen)
