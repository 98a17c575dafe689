"""Measure our implementation and others: ``make bench``, ``make bench-decoding``.

Measurements (``results.json``, ``decoding.json``) and reports (``RESULTS.md``, ``DECODING.md``) are written
into its own folder, those of a quick run into ``runs/benchmarks``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from experiments.arms import write_rows
from experiments.benchmarks import attention, decoding, kernels, rotary, training
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

    only: Literal["speed", "x-transformers", "decoding", "kernels", "report"] = "speed"
    """Training and attention (speed); of these, only what is measured beside x-transformers, again; decoding;
    or attention by kernel and position features (kernels). report measures nothing and writes all reports
    again."""
    quick: bool = False
    """Two steps of the smallest sizes each: shows that everything works, and measures nothing."""
    out: Path | None = None
    """The folder of the results."""


def main(options: Options) -> None:
    folder = options.out or (HERE.parents[1] / "runs" / "benchmarks" if options.quick else HERE)
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / "results.json"
    # What writes which file of measurements, and what writes the report of a file.
    measures: dict[str, tuple[str, Callable[..., Result]]] = {
        "speed": ("results", speed),
        "x-transformers": ("results", partial(with_new_peer, results_file)),
        "decoding": ("decoding", decoding.measure_all),
        "kernels": ("kernels", measure_kernels),
    }
    writers = {"results": write_speeds, "decoding": write_decoding, "kernels": write_kernels}
    if options.only != "report":
        name, measure = measures[options.only]
        write_rows(folder / f"{name}.json", measure(quick=options.quick))
        writers = {name: writers[name]}
    for name, write in writers.items():
        write(read_json(folder / f"{name}.json"), folder)
        print(f"written: {folder / name.upper()}.md")


def speed(*, quick: bool) -> Result:
    described = describe_environment(torch.device("cpu"))
    described["packages"] |= {LABML: version(LABML)} | rotary.installed_version()
    names, lengths = (("seed",), (512,)) if quick else (training.SIZES, attention.MEMORY_LENGTHS)
    cases = [training.Case.of(name, model) for name in names for model in training.MODELS]
    return {
        "quick": quick,
        "environment": described,
        "training": [training.measure(case, quick=quick) for case in cases],
        "x-transformers": rotary.measure_all(quick=quick),
        "attention": [attention.measure(M, repeats=2 if quick else 7) for M in lengths],
    }


def with_new_peer(results_file: Path, *, quick: bool) -> Result:
    """The measurements of the file, with those beside x-transformers anew if it is installed."""
    results: Result = read_json(results_file)
    beside_peer = rotary.measure_all(quick=quick)
    if beside_peer:
        results["x-transformers"] = beside_peer
        results["environment"]["packages"] |= rotary.installed_version()
    return results


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
    steps = results["training"]
    alone = results["attention"]
    beside_peer = results.get("x-transformers", [])
    # Results without the flash kernel are older than it, and of learned positions.
    has_flash = any(attention.FLASH in r["seconds"] for r in alone)
    positions = f"sinusoidal positions with {attention.P} features" if has_flash else "learned positions"
    values = {
        "quick": results["quick"], "environment": results["environment"], "a": attention,
        "positions": positions,
        "packages": packages_of(results["environment"]), "kept": 4 * blocked.MAX_KEPT / 2**20,
        "gigaflops": median(x for r in steps + alone for x in r["torch.mm, FLOP/s"]) / 1e9,
        "parity": max(r["parity error"] for r in steps),
        "attention_error": max(error for r in alone for error in r["errors"].values()),
        "speeds": speeds_table(steps), "modes": modes_table(steps), "attention": attention_table(alone),
        "shapes": shapes_table(steps), "rotary": table_beside_peer(beside_peer) if beside_peer else "",
        "P": rotary.P, "rounds": rotary.ROUNDS,
    }  # fmt: skip
    write_page("RESULTS.md", folder, values)


def speeds_table(steps: list[Result]) -> str:
    """Whole steps of our models and labml-nn's, by case and model."""
    rows = []
    for r in steps:
        seconds = r["seconds"]
        row = [r["case"], r["model"], tokens_per_second(r, OURS), tokens_per_second(r, LABML)]
        for side in (LABML, LABML_FUSED):
            row.append(f"{times_as_fast(seconds[OURS], seconds[side])}")
        rows.append([*row, share_of_mm(r, OURS)])
    head = ["case", "model", "ours, tokens/s", "labml-nn, tokens/s", "ratio", "ratio with fused AdamW"]
    return table([*head, "share of torch.mm"], rows)


def modes_table(steps: list[Result]) -> str:
    """Whole steps in bfloat16, as a multiple of the speed in float32."""
    rows = []
    for r in steps:
        ratio = times_as_fast(r["seconds"][BFLOAT16], r["seconds"][OURS])
        rows.append([r["case"], r["model"], tokens_per_second(r, OURS), f"{ratio}"])
    return table(["case", "model", "float32, tokens/s", "bfloat16"], rows)


