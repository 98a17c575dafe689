"""The costs of tracking: the time of a record at the beginning, after 20,000 steps, and with a dashboard that
never answers, compared with the time of a real training between two records; and, on Linux, the processor
time of the processes that send the records and receive them, late in a long run.

Run it with ``python -m experiments.benchmarks.tracking``; it prints two tables.
"""

import os
import socket
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from experiments.benchmarks.measuring import spread
from experiments.soak.programs import Dashboard, running, until
from memformers.data.builtin import write_play
from memformers.data.streams import training_segments
from memformers.data.tokenizers import build_tokenizer
from memformers.report.markdown import table
from memformers.tracking.recorder import Tracking
from memformers.training.config import TrainConfig
from memformers.training.loop import train_steps
from memformers.training.run import build_model, with_vocabulary

RECORD = {"tokens": 512.0, "seconds": 1.0, **{f"metric_{i}.train": 1.0 + i for i in range(10)}}
PAST, EVERY_SECONDS, WATCHED_SECONDS = 10_000, 0.25, 60.0
"""The number of records that the dashboard already has, of a run of 100,000 steps; how often a new record
comes; how long it is measured."""


def record_times(dashboard: str, steps: int = 20_000) -> list[float]:
    """Seconds that each of ``steps`` records took."""
    times = []
    with TemporaryDirectory() as folder, Tracking(Path(folder), "benchmark", {}, dashboard) as tracking:
        for step in range(steps):
            start = time.perf_counter()
            tracking.record(RECORD | {"tokens": float(step)})
            times.append(time.perf_counter() - start)
    return times


def record_interval() -> float:
    """Seconds of default Transformer-XL training between two records."""
    text = write_play(200_000)
    tokenizer = build_tokenizer("character", text)
    config = with_vocabulary(TrainConfig(batch_size=8, tokens=512 * 100), tokenizer.vocab_size)
    times: list[float] = []
    train_steps(
        build_model(config),
        training_segments(tokenizer.encode(text), config.batch_size, config.model.segment_len),
        config,
        record=lambda progress, _: times.append(progress.seconds),
        evaluate=lambda _: None,
    )
    return median(b - a for a, b in pairwise(times))


def sending_shares(metrics: int, past: int = PAST, seconds: float = WATCHED_SECONDS) -> tuple[float, float]:
    """The fractions of one core's time that the run's relay and the dashboard use late in a run, whose
    records have this number of ``metrics`` each."""
    values = {f"metric_{i}.train": 1.0 + i for i in range(metrics)}
    with TemporaryDirectory() as folder, running(Dashboard(Path(folder) / "records")) as dashboard:
        run = Path(folder) / "run"
        run.mkdir()
        api = f"{dashboard.address}/api/v1/default"
        with Tracking(run, "benchmark", {}, api) as tracking:
            for step in range(past):
                tracking.record(values | {"tokens": step * 512.0, "seconds": step * EVERY_SECONDS})
            assert tracking._relay
            processes = (tracking._relay.pid, dashboard.process.pid)
            until(lambda: is_idle(processes))
            before, start = [cpu_seconds(pid) for pid in processes], time.monotonic()
            while (elapsed := time.monotonic() - start) < seconds:
                step += 1
                tracking.record(values | {"tokens": step * 512.0, "seconds": step * EVERY_SECONDS})
                time.sleep(EVERY_SECONDS)
            relay, server = (cpu_seconds(pid) - b for pid, b in zip(processes, before, strict=True))
    return relay / elapsed, server / elapsed


def is_idle(processes: tuple[int, ...]) -> bool:
    """Whether these processes compute nothing for three seconds, since all records are processed."""
    before = sum(map(cpu_seconds, processes))
    time.sleep(3.0)
    return sum(map(cpu_seconds, processes)) - before < 0.05


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    interval, rows = record_interval(), []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api/v1/default"
        for name, url in (("none", ""), ("never answers", address)):
            times = record_times(url)
            for label, part in (("first 1,000", times[:1_000]), ("last 1,000 of 20,000", times[-1_000:])):
                rows.append([name, label, f"{spread(part, 1e6):.1f}", f"{median(part) / interval:.4%}"])
    print(f"a record every {interval * 1e3:.0f} ms of training\n")
    print(table(["dashboard", "steps", "a record, median (quartiles), µs", "share of training"], rows))
    rows = [[f"{n:,}", *(f"{share:.2%}" for share in sending_shares(n))] for n in (10, 100, 1_000)]
    print(f"\nlate in a run, with {PAST:,} records behind it and one every {EVERY_SECONDS} s:\n")
    print(table(["metrics a record", "relay, share of a core", "dashboard"], rows))


if __name__ == "__main__":
    main()
