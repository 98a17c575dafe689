"""Trainings started as a user would: alone, or as several processes by torchrun."""

import subprocess
import sys
from pathlib import Path

from memformers.common.processes import module_environment

ARGUMENTS = [
    "--tokens", "2048", "--batch-size", "8", "--evaluations", "2", "--log-every", "4", "--d-model", "16",
    "--heads", "2", "--d-ff", "16", "--n-layers", "2", "--segment-len", "16", "--mem-len", "24",
    "--c-mem-len", "8", "--precision", "float32",
]  # fmt: skip
"""Sixteen steps; the first compresses nothing, since the memory has still room. In float32, so that other
numbers of processes agree on any machine."""


def start(folder: Path, *arguments: object, processes: int = 1) -> "subprocess.Popen[str]":
    """Begin to train into ``folder``."""
    return launch("memformers", "train", *ARGUMENTS, "--out", folder, *arguments, processes=processes)


def launch(module: str, *arguments: object, processes: int) -> "subprocess.Popen[str]":
    """Begin to run ``module``, in one process or, by torchrun, in several ``processes`` with a core each."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", module, *arguments]
    return subprocess.Popen(
        list(map(str, command)), env=module_environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def worker(torchrun: int, rank: int) -> int:
    """The process of a rank, of a torchrun whose process is given, on Linux."""
    for task in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for pid in task.read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    raise LookupError(f"torchrun has no process of rank {rank}")
