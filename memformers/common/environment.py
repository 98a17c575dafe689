"""The machine and the versions a run was made with."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("memformers-torch", "torch", "einops", "labml", "labml-helpers", "numpy", "matplotlib")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and threads, as a report states them."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "device": _device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """The commit that this package's files are of, with "-dirty" after it where tracked files differ from it;
    None where they are not tracked by git, as in an installed package."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        for command in (["ls-files", "--error-unmatch", here.name],
                        ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]):  # fmt: skip
            found = subprocess.run([*git, *command], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def peak_memory(device: torch.device) -> int | None:
    """The peak memory of this process so far, in bytes: of the GPU if it trains on one, else resident memory;
    None if the system doesn't report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, this doesn't count the parent's memory before exec
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
