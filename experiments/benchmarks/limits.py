"""Where the time of a step goes."""

from statistics import median

from experiments.benchmarks.markdown import Result, row, table
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.profiling import KINDS, OPTIMIZER, OTHER
from experiments.benchmarks.spread import times_as_fast
from experiments.benchmarks.training import OURS


def what_limits(steps: list[Result]) -> list[str]:
    """Where the time of a step goes."""
    kinds = [*KINDS, OPTIMIZER, OTHER]
    lines = [
        "",
        "## What limits it",
        "",
        "The time of our step by kind of operator, in percent of the operators' own time that the profiler "
        "measured (float32, eager, 3 steps). The last column is an estimate of our speed as a multiple of "
        "labml-nn's if everything except these matrix products took no time:",
        "",
        table("case", "model", *kinds, "products alone"),
    ]
    for r in steps:
        shares = (f"{100 * r['profile'][kind]:.0f}" for kind in kinds)
        lines.append(row(r["case"], r["model"], *shares, f"{products_alone(r):.1f}"))
    return lines


def products_alone(r: Result) -> float:
    """Our speed as a multiple of labml-nn's if our step consisted only of its matrix products."""
    return times_as_fast(r["seconds"][OURS], r["seconds"][LABML]).median / r["profile"]["matrix products"]


def multiply_share(r: Result) -> float:
    """Our model's operations a second, as a share of torch.mm's."""
    return r["flops"] / median(r["seconds"][OURS]) / median(r["torch.mm, FLOP/s"])
