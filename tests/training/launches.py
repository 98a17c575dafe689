"""Trainings started as a user would: alone, or as several processes by torchrun."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from memformers.common.processes import module_environment
from memformers.training.config import TrainConfig

ARGUMENTS = [
    "--tokens", "2048", "--batch-size", "8", "--evaluations", "2", "--log-every", "4", "--d-model", "16",
    "--heads", "2", "--d-ff", "16", "--n-layers", "2", "--segment-len", "16", "--mem-len", "24",
    "--c-mem-len", "8", "--precision", "float32",
]  # fmt: skip
"""Sixteen steps; the first compresses nothing, since the memory has still room. In float32, so that other
numbers of processes agree on any machine."""


def start(folder: Path, *arguments: object, processes: int = 1) -> "subprocess.Popen[str]":
    """Begin to train into ``folder``."""
    command = [*python(processes), "-m", "memformers", "train", *ARGUMENTS, "--out", folder, *arguments]
    return subprocess.Popen(
        list(map(str, command)),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def python(processes: int) -> list[str]:
    """The command that runs a module, in one process or, started by torchrun, in several ``processes``."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else [])]


def environment() -> dict[str, str]:
    """That of the tests, with a core for each process."""
    return module_environment() | {"OMP_NUM_THREADS": "1"}


def worker(torchrun: int, rank: int) -> int:
    """The process of a rank, of a torchrun whose process is given, on Linux."""
    for task in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for pid in task.read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    raise LookupError(f"torchrun has no process of rank {rank}")


def program(folder: Path, configs: list[TrainConfig], processes: int) -> None:
    """Run ``ranks_program`` to its end."""
    arguments = ["-m", "tests.training.ranks_program", str(folder), json.dumps(list(map(asdict, configs)))]
    subprocess.run([*python(processes), *arguments], env=environment(),
                   check=True, timeout=300)  # fmt: skip
