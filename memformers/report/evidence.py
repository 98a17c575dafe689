"""The results of a comparison: claims with their uncertainty, losses and costs of its arms."""

import json
import math
from collections.abc import Sequence
from statistics import median

from memformers.common.intervals import Mean
from memformers.report.arms import Arm, Result, paired
from memformers.report.markdown import number, table
from memformers.report.page import plain
from memformers.runs.finished import FinishedRun

STEADY = 1.5
"""A run whose speed varied by more than this factor shared its machine with other work."""
FEWEST_SPEEDS = 3
"""The fewest records of a run's speed that show whether it varied."""
ROUNDING = 0.02
"""The change of final losses, in nats, that rounding alone, the same sums in another order, has made."""


def verdict(arms: Sequence[Arm], base: Arm) -> list[str]:
    """The claims about each arm against ``base`` that the seeds support, as paragraphs of Markdown: a
    difference only if its interval does not contain zero."""
    others = [arm for arm in arms if arm is not base]
    if not others:
        return []
    if not base.results:
        return [f"No run of {plain(base.label)} has finished, so nothing is compared with it."]
    found = {plain(arm.label): paired(arm, base, more_bits) for arm in others}
    if not any(difference and difference.n > 1 for difference in found.values()):
        return [ONE_SEED]
    n = max(difference.n for difference in found.values() if difference)
    intro = (
        f"Each arm is compared with {plain(base.label)} by its bits per character of the held-out text. The "
        f"difference is computed for each seed; below is its mean over {n} seeds, and ± is half the width of "
        f"a 95 % interval by Student's t. Rounding alone, when the same sums are computed in another order, "
        f"has changed final losses by {ROUNDING} nats, and another seed changes them too; the intervals "
        f"cover both."
        + (
            " Each interval is for one arm alone: of twenty arms that are all alike, about one will seem to "
            "differ." * (len(others) > 2)
        )
    )
    mean = base.mean("bits_per_character")
    assert mean is not None  # a result has it
    return [intro, "\n".join(f"- {claim(label, d, base, mean.mean)}" for label, d in found.items())]


ONE_SEED = (
    f"**There is only one seed, so nothing is claimed about which arm is better.** Rounding alone has "
    f"changed final losses by {ROUNDING} nats. `memformers compare --seeds 5 --resume`, with this "
    f"comparison's folder as `--out` and its settings, trains each arm from four more seeds; the report "
    f"then has paired differences with their intervals."
)


def claim(label: str, difference: Mean | None, base: Arm, level: float) -> str:
    """The claim about one arm; ``level`` is the baseline's bits per character."""
    if difference is None or math.isnan(difference.half_width):
        return (
            f"{label} has fewer than two seeds in common with {plain(base.label)}, so nothing is claimed "
            f"about it."
        )
    seeds = f" ({difference.n} seeds)"
    if difference.leaves_out_zero:
        kind = "worse" if difference.mean > 0 else "better"
        amount = f"{abs(difference.mean):.4f} ± {difference.half_width:.4f}"
        return f"**{label} is {kind} by {amount}**, or {abs(difference.mean) / level:.1%}{seeds}."
    return (
        f"{label}: **no difference was seen**: {signed(difference)}, where a value below zero is "
        f"better{seeds}. A difference of up to {abs(difference.mean) + difference.half_width:.4f} is not "
        f"excluded."
    )


def more_bits(ours: Result, theirs: Result) -> float:
    """How many bits per character more one run needs than the other."""
    return float(ours["bits_per_character"] - theirs["bits_per_character"])


def results_table(arms: Sequence[Arm], base: Arm) -> str:
    """How well each arm predicts the held-out text, a row for each arm."""
    differences = [paired(arm, base, more_bits) if arm is not base else None for arm in arms]
    show = any(difference and difference.n > 1 for difference in differences)
    rows = [
        [
            arm.label,
            f"{len(arm.results)}",
            over_seeds(arm.mean("loss"), ".4f"),
            over_seeds(arm.mean("bits_per_character"), ".4f"),
            over_seeds(arm.mean("accuracy"), ".1%"),
            *([signed(difference) if difference else "–"] if show else []),
        ]
        for arm, difference in zip(arms, differences, strict=True)
    ]
    head = ["arm", "seeds", "validation loss (nats)", "bits per character", "accuracy"]
    against = [f"bits per character minus those of {base.label}"]
    return table(head + against * show, rows)


