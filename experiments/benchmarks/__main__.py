"""Measure our implementation and others.

Run it with ``make bench``, ``make bench-decoding``, or ``python -m experiments.benchmarks --only PART``; it
writes the measurements (``results.json``, ``decoding.json``, ``compiled.json``) and the reports
(``RESULTS.md``, ``DECODING.md``, ``COMPILED.md``) into its own folder, a part of a report or a quick run into
``runs/benchmarks``.
"""

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from experiments.benchmarks import attention, decoding, report, training
from experiments.benchmarks.measuring import ROOT, Result
from experiments.benchmarks.peers import LABML
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.files import read_json, write_rows
from memformers.common.machine import describe_environment


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Literal["speed", "training", "attention", "decoding", "compiled", "report"] = "speed"
    """Training and attention together (speed), one of them, or something else; report measures nothing, and
    writes all reports anew."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""


def main(options: Options) -> None:
    """Measure, and write the results."""
    whole = options.only not in ("training", "attention") and not options.quick
    folder = options.out or (Path(__file__).parent if whole else ROOT / "runs" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    for name, write, measured, parts in (
        ("results", report.write_speeds, speed, ("speed", "training", "attention")),
        ("decoding", report.write_decoding, lambda o: decoding.measure_all(quick=o.quick), ("decoding",)),
        ("compiled", report.write_compiled, compiled, ("compiled",)),
    ):
        if options.only in parts:
            write_rows(folder / f"{name}.json", measured(options))
        if options.only in (*parts, "report"):
            write(read_json(folder / f"{name}.json"), folder)
            print(f"written: {folder / name.upper()}.md")


def speed(options: Options) -> Result:
    """Whole training steps, and attention alone."""
    described, quick = describe_environment(torch.device("cpu")), options.quick
    described["packages"] |= {LABML: version(LABML)}
    results: Result = {"quick": quick, "environment": described}
    if options.only in ("speed", "training"):
        results["training"] = [
            training.measure(training.Case.of(name, model), quick=quick)
            for name in (("seed",) if quick else training.SIZES)
            for model in training.MODELS
        ]
    if options.only in ("speed", "attention"):
        lengths, repeats = attention.MEMORY_LENGTHS[: 1 if quick else None], 2 if quick else 7
        results["attention"] = [attention.measure(M, repeats=repeats) for M in lengths]
    return results


def compiled(options: Options) -> Result:
    """The fused kernels, compiled for GPUs that are not here; of a quick run, for one of them."""
    os.environ.pop("TRITON_INTERPRET", None)
    from experiments.benchmarks.compiled import compile_forms

    return compile_forms(("sm_90",), (32,), ("bfloat16",)) if options.quick else compile_forms()


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Options))
