"""memformers' own modules as programs in their own processes."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import memformers


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` of this very package with this very Python."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment for a child process that imports the same package as this process: from the same place
    and, from Python 3.11 on, never from a folder of the same name in the current folder."""
    root = str(Path(memformers.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def is_first() -> bool:
    """Whether this is the only process, or the first that torchrun started, which prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def run_modules(
    commands: Sequence[Sequence[str]],
    jobs: int,
    *,
    environment: Mapping[str, str],
    begin: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[int, int]]:
    """Run ``commands``, each a module and its arguments, in this order and at most ``jobs`` at a time; yields
    the number and the exit code of each when it has ended. ``begin`` is called with the number of each before
    it starts.

    Ctrl-C, SIGTERM or SIGHUP ends the running processes with SIGTERM, for which they save a checkpoint, and
    KeyboardInterrupt or SystemExit is raised when they have. A second Ctrl-C kills them. If this process is
    killed itself, they get SIGTERM.
    """
    waiting = list(enumerate(commands))[::-1]
    running: dict[int, subprocess.Popen[bytes]] = {}
    variables = module_environment() | dict(environment)
    theirs, ours = os.pipe()
    try:
        with ending_as_exit():
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, (module, *arguments) = waiting.pop()
                    begin(number)
                    command = module_command("memformers.common.processes", module, *arguments)
                    running[number] = subprocess.Popen(command, env=variables, stdin=theirs)
                time.sleep(0.1)
                for number in [n for n, process in running.items() if process.poll() is not None]:
                    yield number, running.pop(number).returncode
    except (KeyboardInterrupt, SystemExit):
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        raise
    finally:
        for process in running.values():
            process.kill()
        os.close(theirs)
        os.close(ours)


def end_with_parent() -> None:
    """Send SIGTERM to this process when the parent has ended, however: standard input is a pipe that nobody
    writes to, and whose other end only the parent has."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A block in which a signal has this handler. Nothing changes outside of the main thread, which alone
    gets signals, or if the signal is ignored or not handled by Python code."""
    main = threading.current_thread() is threading.main_thread()
    changes = main and signal.getsignal(number) not in (None, signal.SIG_IGN)
    before = signal.signal(number, handler) if changes else None
    try:
        yield
    finally:
        if changes:
            signal.signal(number, before)


@contextlib.contextmanager
def ending_as_exit() -> Iterator[None]:
    """A block in which SIGTERM, or SIGHUP of a terminal that was closed, raises SystemExit with the
    conventional code. A second one is ignored: a closed terminal often sends two."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    with contextlib.ExitStack() as stack:
        for name in {"SIGTERM", "SIGHUP"}.intersection(signal.Signals.__members__):
            stack.enter_context(handling(signal.Signals[name], end))
        yield


if __name__ == "__main__":  # as run_modules starts a module
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
