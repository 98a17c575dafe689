"""What tracking costs, on Linux: the processor time of the processes that send a run's records and receive
them, late in a long run.

Run it with ``python -m experiments.benchmarks.tracking``; it prints a table.
"""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.soak import Dashboard, running, until
from memformers.report.markdown import table
from memformers.tracking.recorder import Tracking

PAST, EVERY_SECONDS, WATCHED_SECONDS = 10_000, 0.25, 60.0
"""The number of records that the dashboard already has, of a run of 100,000 steps; how often a new record
comes; how long it is measured."""


def sending_shares(metrics: int) -> tuple[float, float]:
    """The fractions of one core's time that the run's relay and the dashboard use late in a run, whose
    records have this number of ``metrics`` each."""
    values = {f"metric_{i}.train": 1.0 + i for i in range(metrics)}
    with TemporaryDirectory() as folder, running(Dashboard(Path(folder) / "records")) as dashboard:
        run = Path(folder) / "run"
        run.mkdir()
        with Tracking(run, "benchmark", {}, f"{dashboard.address}/api/v1/default") as tracking:
            for step in range(PAST):
                tracking.record(values | {"tokens": step * 512.0, "seconds": step * EVERY_SECONDS})
            assert tracking._relay
            processes = (tracking._relay.pid, dashboard.process.pid)
            until(lambda: is_idle(processes))
            before, start = [cpu_seconds(pid) for pid in processes], time.monotonic()
            while (elapsed := time.monotonic() - start) < WATCHED_SECONDS:
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


if __name__ == "__main__":
    rows = [[f"{n:,}", *(f"{share:.2%}" for share in sending_shares(n))] for n in (10, 100, 1_000)]
    print(f"late in a run, with {PAST:,} records behind it and one every {EVERY_SECONDS} s:\n")
    print(table(["metrics a record", "relay, share of a core", "dashboard"], rows))
