"""Trainings started as a user would: alone, or as several processes by torchrun."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from memformers.processes import module_environment
from memformers.training.config import TrainConfig

ARGUMENTS = [
    "--tokens", "2048", "--batch-size", "8", "--evaluations", "2", "--log-every", "4", "--d-model", "16",
    "--heads", "2", "--d-ff", "16", "--n-layers", "2", "--segment-len", "16", "--mem-len", "24",
    "--c-mem-len", "8",
]  # fmt: skip
"""Sixteen steps; the first compresses nothing, since the memory has still room."""


def command(folder: Path, *arguments: object, processes: int = 1) -> list[str]:
    """The command line of a training into ``folder``."""
    start = [*python(processes), "-m", "memformers.cli", "train"]
    return [*start, *ARGUMENTS, "--out", str(folder), *map(str, arguments)]


def python(processes: int) -> list[str]:
    """What runs a module, by itself or so many times by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else [])]


def environment() -> dict[str, str]:
    """That of the tests, with a core for each process."""
    return module_environment() | {"OMP_NUM_THREADS": "1"}


def launch(folder: Path, *arguments: object, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Train to the end."""
    return subprocess.run(
        command(folder, *arguments, processes=processes),
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def start(folder: Path, *arguments: object, processes: int = 1) -> "subprocess.Popen[str]":
    """Begin to train."""
    return subprocess.Popen(
        command(folder, *arguments, processes=processes),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    """The processes that a process has started, on Linux."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def worker(torchrun: int, rank: int) -> int:
    """The process of a rank, of a torchrun whose process is given, on Linux."""
    for pid in children(torchrun):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise LookupError(f"torchrun has no process of rank {rank}: {children(torchrun)}")


def program(folder: Path, config: TrainConfig, processes: int) -> None:
    """Run ``ranks_program`` to its end."""
    arguments = ["-m", "tests.training.ranks_program", str(folder), json.dumps(asdict(config))]
    subprocess.run([*python(processes), *arguments], env=environment(),
                   check=True, timeout=300)  # fmt: skip
