"""The reports of measurements, as pages: RESULTS.md, KERNELS.md and DECODING.md, from their ``.in.md``."""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from experiments.benchmarks import attention, kernels, rotary
from experiments.benchmarks.measuring import Result, spread, times_as_fast
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.training import BFLOAT16, LABML_FUSED, OURS, SIZES
from memformers.common.files import write_text
from memformers.kernels import blocked
from memformers.report.numbers import DASH, number
from memformers.report.rendering import PLAIN
from memformers.report.rendering import markdown_table as table

HERE = Path(__file__).parent
milliseconds = partial(spread, scale=1e3)
PAPERS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""The ratios of the Transformer-XL paper (Dai et al. 2019, arXiv 1901.02860, section 4.5), by length."""


def write_page(name: str, folder: Path, values: dict[str, Any]) -> None:
    template = (HERE / name).with_suffix(".in.md").read_text(encoding="utf-8")
    write_text(folder / name, PLAIN.from_string(template).render(values).rstrip() + "\n")


def packages_of(environment: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment["packages"].items())


def tokens_per_second(result: Result, side: str) -> str:
    return f"{result['tokens'] / median(result['seconds'][side]):,.0f}"


def share_of_mm(result: Result, side: str) -> str:
    """The operations per second of a ``side``, as a share of those of torch.mm."""
    operations_per_second = result["flops"] / median(result["seconds"][side])
    return f"{operations_per_second / median(result['torch.mm, FLOP/s']):.0%}"


# RESULTS.md: whole steps, and attention alone.


def write_speeds(results: Result, folder: Path) -> None:
    steps = results["training"]
    alone = results["attention"]
    beside_peer = results.get("x-transformers", [])
    # Results without the flash kernel are older than it, and of learned positions.
    has_flash = any(attention.FLASH in result["seconds"] for result in alone)
    positions = f"sinusoidal positions with {attention.P} features" if has_flash else "learned positions"
    rates: list[float] = []
    for result in steps + alone:
        rates += result["torch.mm, FLOP/s"]
    attention_errors: list[float] = []
    for result in alone:
        attention_errors += result["errors"].values()
    values = {
        "quick": results["quick"],
        "environment": results["environment"],
        "packages": packages_of(results["environment"]),
        "a": attention,
        "positions": positions,
        "kept": 4 * blocked.MAX_KEPT / 2**20,
        "gigaflops": median(rates) / 1e9,
        "parity": max(result["parity error"] for result in steps),
        "attention_error": max(attention_errors),
        "speeds": speeds_table(steps),
        "modes": modes_table(steps),
        "attention": attention_table(alone),
        "shapes": shapes_table(steps),
        "rotary": peer_table(beside_peer) if beside_peer else "",
        "P": rotary.P,
        "rounds": rotary.ROUNDS,
    }
    write_page("RESULTS.md", folder, values)


def speeds_table(steps: list[Result]) -> str:
    """Whole steps of our models and labml-nn's, by case and model."""
    head = ["case", "model", "ours, tokens/s", "labml-nn, tokens/s", "ratio", "ratio with fused AdamW"]
    head.append("share of torch.mm")
    rows = []
    for result in steps:
        seconds = result["seconds"]
        row = [
            result["case"],
            result["model"],
            tokens_per_second(result, OURS),
            tokens_per_second(result, LABML),
            f"{times_as_fast(seconds[OURS], seconds[LABML])}",
            f"{times_as_fast(seconds[OURS], seconds[LABML_FUSED])}",
            share_of_mm(result, OURS),
        ]
        rows.append(row)
    return table(head, rows)


def modes_table(steps: list[Result]) -> str:
    """Whole steps in bfloat16, as a multiple of the speed in float32."""
    rows = []
    for result in steps:
        ratio = times_as_fast(result["seconds"][BFLOAT16], result["seconds"][OURS])
        rows.append([result["case"], result["model"], tokens_per_second(result, OURS), f"{ratio}"])
    return table(["case", "model", "float32, tokens/s", "bfloat16"], rows)


def attention_table(alone: list[Result]) -> str:
    """Attention by the length of memory and the implementation."""
    head = ["M", "K", "implementation", "ms", "µs a key", "times as fast as naive", "MiB"]
    head.append("share of torch.mm")
    rows = []
    for result in alone:
        n_keys = result["keys"]
        naive_seconds = result["seconds"][attention.NAIVE]
        for name, seconds in result["seconds"].items():
            n_bytes = result["extra memory"].get(name)
            mebibytes = n_bytes / 2**20 if n_bytes else n_bytes
            row = [
                str(result["memory_len"]),
                str(n_keys),
                name,
                f"{milliseconds(seconds):.0f}",
                f"{1e6 * median(seconds) / n_keys:.0f}",
                f"{times_as_fast(seconds, naive_seconds)}",
                number(mebibytes, ",.0f"),
                share_of_mm(result, name),
            ]
            rows.append(row)
    return table(head, rows)


def shapes_table(steps: list[Result]) -> str:
    names = dict.fromkeys(result["case"] for result in steps)
    rows = []
    for name in names:
        *shape, _ = SIZES[name]  # the last is the number of steps
        rows.append([name, *map(str, shape)])
    return table(["case", "D", "H", "FFN", "layers", "S", "M", "C", "c", "B"], rows)


