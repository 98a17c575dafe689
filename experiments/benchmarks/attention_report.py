"""The measurements of attention alone, as Markdown."""

from pathlib import Path
from statistics import median

from experiments.benchmarks import attention
from experiments.benchmarks.attention_gpu import FLEX, FLOOR, FUSED
from experiments.benchmarks.markdown import Result, mebibytes, row, table
from experiments.benchmarks.spread import spread, times_as_fast
from memformers.kernels import blocked

FIGURE = Path("figures") / "attention.png"


def attention_alone(results: list[Result]) -> list[str]:
    """Time and memory against the number of keys."""
    a = attention
    errors = [error for r in results for error in r["errors"].values()]
    lines = [
        "",
        "## Attention alone",
        "",
        f"Forward and backward, with the gradients of queries, keys, values and learned positions, of {a.S} "
        f"queries in {a.B} streams and {a.H} heads of {a.E}, all inputs contiguous. Outputs and gradients "
        f"agree with the naive kernel to {max(errors, default=0.0):.0e} (RMS, relative) before anything is "
        "timed. SDPA is `F.scaled_dot_product_attention` with positions and causal mask as an explicit bias, "
        "which has a gradient. Memory is the peak of a separate process, without the inputs. Ours keeps up "
        f"to {4 * blocked.KEPT / 2**20:.0f} MiB of probabilities for the backward pass; if there are more, "
        "it computes them again. The share is relative to `torch.mm`'s rate, with all K keys counted for "
        "every query.",
        "",
        f"![Time and memory of attention against the number of keys]({FIGURE.as_posix()})",
        "",
        table("M", "K", "implementation", "ms", "µs a key", "times as fast as naive", "MiB",
              "share of `torch.mm`"),
    ]  # fmt: skip
    for r in results:
        for name in a.IMPLEMENTATIONS:
            if name not in r["seconds"]:
                lines.append(row(r["memory_len"], r["keys"], name, f"not run: {r['not run'][name]}", *"––––"))
                continue
            seconds = r["seconds"][name]
            naive = r["seconds"].get(a.NAIVE)
            milliseconds = spread([1e3 * t for t in seconds])
            lines.append(row(
                r["memory_len"], r["keys"], name,
                f"{milliseconds.median:.0f} ({milliseconds.low:.0f} – {milliseconds.high:.0f})",
                f"{1e3 * milliseconds.median / r['keys']:.0f}",
                str(times_as_fast(seconds, naive)) if naive else "–",
                mebibytes(r["extra memory"].get(name)),
                f"{r['flops'] / median(seconds) / median(r['torch.mm, FLOP/s']):.0%}",
            ))  # fmt: skip
    return lines


def attention_on_gpu(results: Result) -> list[str]:
    """The same on a GPU, or that there was none."""
    lines = [
        "",
        "## Attention alone on a GPU",
        "",
        f"In bfloat16, forward and backward: {FUSED}; {FLEX}, which stores every position score in memory; "
        f"and {FLOOR}, which computes less and gives a lower bound.",
        "",
    ]
    measured = results.get("attention on GPU")
    if not measured:
        return [*lines, "Not run: no GPU."]
    lines += [f"{results['GPU']}.", "", table("M", "K", "implementation", "ms", "MiB")]
    for r in measured:
        for name in (FUSED, FLEX, FLOOR):
            cells = [f"not run: {r['not run'].get(name, '')}", "–"]
            if name in r["seconds"]:
                cells = [f"{1e3 * median(r['seconds'][name]):.2f}", mebibytes(r["extra memory"][name])]
            lines.append(row(r["memory_len"], r["keys"], name, *cells))
    return lines
