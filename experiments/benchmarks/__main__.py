"""Measure our implementation and others: whole training steps, attention alone, writing and reading long
texts, and what the compiler makes of the fused kernels.

Run it with ``make bench``, ``make bench-decoding``, or ``python -m experiments.benchmarks``; it writes the
measurements (``results.json``, ``decoding.json``, ``compiled.json``) and the reports (``RESULTS.md``,
``DECODING.md``, ``COMPILED.md``) into its own folder. A part of ``RESULTS.md``, or a quick run, is written
into ``runs/benchmarks`` unless told otherwise.
"""

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from experiments.benchmarks import attention, decoding, report, training
from experiments.benchmarks.measuring import ROOT, Result
from experiments.benchmarks.peers import LABML, LUCIDRAINS, lucidrains_is_installed
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

    @property
    def folder(self) -> Path:
        """The folder of the results: that of this file for whole reports, otherwise runs/."""
        whole = self.only not in ("training", "attention") and not self.quick
        return self.out or (Path(__file__).parent if whole else ROOT / "runs" / "benchmarks")


def main(options: Options) -> None:
    """Measure, and write the results."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, write, measured, parts in (
        ("results", report.write_speeds, speed, ("speed", "training", "attention")),
        ("decoding", report.write_decoding, lambda o: decoding.measure_all(quick=o.quick), ("decoding",)),
        ("compiled", report.write_compiled, compiled, ("compiled",)),
    ):
        path = options.folder / f"{name}.json"
        if options.only in parts:
            write_rows(path, measured(options))
        if options.only in (*parts, "report"):
            write(read_json(path), options.folder)
            print(f"written: {options.folder / name.upper()}.md")


def speed(options: Options) -> Result:
    """Whole training steps, and attention alone."""
    described, quick = describe_environment(torch.device("cpu")), options.quick
    peers = [LABML] + [LUCIDRAINS] * lucidrains_is_installed()
    described["packages"] |= {name: version(name) for name in peers}
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
