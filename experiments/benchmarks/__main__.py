"""Measure our implementation and others.

Run it with ``make bench``, ``make bench-decoding``, or ``python -m experiments.benchmarks --only PART``; it
writes the measurements (``results.json``, ``decoding.json``) and the reports (``RESULTS.md``,
``DECODING.md``) into its own folder, a quick run into ``runs/benchmarks``.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from experiments.arms import write_rows
from experiments.benchmarks import attention, decoding, report, training
from experiments.benchmarks.measuring import Result
from experiments.benchmarks.peers import LABML
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.files import read_json
from memformers.common.machine import describe_environment


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Literal["speed", "decoding", "report"] = "speed"
    """Training and attention (speed), or decoding. report measures nothing and writes both reports again."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""


def main(options: Options) -> None:
    here = Path(__file__).parent
    folder = options.out or (here.parents[1] / "runs" / "benchmarks" if options.quick else here)
    folder.mkdir(parents=True, exist_ok=True)
    for part, name, measure, write in (
        ("speed", "results", speed, report.write_speeds),
        ("decoding", "decoding", decoding.measure_all, report.write_decoding),
    ):
        if options.only == part:
            write_rows(folder / f"{name}.json", measure(quick=options.quick))
        if options.only in (part, "report"):
            write(read_json(folder / f"{name}.json"), folder)
            print(f"written: {folder / name.upper()}.md")


def speed(*, quick: bool) -> Result:
    described = describe_environment(torch.device("cpu"))
    described["packages"] |= {LABML: version(LABML)}
    names, lengths = (("seed",), (512,)) if quick else (training.SIZES, attention.MEMORY_LENGTHS)
    cases = [training.Case.of(name, model) for name in names for model in training.MODELS]
    return {
        "quick": quick,
        "environment": described,
        "training": [training.measure(case, quick=quick) for case in cases],
        "attention": [attention.measure(M, repeats=2 if quick else 7) for M in lengths],
    }


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
