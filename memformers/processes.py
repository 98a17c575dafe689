"""Our own modules, run as programs in processes of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

GRACE_SECONDS = 8.0
"""How long a child may take to end after Ctrl-C, which the terminal sends to it as well."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` of this very package with this very Python."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """This process's environment, so that a child imports the package that the parent did: from
    where it is, and (from Python 3.11 on) never from a folder of the same name that happens to be
    the current one."""
    home = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    path = home if not before else home + os.pathsep + before
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_module(module: str, *arguments: str, environment: Mapping[str, str]) -> int:
    """Run ``module`` to its end and return its exit code; on Ctrl-C it may end well before
    KeyboardInterrupt goes on."""
    process = subprocess.Popen(
        module_command(module, *arguments), env=module_environment() | dict(environment)
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        process.kill()
        raise
