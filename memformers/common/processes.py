"""Modules of this package as programs in other processes, and the signals that end a process."""

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
from types import FrameType
from typing import Any

import memformers


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment for a child process that imports the package from the same place as this process."""
    root = str(Path(memformers.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


SPINS = 20_000
"""How often a waiting thread looks whether it may go on before it sleeps; 300,000 by default. With 20,000, it
waits about as long as PyTorch takes between two operations: on an idle machine, nothing becomes slower."""


def spin_less() -> None:
    """Let PyTorch's threads soon sleep while they wait for each other, unless the user has a setting. Call it
    before torch is imported, which reads it then.

    Beside other programs, a thread that spins takes the core from the one that it waits for: a training of 9
    s took 116 s, and 23 s with fewer spins (``experiments.benchmarks.busy``)."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def busy_notice() -> str:
    """A line about other programs that use more cores than there are; empty if they don't."""
    load = os.getloadavg()[0]
    n_cores = os.cpu_count() or 1
    if load <= n_cores:
        return ""
    return f"NOTE: {load:.0f} processes compete for {n_cores} cores, so this takes longer than usual.\n"


def is_first() -> bool:
    """Whether this is the only process, or the first that torchrun started, which prints."""
    return os.environ.get("RANK", "0") == "0"


def run_modules(
    commands: Sequence[Sequence[str]],
    jobs: int,
    *,
    environment: Mapping[str, str],
    begin: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[int, int]]:
    """Run ``commands``, each a module and its arguments, at most ``jobs`` at a time; yields the index and the
    exit code of each when it has ended. ``begin`` gets the index before a command starts.

    Ctrl-C, SIGTERM, SIGHUP, or the end of this process ends them with SIGTERM, at which they save a
    checkpoint; KeyboardInterrupt or SystemExit is raised when they have ended. A second Ctrl-C kills them.
    """
    waiting = list(enumerate(commands))[::-1]
    running: dict[int, subprocess.Popen[bytes]] = {}
    variables = module_environment() | dict(environment)
    # The processes read a pipe that nobody writes to: it ends when this process does, however that is.
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
        # All of them at once, since each needs a moment for its checkpoint.
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
    """Send SIGTERM to this process when its parent ends, which has the other end of standard input."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A block in which a signal has this handler, in the main thread, which alone gets signals, and unless it
    is ignored or handled by other than Python code."""
    is_main = threading.current_thread() is threading.main_thread()
    changes = is_main and signal.getsignal(number) not in (None, signal.SIG_IGN)
    previous = signal.signal(number, handler) if changes else None
    try:
        yield
    finally:
        if changes:
            signal.signal(number, previous)


@contextlib.contextmanager
def ending_as_exit() -> Iterator[None]:
    """A block in which SIGTERM or SIGHUP raises SystemExit; a closing terminal often sends a second one."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    with handling(signal.SIGTERM, end), handling(signal.SIGHUP, end):
        yield


class Stopped(BaseException):
    """A signal stops the work, at a moment when its state is consistent."""

    def __init__(self, signal_number: signal.Signals):
        super().__init__(f"stopped by {signal_number.name}")
        self.signal = signal_number

    def conventional(self) -> BaseException:
        """What Python raises at this signal: its exit code is 128 and the signal's number."""
        # Ctrl-C is another exception.
        return KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(128 + self.signal)


class StopSignals(contextlib.ExitStack):
    """A context that notes the signals that end a process: Ctrl-C, kill, and a terminal that was closed. A
    second Ctrl-C ends it at once. ``alone`` says whether this process works without other ranks."""

    def __init__(self, alone: bool = True) -> None:
        super().__init__()
        self.alone = alone
        self.received: signal.Signals | None = None
        self._at_once = False

    def __enter__(self) -> "StopSignals":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            self.enter_context(handling(signal.Signals[name], self._note))
        return self

    def check(self, highest: Callable[[int], int] = int) -> None:
        """Raise [`Stopped`][] if a signal has come. Several ranks must all call this, with what gives the
        ``highest`` of their numbers: one that stopped by itself would leave the others waiting for it."""
        if number := highest(self.received or 0):
            raise Stopped(signal.Signals(number))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that a signal may end anywhere, by [`Stopped`][]; but several ranks stop in [`check`][]."""
        self._at_once = self.alone
        try:
            if self.alone:
                self.check()
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:  # the second Ctrl-C
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if self._at_once:
            raise Stopped(self.received)


if __name__ == "__main__":  # as run_modules starts a module
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
