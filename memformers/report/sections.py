"""What every report of arms says: warnings, the claims that the seeds support, and what each arm costs."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from memformers.common.intervals import Mean, mean_of
from memformers.report.arms import Arm, Column, Measure, arms_table
from memformers.report.markdown import DASH, fenced, number, plain
from memformers.runs.finished import FinishedRun
from memformers.runs.folder import CONFIG, FACTS, METRICS, flatten
from memformers.runs.plan import read_plan
from memformers.runs.settings import OF_A_COMPRESSION

STEADY = 1.5
"""A run whose speed varied by more than this factor shared its machine with other work."""
FEWEST_SPEEDS = 3
"""The fewest records of a run's speed that show whether it varied."""
ROUNDING = 0.03
"""The change of final losses, in bits per character, that rounding alone has made: the same sums in another
order."""
MAY_DIFFER = OF_A_COMPRESSION | {
    "seed", "data", "recall.frozen", "agent.core", "model.model", "model.mem_len",
}  # fmt: skip
"""The settings that an experiment may vary: the memory and the seed, and the path of the text, which its
checksum identifies."""


def all_runs(arms: Sequence[Arm]) -> list[FinishedRun]:
    """The runs of all ``arms``."""
    return [run for arm in arms for run in arm.runs]


def warnings(arms: Sequence[Arm], base: Arm, folder: Path, *, fewest_tokens: int = 0) -> list[str]:
    """What a reader must know before trusting the numbers; training runs of less than ``fewest_tokens`` are
    too short to compare models."""
    found = []
    runs = all_runs(arms)
    corpus, tokens = runs[0].facts["corpus"], runs[0].config["tokens"]
    if corpus.get("stands_in_for_tiny_shakespeare"):
        found.append(
            "**The text is the built-in play.** Tiny Shakespeare was neither found nor downloadable. Don't "
            "compare losses here with published ones."
        )
    if tokens < fewest_tokens:
        found.append(
            f"**Each training run on {plain(corpus['name'])} has only {tokens:,} tokens**: too few to learn "
            f"much. This report only shows that the experiment runs."
        )
    for arm in arms:
        left = "it is not part of any mean or curve" if arm.results else "its curves end where it stopped"
        for run in arm.runs:
            if run.result is None:
                which = f", seed {run.seed}," if len(arm.runs) > 1 else ""
                found.append(f"**{plain(arm.label)}{which} did not finish**; {left}.")
    for why, names in missing(folder).items():
        found.append(f"**{plain(', '.join(names))}**: {why}, so missing here.")
    if others := differing_settings(arms, base):
        found.append(
            f"**These runs differ in more than their memory**: {plain(', '.join(others))}; see the settings "
            f"below."
        )
    return [f"> {warning}" for warning in found]


def missing(folder: Path) -> dict[str, list[str]]:
    """The names of planned runs without results, by the reason."""
    planned = plan.runs if (plan := read_plan(folder)) else {}
    names = dict.fromkeys([*planned, *(path.parent.name for path in folder.glob(f"*/{CONFIG}"))])
    why = {METRICS: f"{FACTS} is lost", CONFIG: "no step was made", "": "not started"}
    found: dict[str, list[str]] = {}
    for run in (folder / name for name in names):
        if not (run / FACTS).exists():
            reason = next(w for file, w in why.items() if not file or (run / file).exists())
            found.setdefault(reason, []).append(run.name)
    return found


