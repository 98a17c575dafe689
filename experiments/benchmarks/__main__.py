"""Measure our implementation and others: whole training steps, and attention alone.

Run it with ``make bench`` or ``python -m experiments.benchmarks``; it writes ``results.json`` (the
measurements), ``RESULTS.md`` and ``figures/`` (the report) to its own folder. A part of it, or a quick run,
writes into ``runs/benchmarks`` unless told otherwise.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from experiments.benchmarks import attention, training, variants
from experiments.benchmarks.cases import CASES, MODELS
from experiments.benchmarks.measuring import ROOT, Result
from experiments.benchmarks.peers import LABML, LUCIDRAINS, lucidrains_is_installed
from experiments.benchmarks.report import write_report
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.files import read_json, write_json
from memformers.common.machine import describe_environment


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Literal["everything", "training", "variants", "attention", "report"] = "everything"
    """A part of it; variants are our own training steps with starts of documents and with each compression,
    report measures nothing and writes RESULTS.md anew from results.json."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""

    @property
    def folder(self) -> Path:
        """The folder of the results: that of this file for everything or a new report, otherwise runs/."""
        whole = self.only in ("everything", "report") and not self.quick
        return self.out or (Path(__file__).parent if whole else ROOT / "runs" / "benchmarks")


def main(options: Options) -> None:
    """Measure, and write the results."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "results.json"
    if options.only != "report":
        write_json(path, measure(options))
    write_report(read_json(path), options.folder)
    print((options.folder / "RESULTS.md").read_text(encoding="utf-8"))


def measure(options: Options) -> Result:
    """Everything that is measured."""
    described = describe_environment(torch.device("cpu"))
    peers = [LABML] + [LUCIDRAINS] * lucidrains_is_installed()
    described["packages"] |= {name: version(name) for name in peers}
    results: Result = {"quick": options.quick, "environment": described}
    if options.only in ("everything", "training"):
        cases = [CASES["seed"]] if options.quick else list(CASES.values())
        results["training"] = [
            training.measure(case.of(model), quick=options.quick) for case in cases for model in MODELS
        ]
    if options.only in ("everything", "variants"):
        results |= variants.measure_all(quick=options.quick)
    if options.only in ("everything", "attention"):
        lengths = attention.MEMORY_LENGTHS[: 1 if options.quick else None]
        repeats = 2 if options.quick else 7
        results["attention"] = [attention.measure(M, repeats=repeats) for M in lengths]
        if torch.cuda.is_available():
            results["attention on GPU"] = [attention.measure_on_gpu(M, repeats=20) for M in lengths]
            results["GPU"] = torch.cuda.get_device_name()
    return results


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Options))
