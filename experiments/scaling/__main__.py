"""The compute, memory and communication of a step of two published models on 1, 8 and 64 GPUs, as estimates.

Run it with ``python -m experiments.scaling``; it prints the page that it writes to docs/scaling.md, and
trains nothing. ``--help`` lists the rates that can be set.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from experiments.scaling.counting import flops, kept_bytes, over_layers
from experiments.scaling.estimate import estimate
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.common.fields import Positive, check_fields
from memformers.models.config import ModelConfig
from memformers.report.markdown import table
from memformers.training.config import Parallel, TrainConfig

TRAINING = TrainConfig(batch_size=64, optimizer="adamw", precision="bfloat16", device="cuda")
ENWIK8_LARGE = ModelConfig(
    model="transformer-xl", vocab_size=205, d_model=1024, heads=8, n_layers=24, d_ff=3072, dropout=0.15,
    kernel="naive", segment_len=768, mem_len=768,
)  # fmt: skip
PG_19 = ModelConfig(
    model="compressive", vocab_size=32_000, d_model=1024, heads=16, n_layers=36, d_ff=4096,
    kernel="naive", segment_len=512, mem_len=512, c_mem_len=512, compression_rate=2,
)  # fmt: skip
CASES = {
    "Transformer-XL, enwik8, large": (
        replace(TRAINING, model=ENWIK8_LARGE),
        "Dai et al. 2019 give 24 layers and 277 million parameters, the same number as below. The script "
        "that the authors released gives width 1,024, 8 heads, feed-forward width 3,072, segments and memory "
        "of 768, batch 64 and dropout 0.15. Assumed: 205 characters, and separate embedding and head, as in "
        "this library.",
    ),
    "Compressive Transformer, PG-19": (
        replace(TRAINING, model=PG_19),
        "Rae et al. 2020 give 36 layers, segments, memory and compressed memory of 512 each, compression "
        "rate 2 and a vocabulary of 32,000. Assumed: width 1,024, 16 heads, feed-forward width 4,096, "
        "batch 64, no dropout, and separate embedding and head.",
    ),
}
SHARES: list[tuple[int, Parallel]] = [(1, "single"), (8, "ddp"), (8, "fsdp"), (64, "ddp"), (64, "fsdp")]
PARTS = ("projections", "memory projections", "positions", "scores", "feed forward", "compression",
         "reconstruction", "head")  # fmt: skip
STEP = ("ranks", "parallel", "TFLOP a rank", "weights, gradients, AdamW (GiB)", "copies (GiB)",
        "memories (GiB)", "activations (GiB)", "sum (GiB)", "sent (GB)", "compute (s)", "communication (s)",
        "step (s)", "tokens/s")  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """The assumed rates of the hardware."""

    teraflops: Positive = 400.0
    """TFLOP/s that a GPU reaches in bfloat16 in a whole step; less than its data sheet says."""
    bandwidth: Positive = 50.0
    """GB/s that each rank sends, 10⁹ bytes a second, while it receives the same amount."""
    out: Path = Path(__file__).parents[2] / "docs" / "scaling.md"
    """The file to write."""

    def __post_init__(self) -> None:
        check_fields(self)


def page(rates: Rates) -> str:
    """The whole page."""
    parts = [
        "# Scaling on paper",
        "These numbers are counted by [experiments/scaling](../experiments/scaling/counting.py), and `python "
        "-m experiments.scaling` writes this page. Nobody has run these trainings with this library. The "
        "models are built with one layer and with two, from tensors that have shapes and types but no data. "
        "The operations of a training step are counted by PyTorch's `FlopCounterMode`, and its memory by the "
        "tensors that autograd keeps. A [test](../tests/experiments/test_scaling.py) compares these counts "
        "with measurements of small models that run on CPU.",
        f"A step is one optimizer step with full memories; the batch is the same on any number of ranks. Its "
        f"time is the larger of compute at {rates.teraflops:g} TFLOP/s and communication at "
        f"{rates.bandwidth:g} GB/s a rank, as if they overlapped fully. Loading, "
        f"norms, softmax, the optimizer and latency are not counted.",
        'Training is in bfloat16 with the naive kernel, which `kernel="auto"` chooses on a GPU; '
        "weights, gradients, moments and memories are float32. GiB are 2³⁰ bytes, GB 10⁹. Copies are DDP's "
        "buckets and FSDP's gathered weights; the sum does not contain logits and temporaries. Activations "
        "are the tensors that PyTorch keeps on CPU, with two rules of GPUs that were not measured: softmax "
        "keeps float32 under autocast, and dropout keeps one byte a number.",
    ]
    for name, (config, source) in CASES.items():
        parts += [f"## {name}", source, *tables(config, rates)]
    return "\n\n".join(map(wrapped, parts)) + "\n"


def wrapped(part: str) -> str:
    """A paragraph broken into lines; a table unchanged."""
    return part if part.startswith("|") else fill(part, 115, break_long_words=False, break_on_hyphens=False)


def tables(config: TrainConfig, rates: Rates) -> list[str]:
    """The tables of a case: the costs of ranks in a step, their parts, and ways to reduce activations."""
    alone = estimate(config, 1)
    total = alone.flops.total()
    steps = [step_row(replace(config, parallel=parallel), ranks, rates) for ranks, parallel in SHARES]
    counts = {part: alone.flops[part] for part in PARTS if alone.flops[part]}
    shares = [[part, f"{count / 1e12:,.1f}", f"{count / total:.1%}"] for part, count in counts.items()]
    again = over_layers(flops, replace(config, activation_checkpointing=True)).total() / total - 1
    kept = [[str(ranks), *kept_by(config, ranks)] for ranks in (1, 8, 64)]
    return [
        f"{alone.parameters:,} parameters, {alone.tokens:,} tokens a step.",
        table(STEP, steps),
        "The operations by part of the model:",
        table(["part", "TFLOP, all ranks", "share"], shares),
        f"Activations of a rank (GiB), by the way to reduce them. Computing layers again "
        f"(`activation_checkpointing`) needs {again:.0%} more operations. The fused kernel has no "
        f"dropout, so its columns are without dropout, and it has not been run on a GPU yet.",
        table(["ranks", "naive", "naive, layers again", "fused", "fused, layers again"], kept),
    ]


def step_row(config: TrainConfig, ranks: int, rates: Rates) -> list[str]:
    """The costs of each of the ``ranks`` in a step."""
    e = estimate(config, ranks)
    compute, sending = e.flops.total() / (rates.teraflops * 1e12), e.sent_bytes / (rates.bandwidth * 1e9)
    step = max(compute, sending)
    sizes = (e.state_bytes, e.copy_bytes, e.memory_bytes, e.activation_bytes, e.total_bytes)
    return [
        str(ranks), config.parallel, f"{e.flops.total() / 1e12:,.1f}", *map(gibibytes, sizes),
        f"{e.sent_bytes / 1e9:.2f}", *(f"{seconds:.3f}" for seconds in (compute, sending, step)),
        f"{e.tokens / step:,.0f}",
    ]  # fmt: skip


def kept_by(config: TrainConfig, ranks: int) -> list[str]:
    """Bytes of activations on each of the ``ranks``, by each way to reduce them."""
    config = replace(config, batch_size=config.batch_size // ranks)
    fused = replace(config, model=replace(config.model, kernel="fused", dropout=0.0))
    return [
        gibibytes(over_layers(kept_bytes, replace(way, activation_checkpointing=again))["kept"])
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
