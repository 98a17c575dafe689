"""Compare this checkout's commands with those of another one beside other programs, and alone: the seconds of
``generate`` and of a short ``train``, in turns, with the defaults of both.

    git worktree add --detach ../before f7096e5
    python -m experiments.benchmarks.busy ../before
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro

from experiments.benchmarks.checkouts import HERE, budget_option, median_and_range, run_command
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.fields import Checked, Count, NonNegativeInt

SPIN = "while True: pass"
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables that would decide for both sides."""


@dataclass(frozen=True)
class Options(Checked):
    """What to compare."""

    checkout: Annotated[Path, tyro.conf.Positional]
    """The folder of the other checkout."""
    busy: NonNegativeInt = 2
    """Busy processes per core beside the commands."""
    rounds: Count = 5
    """How often the two take turns."""
    tokens: Count = 300
    """Tokens that ``generate`` writes."""
    training_tokens: Count = 62_000
    """Tokens that ``train`` reads."""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """A block beside which this ``number`` of processes compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_command(checkout: Path, name: str, options: Options) -> float:
    """The seconds that a command takes in a ``checkout``, from its start to its end."""
    if name == "generate":
        arguments = [name, "--pretrained", "compressive-shakespeare", "--prompt", "ROMEO:", "--seed", "0"]
        arguments += ["--tokens", str(options.tokens)]
    else:
        arguments = [name, "--data", "builtin", "--evaluations", "1", "--dashboard", "off", "--out", "run"]
        arguments += [budget_option(checkout), str(options.training_tokens)]
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
    # From the start of Python on, as a user waits.
    start = time.perf_counter()
    run_command(checkout, arguments, environment)
    return time.perf_counter() - start


def main(options: Options) -> None:
    n_cores = os.cpu_count() or 1
    for n_busy in (0, options.busy * n_cores):
        print(f"beside {n_busy} busy processes:")
        with busy_processes(n_busy):
            for name in ("generate", "train"):
                theirs = []
                ours = []
                for _ in range(options.rounds):
                    theirs.append(measure_command(options.checkout, name, options))
                    ours.append(measure_command(HERE, name, options))
                print(
                    f"  {name}: {median_and_range(theirs, '.1f')} there, "
                    f"{median_and_range(ours, '.1f')} here, "
                    f"{median(theirs) / median(ours):.2f} times as fast",
                    flush=True,
                )


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
