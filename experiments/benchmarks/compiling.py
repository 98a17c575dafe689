"""Compare ``train --compile`` of this checkout with that of another one, in turns and each with an empty
cache of the compiler: the seconds until the third step with a full memory, and those of a later step.

    git worktree add --detach ../before f7096e5
    python -m experiments.benchmarks.compiling ../before

Seconds are CPU time of one thread, that of the C++ compiler included.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from experiments.benchmarks.checkouts import HERE, budget_option, median_and_range, run_command
from experiments.benchmarks.training import MODELS, Case
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.fields import Checked, Count

COMPILED_STEPS = 3
"""Steps with a full memory, which has another shape than before."""
LATER_STEPS = 60
"""Steps of the longer training, beyond those of the shorter one."""


@dataclass(frozen=True)
class Options(Checked):
    """What to compare."""

    checkout: Annotated[Path, tyro.conf.Positional]
    """The folder of the other checkout."""
    sizes: tuple[str, ...] = ("seed", "compare")
    """The sizes of the benchmarks of training."""
    rounds: Count = 5
    """How often the two take turns."""


def measure_training(checkout: Path, case: Case, n_steps: int) -> float:
    """The CPU seconds that a compiled training of ``n_steps`` takes in a ``checkout``."""
    config = case.config
    options = {
        budget_option(checkout): n_steps * config.segment_len * case.batch_size,
        "--model": config.model,
        "--d-model": config.d_model,
        "--d-ff": config.d_ff,
        "--n-layers": config.n_layers,
        "--segment-len": config.segment_len,
        "--mem-len": config.mem_len,
        "--batch-size": case.batch_size,
        "--final-tokens": 512,
        "--evaluations": 1,
        "--data": "builtin",
        "--dashboard": "off",
        "--out": "run",
    }
    if config.model == "compressive":
        options |= {"--c-mem-len": config.c_mem_len, "--compression-rate": config.compression_rate}
    arguments = ["train", "--compile"]
    for name, value in options.items():
        arguments += [name, str(value)]
    # An empty cache, or the compiler would find what it made the last time.
    with TemporaryDirectory() as cache:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        return seconds_of_children(lambda: run_command(checkout, arguments, environment))


def seconds_of_children(work: Callable[[], None]) -> float:
    """The CPU seconds of the processes that ``work`` starts and that end in it."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def compare(case: Case, options: Options) -> None:
    """Print the seconds until the third compiled step, and those of a later step."""
    longest_memory = max(layer.positions for layer in case.config.memory_sizes)
    n_steps = -(-longest_memory // case.config.segment_len) + COMPILED_STEPS
    until: dict[Path, list[float]] = {options.checkout: [], HERE: []}
    later: dict[Path, list[float]] = {options.checkout: [], HERE: []}
    for _ in range(options.rounds):
        for checkout in until:
            short = measure_training(checkout, case, n_steps)
            long = measure_training(checkout, case, n_steps + LATER_STEPS)
            until[checkout].append(short)
            later[checkout].append((long - short) / LATER_STEPS)
    for name, seconds in (("third compiled step", until), ("later step", later)):
        theirs = median_and_range(seconds[options.checkout], ".3f")
        ours = median_and_range(seconds[HERE], ".3f")
        print(f"{case.name} {case.config.model}, {name}: {theirs} there, {ours} here", flush=True)


def main(options: Options) -> None:
    for size in options.sizes:
        for model in MODELS:
            compare(Case.of(size, model), options)


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
