"""The measurements of attention alone, as Markdown and a figure."""

import math
from pathlib import Path
from statistics import median

from matplotlib.ticker import LogLocator

from experiments.benchmarks import attention as a
from experiments.benchmarks.measuring import Result, spread, times_as_fast
from memformers.common.intervals import Mean
from memformers.kernels import blocked
from memformers.report import plotting
from memformers.report.markdown import number, table

FIGURE = Path("figures") / "attention.png"
LOOKS = {a.OURS: plotting.ORANGE, a.NAIVE: plotting.BLUE, a.SDPA: plotting.GREEN}


def attention_alone(results: list[Result]) -> list[str]:
    """Time and memory against the number of keys."""
    errors = [error for r in results for error in r["errors"].values()]
    rows = []
    for r in results:
        for name in a.IMPLEMENTATIONS:
            if name not in r["seconds"]:
                cells = [f"not run: {r['not run'][name]}", *"––––"]
            else:
                seconds, naive = r["seconds"][name], r["seconds"].get(a.NAIVE)
                cells = [
                    f"{spread(seconds, 1e3):.0f}",
                    f"{1e6 * median(seconds) / r['keys']:.0f}",
                    str(times_as_fast(seconds, naive)) if naive else "–",
                    mebibytes(r["extra memory"].get(name)),
                    f"{r['flops'] / median(seconds) / median(r['torch.mm, FLOP/s']):.0%}",
                ]
            rows.append([str(r["memory_len"]), str(r["keys"]), name, *cells])
    return [
        "## Attention alone",
        f"Forward and backward, with the gradients of queries, keys, values and learned positions, of {a.S} "
        f"queries in {a.B} streams and {a.H} heads of {a.E}, all inputs contiguous. Outputs and gradients "
        f"agree with the naive kernel to {max(errors, default=0.0):.0e} (RMS, relative) before anything is "
        "timed. SDPA is `F.scaled_dot_product_attention` with positions and causal mask as an explicit bias, "
        "which has a gradient. Memory is the peak of a separate process, without the inputs. Ours keeps up "
        f"to {4 * blocked.KEPT / 2**20:.0f} MiB of probabilities for the backward pass; if there are more, "
        "it computes them again. The share is relative to `torch.mm`'s rate, with all K keys counted for "
        "every query.",
        f"![Time and memory of attention against the number of keys]({FIGURE.as_posix()})",
        table(["M", "K", "implementation", "ms", "µs a key", "times as fast as naive", "MiB",
               "share of torch.mm"], rows),
    ]  # fmt: skip


def attention_on_gpu(results: Result) -> list[str]:
    """The same on a GPU, or that there was none."""
    parts = [
        "## Attention alone on a GPU",
        f"In bfloat16, forward and backward: {a.FUSED}; {a.FLEX}, which stores every position score in "
        f"memory; and {a.FLOOR}, which computes less and gives a lower bound.",
    ]
    measured, rows = results.get("attention on GPU"), []
    if not measured:
        return [*parts, "Not run: no GPU."]
    for r in measured:
        for name in (a.FUSED, a.FLEX, a.FLOOR):
            cells = [f"not run: {r['not run'].get(name, '')}", "–"]
            if name in r["seconds"]:
                cells = [f"{1e3 * median(r['seconds'][name]):.2f}", mebibytes(r["extra memory"][name])]
            rows.append([str(r["memory_len"]), str(r["keys"]), name, *cells])
    return [*parts, f"{results['GPU']}.", table(["M", "K", "implementation", "ms", "MiB"], rows)]


def mebibytes(count: int | None) -> str:
    """Bytes as MiB."""
    return number(None if count is None else count / 2**20, ",.0f")


def draw_attention(results: list[Result], path: Path) -> None:
    """Two panels into ``path``, a line for each implementation, quartiles as bars."""
    figure, places = plotting.panels([3.4], width=9.0, columns=2)
    said = "forward + backward (milliseconds)", "peak memory beside the inputs (MiB)"
    for axes, part, scale, label in zip(
        places, ("seconds", "extra memory"), (1e3, 2**-20), said, strict=True
    ):
        many = []
        for name, look in LOOKS.items():
            measured = [(r["keys"], r[part][name]) for r in results if r[part].get(name)]
            found = [(keys, spread(x if isinstance(x, list) else [x], scale)) for keys, x in measured]
            points = [(keys, Mean(x.median, math.nan, 1)) for keys, x in found]
            many.append(
                plotting.Series(name, points, look, [(x.median - x.low, x.high - x.median) for _, x in found])
            )
        axes.set_yscale("log")
        plotting.draw_marks(axes, many)
        plotting.style(axes, "keys K (positions of memory and segment)", label)
        plotting.octave_axis(axes, [r["keys"] for r in results])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    plotting.legend(figure)
    figure.suptitle(
        f"Relative attention alone on CPU: {a.B} streams, {a.H} heads of {a.E}, {a.S} queries", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    plotting.save(figure, path)
