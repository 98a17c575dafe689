"""memformers' own modules as programs in their own processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` of this very package with this very Python."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment for a child process that imports the same package as this process: from the same place
    and, from Python 3.11 on, never from a folder of the same name in the current folder."""
    home = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    path = home if not before else home + os.pathsep + before
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def is_first() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one. Only the first
    prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def run_module(module: str, *arguments: str, environment: Mapping[str, str]) -> int:
    """Run ``module`` to its end and return its exit code.

    Ctrl-C or SIGTERM is passed on to the child, which may have to save a checkpoint, and KeyboardInterrupt or
    SystemExit is raised when it has ended. A second Ctrl-C kills it.
    """
    process = subprocess.Popen(
        module_command(module, *arguments), env=module_environment() | dict(environment)
    )
    try:
        with sigterm_as_exit():
            return process.wait()
    except (KeyboardInterrupt, SystemExit):
        process.terminate()
        process.wait()
        raise
    finally:
        if process.poll() is None:
            process.kill()


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A block in which a signal has this handler. Nothing changes outside of the main thread, which alone
    gets signals, or if the signal is ignored or not handled by Python code."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(number) in (None, signal.SIG_IGN):
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def sigterm_as_exit() -> contextlib.AbstractContextManager[None]:
    """A block in which SIGTERM raises SystemExit with the conventional code."""
    return handling(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A block that Ctrl-C doesn't interrupt: KeyboardInterrupt is raised when the block has ended."""
    interrupts: list[int] = []
    with handling(signal.SIGINT, lambda number, frame: interrupts.append(number)):
        yield
    if interrupts:
        signal.raise_signal(signal.SIGINT)
