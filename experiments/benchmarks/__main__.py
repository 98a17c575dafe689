"""Measure our implementation and others: ``make bench``, ``make bench-decoding``.

Measurements (``results.json``, ``decoding.json``) and reports (``RESULTS.md``, ``DECODING.md``) are written
into its own folder, those of a quick run into ``runs/benchmarks``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from experiments.benchmarks import attention, decoding, kernels, reports, rotary, training
from experiments.benchmarks.measuring import Result
from experiments.benchmarks.peers import LABML
from experiments.columns import write_rows
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.files import read_json
from memformers.common.machine import describe_environment

HERE = Path(__file__).parent
QUICK_FOLDER = HERE.parents[1] / "runs" / "benchmarks"


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Literal["speed", "x-transformers", "decoding", "kernels", "report"] = "speed"
    """Training and attention (speed); of these, only what is measured beside x-transformers, again; decoding;
    or attention by kernel and position features (kernels). report measures nothing and writes all reports
    again."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""


def main(options: Options) -> None:
    folder = options.out or (QUICK_FOLDER if options.quick else HERE)
    folder.mkdir(parents=True, exist_ok=True)
    # What writes which file of measurements, and what writes the report of a file.
    measures: dict[str, tuple[str, Callable[..., Result]]] = {
        "speed": ("results", measure_speed),
        "x-transformers": ("results", partial(measure_peer_again, folder / "results.json")),
        "decoding": ("decoding", decoding.measure_all),
        "kernels": ("kernels", measure_kernels),
    }
    writers = {
        "results": reports.write_speeds,
        "decoding": reports.write_decoding,
        "kernels": reports.write_kernels,
    }
    if options.only != "report":
        name, measure = measures[options.only]
        write_rows(folder / f"{name}.json", measure(quick=options.quick))
        writers = {name: writers[name]}
    for name, write in writers.items():
        write(read_json(folder / f"{name}.json"), folder)
        print(f"written: {folder / name.upper()}.md")


def measure_speed(*, quick: bool) -> Result:
    environment = describe_environment(torch.device("cpu"))
    environment["packages"] |= {LABML: version(LABML)} | rotary.installed_version()
    steps = []
    for name in ("seed",) if quick else training.SIZES:
        for model in training.MODELS:
            steps.append(training.measure(training.Case.of(name, model), quick=quick))
    beside_peer = rotary.measure_all(quick=quick)
    lengths = (512,) if quick else attention.MEMORY_LENGTHS
    repeats = 2 if quick else 7
    return {
        "quick": quick,
        "environment": environment,
        "training": steps,
        "x-transformers": beside_peer,
        "attention": [attention.measure(memory_len, repeats=repeats) for memory_len in lengths],
    }


def measure_peer_again(results_file: Path, *, quick: bool) -> Result:
    """The measurements of the file, with those beside x-transformers anew if it is installed."""
    results: Result = read_json(results_file)
    beside_peer = rotary.measure_all(quick=quick)
    if beside_peer:
        results["x-transformers"] = beside_peer
        results["environment"]["packages"] |= rotary.installed_version()
    return results


def measure_kernels(*, quick: bool) -> Result:
    environment = describe_environment(torch.device("cpu"))
    environment["capability"] = torch.backends.cpu.get_cpu_capability()
    return {"quick": quick, "environment": environment, "attention": kernels.measure_all(quick=quick)}


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
