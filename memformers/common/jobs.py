"""Several of memformers' own modules at a time, each in its own process."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from memformers.common.processes import module_command, module_environment, sigterm_as_exit

LOOK_SECONDS = 0.1
"""How often the processes are checked, in seconds."""


def run_modules(
    commands: Sequence[Sequence[str]], jobs: int, *, environment: Mapping[str, str]
) -> Iterator[tuple[int, int]]:
    """Run ``commands``, each a module and its arguments, in this order and at most ``jobs`` at a time; yields
    the number and the exit code of each when it has ended.

    Ctrl-C or SIGTERM is passed on to the running processes, and KeyboardInterrupt or SystemExit is raised
    when they have ended. A second Ctrl-C kills them.
    """
    waiting = list(enumerate(commands))[::-1]
    running: dict[int, subprocess.Popen[bytes]] = {}
    surroundings = module_environment() | dict(environment)
    try:
        with sigterm_as_exit():
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, (module, *arguments) = waiting.pop()
                    running[number] = subprocess.Popen(module_command(module, *arguments), env=surroundings)
                time.sleep(LOOK_SECONDS)
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
