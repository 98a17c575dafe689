"""Measure our implementation and others: ``make bench``, ``make bench-decoding``.

Measurements (``results.json``, ``decoding.json``) and reports (``RESULTS.md``, ``DECODING.md``) are written
into its own folder, those of a quick run into ``runs/benchmarks``.
"""

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from experiments.arms import write_rows
from experiments.benchmarks import attention, decoding, kernels, training
from experiments.benchmarks.measuring import Result, spread, times_as_fast
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.training import BFLOAT16, LABML_FUSED, OURS, SIZES
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.files import read_json, write_text
from memformers.common.machine import describe_environment
from memformers.kernels import blocked
from memformers.report.numbers import DASH, number
from memformers.report.rendering import PLAIN
from memformers.report.rendering import markdown_table as table

HERE = Path(__file__).parent
milliseconds = partial(spread, scale=1e3)
PAPERS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Its ratios (Dai et al. 2019, arXiv 1901.02860, section 4.5)."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Literal["speed", "decoding", "kernels", "report"] = "speed"
    """Training and attention (speed), decoding, or attention by kernel and position features (kernels).
    report measures nothing and writes all reports again."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""


def main(options: Options) -> None:
    folder = options.out or (HERE.parents[1] / "runs" / "benchmarks" if options.quick else HERE)
    folder.mkdir(parents=True, exist_ok=True)
    for part, name, measure, write in (
        ("speed", "results", speed, write_speeds),
        ("decoding", "decoding", decoding.measure_all, write_decoding),
        ("kernels", "kernels", measure_kernels, write_kernels),
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


def measure_kernels(*, quick: bool) -> Result:
    described = describe_environment(torch.device("cpu"))
    described["capability"] = torch.backends.cpu.get_cpu_capability()
    return {"quick": quick, "environment": described, "attention": kernels.measure_all(quick=quick)}


def write_page(name: str, folder: Path, values: dict[str, Any]) -> None:
    text = (HERE / name).with_suffix(".in.md").read_text(encoding="utf-8")
    write_text(folder / name, PLAIN.from_string(text).render(values).rstrip() + "\n")


def packages_of(environment: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment["packages"].items())


def write_speeds(results: Result, folder: Path) -> None:
    steps, alone = results["training"], results["attention"]
    names, speeds, modes, rows = dict.fromkeys(r["case"] for r in steps), [], [], []
    for r in steps:
        case, seconds = [r["case"], r["model"]], r["seconds"]
        ours, theirs = (f"{r['tokens'] / median(seconds[side]):,.0f}" for side in (OURS, LABML))
        ratios = [f"{times_as_fast(seconds[OURS], seconds[side])}" for side in (LABML, LABML_FUSED)]
        speeds.append([*case, ours, theirs, *ratios, share_of_mm(r, OURS)])
        modes.append([*case, ours, f"{times_as_fast(seconds[BFLOAT16], seconds[OURS])}"])
    for r in alone:
        for name, seconds in r["seconds"].items():
            memory = r["extra memory"].get(name)
            ms, a_key = f"{spread(seconds, 1e3):.0f}", f"{1e6 * median(seconds) / r['keys']:.0f}"
            faster = f"{times_as_fast(seconds, r['seconds'][attention.NAIVE])}"
            mib = number(memory and memory / 2**20, ",.0f")
            lengths = str(r["memory_len"]), str(r["keys"])
            rows.append([*lengths, name, ms, a_key, faster, mib, share_of_mm(r, name)])
    has_flash = any(attention.FLASH in r["seconds"] for r in alone)
    # Results of before this kernel are of learned positions.
    positions = f"sinusoidal positions with {attention.P} features" if has_flash else "learned positions"
    values = {
        "quick": results["quick"], "environment": results["environment"], "a": attention,
        "positions": positions,
        "packages": packages_of(results["environment"]), "kept": 4 * blocked.MAX_KEPT / 2**20,
        "gigaflops": median(x for r in steps + alone for x in r["torch.mm, FLOP/s"]) / 1e9,
        "parity": max(r["parity error"] for r in steps),
        "attention_error": max(error for r in alone for error in r["errors"].values()),
        "shapes": table(["case", "D", "H", "FFN", "layers", "S", "M", "C", "c", "B"],
                        [[name, *map(str, SIZES[name][:-1])] for name in names]),
        "speeds": table(["case", "model", "ours, tokens/s", "labml-nn, tokens/s", "ratio",
                         "ratio with fused AdamW", "share of torch.mm"], speeds),
        "modes": table(["case", "model", "float32, tokens/s", "bfloat16"], modes),
        "attention": table(["M", "K", "implementation", "ms", "µs a key", "times as fast as naive", "MiB",
                            "share of torch.mm"], rows),
    }  # fmt: skip
    write_page("RESULTS.md", folder, values)


def write_kernels(results: Result, folder: Path) -> None:
    rows = []
    for r in results["attention"]:
        row = [r["case"], r["precision"], str(r["queries"]), str(r["keys"])]
        row += [f"{milliseconds(r['seconds']['16'][side]):.1f}" for side in (kernels.FLASH, kernels.BLOCKED)]
        for seconds in r["seconds"].values():
            row.append(f"{times_as_fast(seconds[kernels.FLASH], seconds[kernels.BLOCKED])}")
        rows.append(row)
    features = [f"P = {label}" for label in kernels.features_of(1, 1)]
    head = ["case", "precision", "S", "K", "flash, ms", "blocked, ms", *features]
    values = {
        "quick": results["quick"], "environment": results["environment"],
        "packages": packages_of(results["environment"]), "kernels": table(head, rows),
    }  # fmt: skip
    write_page("KERNELS.md", folder, values)


def share_of_mm(r: Result, side: str) -> str:
    return f"{r['flops'] / median(r['seconds'][side]) / median(r['torch.mm, FLOP/s']):.0%}"


def write_decoding(results: Result, folder: Path) -> None:
    writing, long_text, acting = (results[part] for part in ("writing", "long text", "acting"))
    bandwidth, written, read, stepped = median(writing["bytes a second"]), [], [], []
    for name, seconds in writing["seconds"].items():
        ms, cells = milliseconds(seconds), [DASH] * 4
        if size := writing["bytes"].get(name):
            products = milliseconds(writing["seconds of torch.mv"][name])
            share = size / bandwidth / median(seconds)
            cells = [f"{size / 1e6:.0f}", f"{share:.0%}", f"{products}", f"{products.median / ms.median:.0%}"]
        written.append([name, f"{ms}", f"{1e3 / ms.median:.0f}", *cells])
    for r in results["reading"]:
        sliding, cached, forward = median(r["sliding"]), milliseconds(r["cached"]), milliseconds(r["forward"])
        ratios = f"{1e3 * sliding / cached.median:,.0f}", f"{PAPERS[r['length']]:,}"
        read.append([str(r["length"]), f"{cached}", f"{forward}", f"{sliding:.2f}", *ratios])
    for r in acting["steps"]:
        step, gru, again = (milliseconds(r["seconds"][way]) for way in ("stepper", "gru", "segment"))
        ratios = f"{step.median / gru.median:.1f}", f"{again.median / step.median:.1f}"
        stepped.append([str(r["streams"]), f"{step}", f"{gru}", f"{again}", *ratios])
    values = {
        "environment": results["environment"], "packages": packages_of(results["environment"]),
        "config": results["config"], "error": writing["error"], "gigabytes": bandwidth / 1e9,
        "tokens": long_text["tokens"], "early": f"{milliseconds(long_text['early'])}",
        "late": f"{milliseconds(long_text['late'])}", "core": acting["core"],
        "acting_device": acting["device"],
        "writing": table(["", "ms a token", "tokens/s", "MB a token", "share of the limit",
                          "torch.mv of the same bytes, ms", "speed as a share of torch.mv's"], written),
        "reading": table(["sees back", "cached, ms a token", "forward pass, ms a token",
                          "sliding window, s a token", "sliding / cached", "the paper's"], read),
        "acting": table(["streams", "stepper, ms", "nn.GRU, ms", "segment again, ms", "stepper / nn.GRU",
                         "segment again / stepper"], stepped),
    }  # fmt: skip
    write_page("DECODING.md", folder, values)


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
