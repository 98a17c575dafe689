"""The machine: the device of a model and its fastest precision, memory, and what a report says of both."""

import contextlib
import ctypes
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from memformers.common.text import UserError

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What a processor may have that makes matrix products faster, as Linux names them."""
JOBS = "MEMFORMERS_JOBS"
"""The environment variable in which an experiment tells a training how many run at the same time."""
PACKAGES = ("memformers-torch", "torch", "einops", "labml", "labml-helpers", "numpy", "matplotlib")


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one. Raises UserError if
    there is no such device here, or if it stores no numbers."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
    except NotImplementedError:  # PyTorch was built without it, and says so in fifty lines
        reason = "this PyTorch doesn't have it"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    else:
        if device.type != "meta":
            return device
        reason = "it keeps shapes and no numbers"
    raise UserError(f"device={name!r} can't be used here: {reason}; use auto, cpu or, with a GPU, cuda.")


def multiplies_bfloat16_faster(device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices much faster in bfloat16 than in float32: GPUs since Ampere, and
    processors with instructions for it, which take a quarter of the time; others emulate it.

    Nothing is timed: on a busy machine, the same training would be computed once in one precision and once in
    the other.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and not {"avx512_bf16", "amx_bf16"}.isdisjoint(instructions())


def instructions() -> list[str]:
    """Which of ``INSTRUCTIONS`` this processor has; none where the system doesn't say it."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo(), re.MULTILINE)
    return [name for name in INSTRUCTIONS if flags and name in flags[1].split()]


def cpuinfo() -> str:
    """What Linux says of the processor; nothing elsewhere."""
    return CPUINFO.read_text() if CPUINFO.exists() else ""


def keep_freed_memory() -> None:
    """Let the C library, where it is glibc, keep freed memory for the next step of a training. By default it
    gives most of it back to the system after each step, and the system must clear the same pages again: about
    ten thousand of them in a step of 2,048 tokens, which takes a tenth of its time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: up to so many bytes from the heap, the most that may be
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: as many freed bytes are kept at its end


def give_back_freed_memory() -> None:
    """Let the C library, where it is glibc, give what is free in its heaps back to the system: dividing a
    large text into tokens leaves some 70 MiB."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and threads, as a report states them."""
    model = re.search(r"^model name\s*: *(.+)$", cpuinfo(), re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {package: installed(package) for package in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        **({"gpus": torch.cuda.device_count()} if torch.cuda.is_available() else {}),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"jobs": int(os.environ[JOBS])} if JOBS in os.environ else {}),
    }


def git_commit() -> str | None:
    """The commit that this package's files are of, with "-dirty" after it where tracked files differ from it;
    None where they are not tracked by git, as in an installed package."""
    here = Path(__file__)
    tracked, commit = (
        f"ls-files --error-unmatch {here.name}",
        "describe --always --dirty --abbrev=12 --exclude=*",
    )
    try:
        for command in (tracked, commit):
            git = ["git", "-C", str(here.parent), *command.split()]
            output = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip()


def peak_memory(device: torch.device) -> int | None:
    """The peak memory of this process so far, in bytes: of the GPU if it trains on one, else resident memory;
    None if the system doesn't report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    # Unlike getrusage, this doesn't count the parent's memory before exec.
    if status.exists() and (peak := re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)):
        return int(peak[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def installed(package: str) -> str:
    """The version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
