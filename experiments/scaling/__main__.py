"""The compute, memory and communication of a step of two published models on 1, 8 and 64 GPUs, as estimates.

Run it with ``python -m experiments.scaling``; it prints the page that it writes to docs/scaling.md, and
trains nothing. ``--help`` lists the rates that can be set.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from experiments.scaling.counting import flops, kept_bytes, over_layers
from experiments.scaling.estimate import Estimate, estimate
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Positive, changed
from memformers.report.markdown import table
from memformers.training.config import Parallel, TrainConfig
from memformers.training.presets import Preset, preset_names, read_preset

CASES = {
    "Transformer-XL, enwik8, large": "enwik8-24l",
    "Compressive Transformer, PG-19": "pg19-compressive",
}
"""The presets that have a section of their own."""
SHARES: list[tuple[int, Parallel]] = [(1, "single"), (8, "ddp"), (8, "fsdp"), (64, "ddp"), (64, "fsdp")]
STREAMS = 64
"""The batch of those sections, which 1, 8 and 64 ranks can share."""
BENCHMARKS = (
    "`memformers train --preset NAME` has the settings of each ([how](how-to/benchmarks.md)). Hours are of "
    "training steps alone, on one GPU and on 8 with DDP, if all activations fit; what doesn't fit needs "
    "`--accumulate` or `--activation-checkpointing`. A batch that 8 can't share is rounded up."
)
PARTS = ("projections", "memory projections", "positions", "scores", "feed forward", "compression",
         "reconstruction", "head")  # fmt: skip
STEP = ("ranks", "parallel", "TFLOP a rank", "weights, gradients, AdamW (GiB)", "copies (GiB)",
        "memories (GiB)", "activations (GiB)", "sum (GiB)", "sent (GB)", "compute (s)", "communication (s)",
        "step (s)", "tokens/s")  # fmt: skip


@dataclass(frozen=True)
class Rates(Checked):
    """The assumed rates of the hardware."""

    teraflops: Positive = 400.0
    """TFLOP/s that a GPU reaches in bfloat16 in a whole step; less than its data sheet says."""
    bandwidth: Positive = 50.0
    """GB/s that each rank sends, 10⁹ bytes a second, while it receives the same amount."""
    out: Path = Path(__file__).parents[2] / "docs" / "scaling.md"
    """The file to write."""


def page(rates: Rates) -> str:
    """The whole page."""
    parts = [
        "# Scaling on paper",
        "These numbers are counted by [experiments/scaling](../experiments/scaling/counting.py), and `python "
        "-m experiments.scaling` writes this page. Nobody has trained these models with this library. The "
        "models are built with one layer and with two, from tensors that have shapes and types but no data. "
        "The operations of a training step are counted by PyTorch's `FlopCounterMode`, and its memory by the "
        "tensors that autograd keeps. A [test](../tests/experiments/test_scaling.py) compares these counts "
        "with measurements of small models that run on CPU.",
        f"A step is one optimizer step with full memories; the batch is the same on any number of ranks. Its "
        f"time is the larger of compute at {rates.teraflops:g} TFLOP/s and communication at "
        f"{rates.bandwidth:g} GB/s a rank, as if they overlapped fully. Loading, "
        f"norms, softmax, the optimizer and latency are not counted.",
        "Training is in bfloat16 with the naive kernel; "
        "weights, gradients, moments and memories are float32. GiB are 2³⁰ bytes, GB 10⁹. Copies are DDP's "
        "buckets and FSDP's gathered weights; the sum does not contain logits and temporaries. Activations "
        "are the tensors that PyTorch keeps on CPU, but dropout keeps one byte a number, as on GPUs, where "
        "nothing was measured.",
    ]
    parts += ["## The papers' benchmarks", BENCHMARKS, benchmarks(rates)]
    for title, name in CASES.items():
        preset = read_preset(name)
        said = f"`--preset {name}`, on any number of ranks with a batch of {STREAMS}: {preset.source}"
        parts += [f"## {title}", f"{said} {preset.assumed}".strip(), *tables(on_gpu(preset), rates)]
    return "\n\n".join(map(wrapped, parts)) + "\n"


def on_gpu(preset: Preset, batch_size: int = STREAMS) -> TrainConfig:
    """The training of a preset in bfloat16, with the naive kernel and the vocabulary of its corpus."""
    model = replace(preset.config.model, vocab_size=preset.vocab_size, kernel="naive")
    return changed(preset.config, model=model, batch_size=batch_size, precision="bfloat16", device="cuda")


def benchmarks(rates: Rates) -> str:
    """A row for each preset: what it should reach, and what that would cost."""
    head = ["preset", "the paper's result", "million parameters", "billion tokens", "steps",
            "GiB on one", "hours on one", "GiB on each of 8", "hours on 8"]  # fmt: skip
    return table(head, [benchmark(name, rates) for name in preset_names()])


def benchmark(name: str, rates: Rates) -> list[str]:
    """The row of the preset called ``name``."""
    preset = read_preset(name)
    tokens, costs = preset.config.tokens, []
    for ranks, parallel in SHARES[:2]:
        streams = -(-preset.config.batch_size // ranks) * ranks
        e = estimate(changed(on_gpu(preset, streams), parallel=parallel), ranks)
        hours = step_seconds(e, rates) / e.tokens * tokens / 3600
        costs += [gibibytes(e.total_bytes), f"{hours:,.0f}"]
    steps = f"{tokens / preset.config.tokens_a_step:,.0f}"
    return [name, preset.reaches, f"{e.parameters / 1e6:,.0f}", f"{tokens / 1e9:,.1f}", steps, *costs]


def step_seconds(e: Estimate, rates: Rates) -> float:
    """How long a step takes, if computing and sending overlap."""
    return max(e.flops.total() / (rates.teraflops * 1e12), e.sent_bytes / (rates.bandwidth * 1e9))


def wrapped(part: str) -> str:
    """A paragraph broken into lines; a table unchanged."""
    return part if part.startswith("|") else fill(part, 115, break_long_words=False, break_on_hyphens=False)


def tables(config: TrainConfig, rates: Rates) -> list[str]:
    """The tables of a case: the costs of ranks in a step, their parts, and ways to reduce activations."""
    alone = estimate(config, 1)
    total = alone.flops.total()
    steps = [step_row(changed(config, parallel=parallel), ranks, rates) for ranks, parallel in SHARES]
    counts = {part: alone.flops[part] for part in PARTS if alone.flops[part]}
    shares = [[part, f"{count / 1e12:,.1f}", f"{count / total:.1%}"] for part, count in counts.items()]
    again = over_layers(flops, changed(config, activation_checkpointing=True)).total() / total - 1
    kept = [[str(ranks), *kept_by(config, ranks)] for ranks in (1, 8, 64)]
    return [
        f"{alone.parameters:,} parameters, {alone.tokens:,} tokens a step.",
        table(STEP, steps),
        "The operations by part of the model:",
        table(["part", "TFLOP, all ranks", "share"], shares),
        f"Activations of a rank (GiB), by the way to reduce them. Computing layers again "
        f"(`activation_checkpointing`) needs {again:.0%} more operations. The fused kernel "
        f"has not been run on a GPU yet.",
        table(["ranks", "naive", "naive, layers again", "fused", "fused, layers again"], kept),
    ]


def step_row(config: TrainConfig, ranks: int, rates: Rates) -> list[str]:
    """The costs of each of the ``ranks`` in a step."""
    e = estimate(config, ranks)
    compute, sending = e.flops.total() / (rates.teraflops * 1e12), e.sent_bytes / (rates.bandwidth * 1e9)
    step = step_seconds(e, rates)
    sizes = (e.state_bytes, e.copy_bytes, e.memory_bytes, e.activation_bytes, e.total_bytes)
    return [
        str(ranks), config.step.parallel, f"{e.flops.total() / 1e12:,.1f}", *map(gibibytes, sizes),
        f"{e.sent_bytes / 1e9:.2f}", *(f"{seconds:.3f}" for seconds in (compute, sending, step)),
        f"{e.tokens / step:,.0f}",
    ]  # fmt: skip


def kept_by(config: TrainConfig, ranks: int) -> list[str]:
    """Bytes of activations on each of the ``ranks``, by each way to reduce them."""
    config = replace(config, batch_size=config.batch_size // ranks)
    fused = replace(config, model=replace(config.model, kernel="fused"))
    return [
        gibibytes(over_layers(kept_bytes, changed(way, activation_checkpointing=again))["kept"])
        for way in (config, fused)
        for again in (False, True)
    ]


def gibibytes(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / 2**30:,.1f}"


def main(rates: Rates) -> None:
    """Print the tables and write the page. Raises UserError if Triton is missing, which the fused kernel
    needs."""
    if find_spec("triton") is None:
        raise UserError("counting the fused kernel's memory needs Triton; install it (pip install triton).")
    text = page(rates)
    rates.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {rates.out}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Rates))
