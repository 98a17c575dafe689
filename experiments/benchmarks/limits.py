"""What was wanted and not reached, and where the time goes."""

from statistics import median

from experiments.benchmarks.cases import CASES, Case
from experiments.benchmarks.markdown import Result, row, table
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.profiling import KINDS, OPTIMIZER, OTHER
from experiments.benchmarks.spread import times_as_fast
from experiments.benchmarks.training import BFLOAT16, COMPILED, OURS

MULTIPLY_TARGET, BFLOAT16_TARGET, COMPILE_TARGET = 0.80, 1.6, 1.25
"""On base: our share of torch.mm's rate, and bfloat16's speed as a multiple of float32's; everywhere:
the compiled model's speed as a multiple of the eager one's, at most."""


def what_limits(steps: list[Result]) -> list[str]:
    """What was wanted and not reached, and where the time of a step goes."""
    kinds = [*KINDS, OPTIMIZER, OTHER]
    lines = ["", "## What limits it", "", *(missed_targets(steps) or ["Everything wanted was reached."]), ""]
    lines += [
        "Where the time of our step goes, in percent of what the profiler saw operators take themselves "
        "(float32, eager, 3 steps). The last column is about what our multiple of labml-nn's speed would be "
        "if all but these same matrix products took no time:",
        "",
        table("case", "model", *kinds, "products alone"),
    ]
    for r in steps:
        shares = (f"{100 * r['profile'][kind]:.0f}" for kind in kinds)
        lines.append(row(r["case"], r["model"], *shares, f"{products_alone(r):.1f}"))
    return lines


def products_alone(r: Result) -> float:
    """Our multiple of labml-nn's speed if the matrix products of our step were all of it."""
    return times_as_fast(r["seconds"][OURS], r["seconds"][LABML]).median / r["profile"]["matrix products"]


def missed_targets(steps: list[Result]) -> list[str]:
    """A line for each target that a median stays below."""
    lines = []
    for r in steps:
        name, seconds = f"{r['case']}, {r['model']}", r["seconds"]
        ratio = times_as_fast(seconds[OURS], seconds[LABML]).median
        if ratio < case_of(r).target:
            lines.append(f"- {name}: {ratio:.2f} times labml-nn's speed; {case_of(r).target:.1f} was wanted.")
        if r["case"] == "base" and multiply_share(r) < MULTIPLY_TARGET:
            lines.append(
                f"- {name}: {multiply_share(r):.0%} of `torch.mm`; {MULTIPLY_TARGET:.0%} was wanted."
            )
        if BFLOAT16 in seconds and r["case"] == "base":
            ratio = times_as_fast(seconds[BFLOAT16], seconds[OURS]).median
            if ratio < BFLOAT16_TARGET:
                lines.append(f"- {name}: bfloat16 {ratio:.2f} times float32; {BFLOAT16_TARGET} was wanted.")
        if COMPILED in seconds:
            ratio = times_as_fast(seconds[COMPILED], seconds[OURS]).median
            if ratio > COMPILE_TARGET:
                lines.append(
                    f"- {name}: compiled {ratio:.2f} times eager; at most {COMPILE_TARGET} was wanted."
                )
    return lines


def case_of(r: Result) -> Case:
    """The case that a result is of."""
    return CASES[r["case"]].of(r["model"])


def multiply_share(r: Result) -> float:
    """Our model's operations a second, as a share of torch.mm's."""
    return r["flops"] / median(r["seconds"][OURS]) / median(r["torch.mm, FLOP/s"])
