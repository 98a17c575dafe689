"""The machine: the device of a model and its fastest precision, memory, and what a report says of both."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from memformers.common.errors import UserError

CPUINFO = Path("/proc/cpuinfo")
JOBS = "MEMFORMERS_JOBS"
"""The environment variable in which an experiment tells a training how many run at the same time."""
PACKAGES = ("memformers-torch", "torch", "einops", "labml", "labml-helpers", "numpy", "matplotlib")


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        number = torch.zeros(1, device=name)
        number.item()  # which meta doesn't have
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"device={name!r} can't be used here: {reason}; use auto, cpu or, with a GPU, cuda."
        ) from None
    return number.device


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Meanwhile, PyTorch computes with one thread, which waits for no other one."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def multiplies_bfloat16_faster(device: torch.device, source: Path = CPUINFO) -> bool:
    """Whether ``device`` has instructions for bfloat16. Nothing is timed: on a busy machine, a training would
    be computed once in one precision and once in the other."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo("flags", source)))


def cpuinfo(name: str, source: Path = CPUINFO) -> str:
    """What Linux says of the processor in ``source``; empty elsewhere."""
    lines = source.read_text() if source.exists() else ""
    match = re.search(rf"^{name}\s*:\s*(.*)$", lines, re.MULTILINE)
    return match[1] if match else ""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step of a training. By default it gives most of it back, and
    the system must clear the same pages again, which takes a tenth of the time of a small step."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: allocate up to 32 MiB, its maximum, from the heap
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of freed memory


@cache
def package_versions() -> Mapping[str, str]:
    """Read once, since it takes as long as a small step."""
    versions = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_environment(device: torch.device) -> dict[str, Any]:
    name = cpuinfo("model name").strip() or platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {**package_versions()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        **({"gpus": torch.cuda.device_count()} if torch.cuda.is_available() else {}),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"jobs": int(os.environ[JOBS])} if JOBS in os.environ else {}),
    }


def git_commit() -> str | None:
    """The commit of this package's files, with "-dirty" if they differ; None where git doesn't track them."""
    file = Path(__file__)
    output = ""
    # The first one fails where git doesn't track this file, as in an environment within another repository.
    for command in (
        f"ls-files --error-unmatch {file.name}",
        "describe --always --dirty --abbrev=12 --exclude=*",
    ):
        git = ["git", "-C", str(file.parent), *command.split()]
        try:
            output = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    return output.strip()


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process so far, in bytes: of the GPU if it trains on one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    # Unlike getrusage, this doesn't count the parent's memory before exec.
    peak = re.search(r"^VmHWM:\s+(\d+)", status.read_text() if status.exists() else "", re.MULTILINE)
    if peak:
        return int(peak[1]) * 1024
    peak_resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        peak_resident if sys.platform == "darwin" else peak_resident * 1024
    )  # which counts in KiB elsewhere
