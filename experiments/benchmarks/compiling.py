"""Compare ``train --compile`` of this checkout with that of another one, in turns and each with an empty
cache of the compiler: the seconds until the third step with a full memory, and those of a later step.

    git worktree add --detach ../before f7096e5
    python -m experiments.benchmarks.compiling ../before

Seconds are CPU time of one thread, that of the C++ compiler included.
"""

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from experiments.benchmarks.training import MODELS, Case
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.fields import Checked, Count

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


def cpu_seconds(checkout: Path, case: Case, steps: int) -> float:
    """How long a compiled training of so many ``steps`` takes in a ``checkout``."""
    config = case.config
    has_earlier_names = (checkout / "memformers" / "training" / "loop.py").exists()
    options = {
        "--tokens" if has_earlier_names else "--max-tokens": steps * config.segment_len * case.batch_size,
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
    command = [sys.executable, "-m", "memformers", "train", "--compile"]
    for name, value in options.items():
        command += [name, str(value)]
    with TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": str(checkout.resolve()),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(options: Options) -> None:
    here = Path(__file__).parents[2]
    for size in options.sizes:
        for model in MODELS:
            case = Case.of(size, model)
            positions = max(layer.positions for layer in case.config.memory_sizes)
            steps = -(-positions // case.config.segment_len) + 3
            until: dict[Path, list[float]] = {options.checkout: [], here: []}
            later: dict[Path, list[float]] = {options.checkout: [], here: []}
            for _ in range(options.rounds):
                for checkout in until:
                    short = cpu_seconds(checkout, case, steps)
                    long = cpu_seconds(checkout, case, steps + LATER_STEPS)
                    until[checkout].append(short)
                    later[checkout].append((long - short) / LATER_STEPS)
            for name, seconds in (("third compiled step", until), ("later step", later)):
                theirs, ours = (sorted(measured) for measured in seconds.values())
                print(
                    f"{size} {model}, {name}: "
                    f"{median(theirs):.3f} s [{theirs[0]:.3f}, {theirs[-1]:.3f}] there, "
                    f"{median(ours):.3f} s [{ours[0]:.3f}, {ours[-1]:.3f}] here",
                    flush=True,
                )


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