def costs_table(arms: Sequence[Arm], base: Arm) -> str:
    """The costs and the reach of each arm, a row for each; below the table, why there are no ratios of time,
    if there are none."""
    why_not = no_ratios(arms, base)
    rows = []
    for arm in arms:
        facts = arm.first.facts
        speeds = [
            r["tokens_per_second"] for run in arm.counted for r in run.metrics if "tokens_per_second" in r
        ]
        peak = max((result.get("peak_memory_bytes") or 0 for result in arm.results.values()), default=0)
        ratio = None if arm is base else paired(arm, base, lambda ours, b: ours["seconds"] / b["seconds"])
        rows.append(
            [
                arm.label,
                number(facts.get("keys"), ",.10g"),
                f"{facts['memory']['one_layer']:,} / {facts['memory']['all_layers']:,}",
                number(facts.get("attention_operations"), ",d"),
                f"{facts['parameters']:,}",
                f"{median(speeds):,.0f}" if speeds else "–",
                over_seeds(arm.mean("seconds"), ",.0f", " s"),
                *([] if why_not else [over_seeds(ratio, ".2f")]),
                over_seeds(arm.mean("evaluation_seconds"), ",.0f", " s"),
                number(peak / 2**20 or None, ",.0f", " MiB"),
            ]
        )
    head = ["arm", "keys per layer, without the segment's",
            "memory reach, one layer / all layers (positions)",
            "attention operations per token", "parameters", "tokens/s (median)", "training time",
            *([] if why_not else [f"training time divided by that of {base.label}"]), "evaluation time",
            "peak memory"]  # fmt: skip
    note = ""
    if why_not and len(arms) > 1:
        curves = " and curves against time" if not_comparable(arms) else ""
        note = f"\n\nRatios of training time{curves} are left out: {why_not}."
    return table(head, rows) + note


def no_ratios(arms: Sequence[Arm], base: Arm) -> str:
    """Why there are no ratios of training times, in words; empty if there are."""
    if why_not := not_comparable(arms):
        return why_not
    ratios = [paired(arm, base, more_bits) for arm in arms if arm is not base]
    if not any(ratio and ratio.n > 1 for ratio in ratios):
        return "they need several seeds, which show how much they vary"
    return ""


def not_comparable(arms: Sequence[Arm]) -> str:
    """Why training times can't be compared, in words; empty if they can."""
    runs = [run for arm in arms for run in arm.runs]
    if not on_one_machine(runs):
        return "not all runs had the same machine and package versions"
    for run in runs:
        if len(speeds := steady_speeds(run)) < FEWEST_SPEEDS:
            return f"{run.folder.name} is too short to tell whether other programs ran at the same time"
        if (factor := max(speeds) / max(min(speeds), 1e-9)) > STEADY:
            return (
                f"the speed of {run.folder.name} varied by a factor of {factor:.1f}, as it does when other "
                f"programs run at the same time"
            )
    return ""


def on_one_machine(runs: Sequence[FinishedRun]) -> bool:
    """Whether all runs, from beginning to end, had the same hardware and versions."""
    environments = [e for run in runs for e in run.facts.get("environments", [run.facts["environment"]])]
    return len({json.dumps(environment, sort_keys=True) for environment in environments}) == 1


def steady_speeds(run: FinishedRun) -> list[float]:
    """The tokens/s of a run's records since its memory had its final length, since a longer one takes more
    time; except the first of them, in which it warms up."""
    records = [record for record in run.metrics if "tokens_per_second" in record]
    lengths = [(r.get("memory.length"), r.get("memory.compressed_length")) for r in records]
    return [r["tokens_per_second"] for r, own in zip(records, lengths, strict=True) if own == lengths[-1]][1:]


def over_seeds(value: Mean | None, form: str, unit: str = "") -> str:
    """A mean in a table, with its interval if there is one."""
    if value is None:
        return "–"
    half = "" if math.isnan(value.half_width) else f" ± {value.half_width:{form}}"
    return f"{value.mean:{form}}{half}{unit}"


def signed(difference: Mean) -> str:
    """A difference with its sign and its interval, if there is one."""
    return over_seeds(difference, "+.4f").replace("± +", "± ").replace("-", "−")
