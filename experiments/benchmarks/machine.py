"""Measures the rate of matrix products and the memory of a process, and runs parts in separate processes."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from memformers.common.machine import peak_memory

ROOT = Path(__file__).parents[2]


class MatrixMultiply:
    """``torch.mm`` in float32, timed in between other measurements, so that both see the same machine."""

    def __init__(self, size: int = 1024):
        self.a, self.b, self.out = (torch.randn(size, size) for _ in range(3))

    def rate(self) -> float:
        """The highest floating-point operations a second: the matrices are in caches, and the output is
        allocated already."""
        torch.mm(self.a, self.b, out=self.out)
        start = time.perf_counter()
        torch.mm(self.a, self.b, out=self.out)
        return 2 * len(self.a) ** 3 / (time.perf_counter() - start)


def relative_error(came: Tensor, expected: Tensor) -> float:
    """RMS of the error relative to the RMS of what was expected."""
    came, expected = came.detach().double(), expected.detach().double()
    return ((came - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def first_line(error: Exception) -> str:
    """An error in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def resident_memory() -> int | None:
    """The memory of this process now, in bytes; None if the system doesn't report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def forget_peak_memory() -> None:
    """Let :func:`memformers.common.machine.peak_memory` start from what the process holds now, where the
    system (Linux) can; elsewhere importing may have held more than it left."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_of_this_process() -> int | None:
    """The most memory this process has held, in bytes."""
    return peak_memory(torch.device("cpu"))


def measure_in_child(*arguments: str) -> int | None:
    """What :mod:`experiments.benchmarks.child` prints for ``arguments``: bytes, or None if unknown.

    Raises RuntimeError, with what the process said, if it failed.
    """
    command = [sys.executable, "-m", "experiments.benchmarks.child", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    answer = done.stdout.split()[-1]
    return None if answer == "None" else int(answer)