def attention_table(alone: list[Result]) -> str:
    """Attention by the length of memory and the implementation."""
    rows = []
    for r in alone:
        for name, seconds in r["seconds"].items():
            row = [str(r["memory_len"]), str(r["keys"]), name, f"{spread(seconds, 1e3):.0f}"]
            row.append(f"{1e6 * median(seconds) / r['keys']:.0f}")
            row.append(f"{times_as_fast(seconds, r['seconds'][attention.NAIVE])}")
            n_bytes = r["extra memory"].get(name)
            row.append(number(n_bytes and n_bytes / 2**20, ",.0f"))
            rows.append([*row, share_of_mm(r, name)])
    head = ["M", "K", "implementation", "ms", "µs a key", "times as fast as naive", "MiB"]
    return table([*head, "share of torch.mm"], rows)


def shapes_table(steps: list[Result]) -> str:
    rows = []
    for name in dict.fromkeys(r["case"] for r in steps):
        shape = SIZES[name][:-1]  # without the number of steps
        rows.append([name, *map(str, shape)])
    return table(["case", "D", "H", "FFN", "layers", "S", "M", "C", "c", "B"], rows)


def tokens_per_second(r: Result, side: str) -> str:
    return f"{r['tokens'] / median(r['seconds'][side]):,.0f}"


def table_beside_peer(results: list[Result]) -> str:
    """Whole steps of our models and x-transformers', by case."""
    rows = []
    for r in results:
        peer_seconds = r["seconds"][rotary.PEER]
        peer_cpu_seconds = r["CPU seconds"][rotary.PEER]
        for side, seconds in r["seconds"].items():
            cpu_seconds = r["CPU seconds"][side]
            row = [r["case"], side, f"{r['parameters'][side]:,}"]
            row += [f"{milliseconds(cpu_seconds):.0f}", f"{milliseconds(seconds):.0f}"]
            if side == rotary.PEER:
                row += [DASH, DASH]
            else:
                row.append(f"{times_as_fast(cpu_seconds, peer_cpu_seconds)}")
                row.append(f"{times_as_fast(seconds, peer_seconds)}")
            rows.append(row)
    ratio = f"times as fast as {rotary.PEER}"
    head = ["case", "model", "parameters", "CPU time, ms", "wall time, ms"]
    return table([*head, f"{ratio}, CPU time", f"{ratio}, wall time"], rows)


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
    writing = results["writing"]
    long_text = results["long text"]
    acting = results["acting"]
    values = {
        "environment": results["environment"], "packages": packages_of(results["environment"]),
        "config": results["config"], "error": writing["error"],
        "gigabytes": median(writing["bytes a second"]) / 1e9, "tokens": long_text["tokens"],
        "early": f"{milliseconds(long_text['early'])}", "late": f"{milliseconds(long_text['late'])}",
        "core": acting["core"], "acting_device": acting["device"],
        "writing": writing_table(writing), "reading": reading_table(results["reading"]),
        "acting": acting_table(acting["steps"]),
    }  # fmt: skip
    write_page("DECODING.md", folder, values)


def writing_table(writing: Result) -> str:
    """Generation, beside the time to read what a token needs, where that is known."""
    bandwidth = median(writing["bytes a second"])
    rows = []
    for name, seconds in writing["seconds"].items():
        token = milliseconds(seconds)
        row = [name, f"{token}", f"{1e3 / token.median:.0f}"]
        n_bytes = writing["bytes"].get(name)
        if n_bytes:
            products = milliseconds(writing["seconds of torch.mv"][name])
            row += [f"{n_bytes / 1e6:.0f}", f"{n_bytes / bandwidth / median(seconds):.0%}"]
            row += [f"{products}", f"{products.median / token.median:.0%}"]
        else:
            row += [DASH] * 4
        rows.append(row)
    head = ["", "ms a token", "tokens/s", "MB a token", "share of the limit"]
    return table([*head, "torch.mv of the same bytes, ms", "speed as a share of torch.mv's"], rows)


def reading_table(reading: list[Result]) -> str:
    """Evaluation with a memory, and by a window that is recomputed for each token."""
    rows = []
    for r in reading:
        cached = milliseconds(r["cached"])
        sliding = median(r["sliding"])
        row = [str(r["length"]), f"{cached}", f"{milliseconds(r['forward'])}", f"{sliding:.2f}"]
        rows.append([*row, f"{1e3 * sliding / cached.median:,.0f}", f"{PAPERS[r['length']]:,}"])
    head = ["sees back", "cached, ms a token", "forward pass, ms a token", "sliding window, s a token"]
    return table([*head, "sliding / cached", "the paper's"], rows)


def acting_table(steps: list[Result]) -> str:
    rows = []
    for r in steps:
        stepper = milliseconds(r["seconds"]["stepper"])
        gru = milliseconds(r["seconds"]["gru"])
        segment = milliseconds(r["seconds"]["segment"])
        row = [str(r["streams"]), f"{stepper}", f"{gru}", f"{segment}"]
        row.append(f"{stepper.median / gru.median:.1f}")
        rows.append([*row, f"{segment.median / stepper.median:.1f}"])
    head = ["streams", "stepper, ms", "nn.GRU, ms", "segment again, ms", "stepper / nn.GRU"]
    return table([*head, "segment again / stepper"], rows)


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
