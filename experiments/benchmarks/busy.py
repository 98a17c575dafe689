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
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

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


def seconds_of(checkout: Path, *arguments: str) -> float:
    """How long a command takes in a ``checkout``, from its start to its end."""
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
    environment["PYTHONPATH"] = str(checkout.resolve())
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "memformers", *arguments]
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def main(options: Options) -> None:
    here = Path(__file__).parents[2]
    generate = ["generate", "--pretrained", "compressive-shakespeare", "--prompt", "ROMEO:", "--seed", "0"]
    train = ["train", "--data", "builtin", "--evaluations", "1", "--dashboard", "off", "--out", "run"]
    length = {here: "--max-tokens", options.checkout: "--max-tokens"}
    if (options.checkout / "memformers" / "training" / "loop.py").exists():  # an earlier name
        length[options.checkout] = "--tokens"
    for n_busy in (0, options.busy * (os.cpu_count() or 1)):
        print(f"beside {n_busy} busy processes:")
        with busy_processes(n_busy):
            for name in ("generate", "train"):
                seconds: dict[Path, list[float]] = {options.checkout: [], here: []}
                for _ in range(options.rounds):
                    for checkout, measured in seconds.items():
                        arguments = [*generate, "--tokens", str(options.tokens)]
                        if name == "train":
                            arguments = [*train, length[checkout], str(options.training_tokens)]
                        measured.append(seconds_of(checkout, *arguments))
                theirs, ours = (sorted(measured) for measured in seconds.values())
                print(
                    f"  {name}: {median(theirs):.1f} s [{theirs[0]:.1f}, {theirs[-1]:.1f}] there, "
                    f"{median(ours):.1f} s [{ours[0]:.1f}, {ours[-1]:.1f}] here, "
                    f"{median(theirs) / median(ours):.2f} times as fast",
                    flush=True,
                )


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