def peer_table(results: list[Result]) -> str:
    """Whole steps of our models and x-transformers', by case."""
    rows = []
    for result in results:
        peer_seconds = result["seconds"][rotary.PEER]
        peer_cpu_seconds = result["CPU seconds"][rotary.PEER]
        for side, seconds in result["seconds"].items():
            cpu_seconds = result["CPU seconds"][side]
            ratios = [DASH, DASH]
            if side != rotary.PEER:
                cpu_ratio = times_as_fast(cpu_seconds, peer_cpu_seconds)
                ratios = [f"{cpu_ratio}", f"{times_as_fast(seconds, peer_seconds)}"]
            row = [
                result["case"],
                side,
                f"{result['parameters'][side]:,}",
                f"{milliseconds(cpu_seconds):.0f}",
                f"{milliseconds(seconds):.0f}",
                *ratios,
            ]
            rows.append(row)
    ratio = f"times as fast as {rotary.PEER}"
    head = ["case", "model", "parameters", "CPU time, ms", "wall time, ms"]
    return table([*head, f"{ratio}, CPU time", f"{ratio}, wall time"], rows)


# KERNELS.md: the flash and the blocked kernel.


def write_kernels(results: Result, folder: Path) -> None:
    rows = []
    for result in results["attention"]:
        row = [result["case"], result["precision"], str(result["queries"]), str(result["keys"])]
        few_features = result["seconds"]["16"]
        for kernel in (kernels.FLASH, kernels.BLOCKED):
            row.append(f"{milliseconds(few_features[kernel]):.1f}")
        for seconds in result["seconds"].values():
            row.append(f"{times_as_fast(seconds[kernels.FLASH], seconds[kernels.BLOCKED])}")
        rows.append(row)
    features = [f"P = {label}" for label in kernels.features_of(1, 1)]
    head = ["case", "precision", "S", "K", "flash, ms", "blocked, ms", *features]
    values = {
        "quick": results["quick"],
        "environment": results["environment"],
        "packages": packages_of(results["environment"]),
        "kernels": table(head, rows),
    }
    write_page("KERNELS.md", folder, values)


# DECODING.md: generation, evaluation and agents.


def write_decoding(results: Result, folder: Path) -> None:
    writing = results["writing"]
    long_text = results["long text"]
    acting = results["acting"]
    values = {
        "environment": results["environment"],
        "packages": packages_of(results["environment"]),
        "config": results["config"],
        "error": writing["error"],
        "gigabytes": median(writing["bytes a second"]) / 1e9,
        "tokens": long_text["tokens"],
        "early": f"{milliseconds(long_text['early'])}",
        "late": f"{milliseconds(long_text['late'])}",
        "core": acting["core"],
        "acting_device": acting["device"],
        "writing": writing_table(writing),
        "reading": reading_table(results["reading"]),
        "acting": acting_table(acting["steps"]),
    }
    write_page("DECODING.md", folder, values)


def writing_table(writing: Result) -> str:
    """Generation, beside the time to read what a token needs, where that is known."""
    bandwidth = median(writing["bytes a second"])
    rows = []
    for name, seconds in writing["seconds"].items():
        token = milliseconds(seconds)
        limits = [DASH] * 4
        n_bytes = writing["bytes"].get(name)
        if n_bytes:
            products = milliseconds(writing["seconds of torch.mv"][name])
            limits = [
                f"{n_bytes / 1e6:.0f}",
                f"{n_bytes / bandwidth / median(seconds):.0%}",
                f"{products}",
                f"{products.median / token.median:.0%}",
            ]
        rows.append([name, f"{token}", f"{1e3 / token.median:.0f}", *limits])
    head = ["", "ms a token", "tokens/s", "MB a token", "share of the limit"]
    return table([*head, "torch.mv of the same bytes, ms", "speed as a share of torch.mv's"], rows)


def reading_table(reading: list[Result]) -> str:
    """Evaluation with a memory, and by a window that is recomputed for each token."""
    rows = []
    for result in reading:
        length = result["length"]
        cached = milliseconds(result["cached"])
        sliding = median(result["sliding"])
        row = [
            str(length),
            f"{cached}",
            f"{milliseconds(result['forward'])}",
            f"{sliding:.2f}",
            f"{1e3 * sliding / cached.median:,.0f}",
            f"{PAPERS[length]:,}",
        ]
        rows.append(row)
    head = ["sees back", "cached, ms a token", "forward pass, ms a token", "sliding window, s a token"]
    return table([*head, "sliding / cached", "the paper's"], rows)


def acting_table(steps: list[Result]) -> str:
    """A step of an agent: with keys and values kept, by nn.GRU, and the whole segment again."""
    rows = []
    for result in steps:
        stepper = milliseconds(result["seconds"]["stepper"])
        gru = milliseconds(result["seconds"]["gru"])
        segment = milliseconds(result["seconds"]["segment"])
        row = [
            str(result["streams"]),
            f"{stepper}",
            f"{gru}",
            f"{segment}",
            f"{stepper.median / gru.median:.1f}",
            f"{segment.median / stepper.median:.1f}",
        ]
        rows.append(row)
    head = ["streams", "stepper, ms", "nn.GRU, ms", "segment again, ms", "stepper / nn.GRU"]
    return table([*head, "segment again / stepper"], rows)