def differing_settings(arms: Sequence[Arm], base: Arm) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds only if an arm has none in common with
    ``base``."""
    runs = all_runs(arms)
    settings = [dict(flatten(run.config)) for run in runs]
    names = dict.fromkeys(
        name for config in settings for name in config
        if name not in MAY_DIFFER and not name.startswith("model.own.")
    )  # fmt: skip
    found = [name for name in names if len({json.dumps(config.get(name)) for config in settings}) > 1]
    if len({run.facts["corpus"].get("sha256") for run in runs}) > 1:
        found.append("text")
    if not all({run.seed for run in arm.runs} & {run.seed for run in base.runs} for arm in arms):
        found.append("seed")
    return found


def with_more_seeds(arms: Sequence[Arm], folder: Path) -> list[str]:
    """How the command that began the experiment in ``folder`` adds seeds, as paragraphs; none for a trial, or
    where no command began it."""
    plan = read_plan(arms[0].first.folder.parent)
    words = shlex.split(plan.commands[0]) if plan and plan.commands else []
    if "--quick" in words or not re.search(r"\b(memformers|experiments)\b", " ".join(words[:3])):
        return []
    kept = re.sub(r" --(resume|(seeds|out)[ =]('[^']*'|\S+))(?!\S)", "", shlex.join(words))
    where = folder.name if folder.is_absolute() else str(folder)
    command = f"{kept} --seeds 5 --resume --out {shlex.quote(where)}"
    return ["This command, in the same folder as before, trains the other four of each arm:", fenced(command)]


def claims(arms: Sequence[Arm], base: Arm, measures: Sequence[Measure], folder: Path) -> list[str]:
    """The claims about each arm against ``base`` that the seeds support, as paragraphs: a difference only if
    its interval does not contain zero. For one seed, how to train more in the experiment's ``folder``."""
    others = [arm for arm in arms if arm is not base]
    if not others:
        return []
    if not base.results:
        return [f"No run of {plain(base.label)} has finished, so nothing is compared with it."]
    found = [{plain(arm.label): arm.minus(base, m.of) for arm in others} for m in measures]
    n = max((d.n for by_label in found for d in by_label.values() if d), default=0)
    if n < 2:
        return [
            f"**There is only one seed, so nothing is claimed about which arm is better.** Rounding alone "
            f"has changed final losses by {ROUNDING} bits per character. With five seeds, the report has "
            f"paired differences with their intervals.",
            *with_more_seeds(arms, folder),
        ]
    cover = "All seeds have the same held-out text, so they say nothing about other texts."
    if "recall" in base.first.config:
        cover = "Each seed is measured on streams of its own, so they cover other streams too."
    intro = (
        f"Each arm is compared with {plain(base.label)} by its {' and '.join(m.label for m in measures)}. "
        f"The difference is computed for each seed; above is its mean over {n} seeds, and ± is half the "
        f"width of a 95 % interval by Student's t. Rounding alone, when the same sums are computed in "
        f"another order, has changed final losses by {ROUNDING} bits per character, and another seed "
        f"changes them too; the intervals cover both. {cover}"
    )
    if len(others) * len(measures) > 2:
        intro += (
            " Each interval is for one arm alone: of twenty arms that are all alike, about one will seem to "
            "differ."
        )
    parts = []
    for measure, by_label in zip(measures, found, strict=True):
        parts += [f"By {measure.label}:"] * (len(measures) > 1)
        parts.append("\n".join(f"- {claim(label, d, base, measure)}" for label, d in by_label.items()))
    return [*parts, intro]


def claim(label: str, difference: Mean | None, base: Arm, measure: Measure) -> str:
    """The claim about one arm's ``difference`` to ``base``."""
    if difference is None or math.isnan(difference.half_width):
        return (
            f"{label} has fewer than two seeds in common with {plain(base.label)}, so nothing is claimed "
            f"about it."
        )
    seeds = f" ({difference.n} seeds)"
    size = Mean(abs(difference.mean), difference.half_width, difference.n)
    if difference.leaves_out_zero:
        kind = "better" if difference.mean * measure.better > 0 else "worse"
        level = base.mean(measure.of)
        assert level is not None  # there is a difference
        relative = "" if measure.unit_of_differences else f", or {size.mean / level.mean:.1%}"
        return f"**{label} is {kind} by {measure.shown_difference(size, signed=False)}**{relative}{seeds}."
    most = measure.shown_difference(size.mean + size.half_width, signed=False)
    side = "below" if measure.better < 0 else "above"
    return (
        f"{label}: **no difference was seen**: {measure.shown_difference(difference)}, where a value "
        f"{side} zero is better{seeds}. A difference of up to {most} is not excluded."
    )


