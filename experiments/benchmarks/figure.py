"""The figure of attention alone: time and memory against the number of keys."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from experiments.benchmarks.attention import NAIVE, OURS, SDPA, B, E, H, S
from experiments.benchmarks.spread import spread
from memformers.common.files import replacing
from memformers.report.figures import thousands

LOOKS: dict[str, dict[str, Any]] = {
    OURS: {"color": "#D55E00", "linestyle": "-", "marker": "s"},
    NAIVE: {"color": "#0072B2", "linestyle": ":", "marker": "o"},
    SDPA: {"color": "#009E73", "linestyle": "--", "marker": "^"},
}


def draw_attention(results: list[dict[str, Any]], path: Path) -> None:
    """Two panels into ``path``, a line for each implementation, quartiles as bars."""
    figure = Figure(figsize=(9.0, 4.0), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.05})
    for name, look in LOOKS.items():
        timed = [(r["keys"], spread([1e3 * t for t in r["seconds"][name]]))
                 for r in results if name in r["seconds"]]  # fmt: skip
        if timed:
            middles = [t.median for _, t in timed]
            bars = [[t.median - t.low for _, t in timed], [t.high - t.median for _, t in timed]]
            left.errorbar([keys for keys, _ in timed], middles, bars, label=name, capsize=2, **look)
        sized = [(r["keys"], r["extra memory"][name] / 2**20)
                 for r in results if r["extra memory"].get(name)]  # fmt: skip
        if sized:
            right.plot(*zip(*sized, strict=True), label=name, **look)
    left.set_ylabel("forward + backward (milliseconds)")
    right.set_ylabel("peak memory beside the inputs (MiB)")
    for axes in (left, right):
        scale(axes, [r["keys"] for r in results])
    left.legend(frameon=False)
    figure.suptitle(
        f"Relative attention alone on CPU: {B} streams, {H} heads of {E}, {S} queries", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def scale(axes: Axes, keys: list[int]) -> None:
    """Both axes logarithmic, a tick at each number of keys that was measured."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys K (positions of memory and segment)")
    axes.set_xticks(keys)
    axes.margins(x=0.08)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