def costs_table(arms: Sequence[Arm], base: Arm, more: Mapping[str, Column] | None = None) -> str:
    """The costs and the reach of each arm, a row for each, and the columns ``more``; below the table, why
    there are no ratios of time, if there are none."""
    why_not = no_ratios(arms, base)
    columns: dict[str, Column] = {
        "keys per layer, without the segment's": lambda arm: number(arm.first.facts["keys"], ",.10g"),
        "memory reach, one layer / all layers (positions)": lambda arm: (
            f"{arm.first.facts['memory']['one_layer']:,} / {arm.first.facts['memory']['all_layers']:,}"
        ),
        "attention operations per token": lambda arm: f"{arm.first.facts['attention_operations']:,}",
        "parameters": lambda arm: f"{arm.first.facts['parameters']:,}",
        "tokens/s (median)": median_speed,
        "training time": lambda arm: number(arm.mean("seconds"), ",.0f", " s"),
    }
    if not why_not:
        ratio = f"training time divided by that of {base.label}"
        columns[ratio] = lambda arm: DASH if arm is base else number(time_ratio(arm, base), ".2f")
    columns |= {
        "evaluation time": lambda arm: number(arm.mean("evaluation_seconds"), ",.0f", " s"),
        "peak memory": peak_memory,
        **(more or {}),
    }
    note = ""
    if why_not and len(arms) > 1:
        curves = " and curves against time" if not_comparable(arms) else ""
        note = f"\n\nRatios of training time{curves} are left out: {why_not}."
    elif not on_one_machine(all_runs(arms)):
        note = "\n\nThe parts of this run did not all have the same machine and package versions."
    return arms_table(arms, columns) + note


def median_speed(arm: Arm) -> str:
    """The median of an arm's records of its speed."""
    speeds = [r["tokens_per_second"] for run in arm.counted for r in run.metrics if "tokens_per_second" in r]
    return f"{median(speeds):,.0f}" if speeds else DASH


def peak_memory(arm: Arm) -> str:
    """The largest peak of an arm's runs."""
    peak = max((result["peak_memory_bytes"] or 0 for result in arm.results.values()), default=0)
    return number(peak / 2**20 or None, ",.0f", " MiB")


def time_ratio(arm: Arm, base: Arm) -> Mean | None:
    """The training time of ``arm`` divided by that of ``base`` from the same seed."""
    ours, theirs = arm.values("seconds"), base.values("seconds")
    ratios = [ours[seed] / theirs[seed] for seed in ours if seed in theirs]
    return mean_of(ratios) if ratios else None


def no_ratios(arms: Sequence[Arm], base: Arm) -> str:
    """Why there are no ratios of training times, in words; empty if there are."""
    if why_not := not_comparable(arms):
        return why_not
    ratios = [time_ratio(arm, base) for arm in arms if arm is not base]
    if not any(ratio and ratio.n > 1 for ratio in ratios):
        return "they need several seeds, which show how much they vary"
    return ""


def not_comparable(arms: Sequence[Arm]) -> str:
    """Why training times can't be compared, in words; empty if they can."""
    runs = all_runs(arms)
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
    lengths = [keys_at(record) for record in records]
    return [r["tokens_per_second"] for r, own in zip(records, lengths, strict=True) if own == lengths[-1]][1:]


def keys_at(record: Mapping[str, float]) -> float:
    """The number of keys per layer in memory at a training record."""
    return record.get("memory.length", 0) + record.get("memory.compressed_length", 0)


def stages_of(arms: Sequence[Arm]) -> list[float]:
    """The tokens at which the memory of any arm became longer during its training, as the middle between two
    training records."""
    found = set()
    for arm in arms:
        records = [record for record in arm.first.metrics if "memory.length" in record]
        for before, after in pairwise(records):
            if keys_at(after) > keys_at(before):
                found.add((before["tokens"] + after["tokens"]) / 2)
    return sorted(found)
