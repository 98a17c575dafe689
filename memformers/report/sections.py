"""What every report of arms says: warnings, what the seeds support, and what each arm costs."""

import html
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from memformers.common.intervals import Mean, mean_of
from memformers.report.arms import Arm, Column, Measure, arms_table
from memformers.report.markdown import DASH, fenced, number, prose
from memformers.report.plotting import looks_of
from memformers.runs.folder import CONFIG, FACTS, METRICS, flatten
from memformers.runs.plan import read_plan
from memformers.runs.reader import Run, differing_settings

STEADY = 1.5
"""A run whose speed varied by more than this factor shared its machine with other work."""
FEWEST_SPEEDS = 3
"""The fewest records of a run's speed that show whether it varied."""
ROUNDING = 0.03
"""The change of final losses, in bits per character, that rounding alone has made: the same sums in another
order."""
MAY_DIFFER = {
    "seed", "data", "recall.frozen", "agent.core", "model.model", "model.mem_len", "model.c_mem_len",
    "model.compression_rate", "model.compression", "model.compression_start", "model.compression_loss",
    "model.bptt",
}  # fmt: skip
"""The settings that an experiment may vary: the memory and the seed, and the path of the text, which its
checksum identifies."""


def all_runs(arms: Sequence[Arm]) -> list[Run]:
    """The runs of all ``arms``."""
    return [run for arm in arms for run in arm.runs]


def warnings(arms: Sequence[Arm], base: Arm, folder: Path, *, fewest_tokens: int = 0) -> list[str]:
    """What a reader must know before trusting the numbers; training runs of less than ``fewest_tokens`` are
    too short to compare models."""
    found = []
    runs = all_runs(arms)
    corpus, tokens = runs[0].facts["corpus"], runs[0].config["tokens"]
    if corpus.get("stands_in_for_tiny_shakespeare"):
        found.append(prose("stand_in"))
    if corpus.get("tokenizer") == "ids":
        found.append(prose("token_ids"))
    if (scale := scale_of(folder)) < 1:
        found.append(prose("trial", percent=f"{100 * scale:.3g}"))
    if tokens < fewest_tokens:
        found.append(prose("too_few_tokens", corpus=corpus["name"], tokens=f"{tokens:,}"))
    for arm in arms:
        for run in arm.runs:
            if run.result is None:
                seed = run.seed if len(arm.runs) > 1 else None
                found.append(prose("not_finished", label=arm.label, seed=seed, has_others=bool(arm.results)))
    found += [prose("missing", names=names, why=why) for why, names in missing(folder).items()]
    if others := unfair_settings(arms, base):
        found.append(prose("differing", names=others))
    return [f"> {warning}" for warning in found]


def scale_of(folder: Path) -> float:
    """The share of the usual number of tokens with which the comparison in ``folder`` was begun."""
    plan = read_plan(folder)
    found = re.search(r"--scale[ =]([\d.]+)", plan.commands[0]) if plan and plan.commands else None
    return float(found[1]) if found else 1.0


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


def unfair_settings(arms: Sequence[Arm], base: Arm) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds only if an arm has none in common with
    ``base``."""
    runs = all_runs(arms)
    every = differing_settings([dict(flatten(run.config)) for run in runs])
    found = [name for name in every if name not in MAY_DIFFER and not name.startswith("model.own.")]
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
    return [prose("more_seeds"), fenced(f"{kept} --seeds 5 --resume --out {shlex.quote(where)}")]


def claims(arms: Sequence[Arm], base: Arm, measures: Sequence[Measure], folder: Path) -> list[str]:
    """What the seeds support about each arm against ``base``, as paragraphs: a difference only if its
    interval does not contain zero. For one seed, how to train more in the experiment's ``folder``."""
    others = [arm for arm in arms if arm is not base]
    if not others:
        return []
    if not base.results:
        return [prose("no_base", base=base.label)]
    found = [{arm.label: arm.minus(base, m.of) for arm in others} for m in measures]
    n = max((d.n for by_label in found for d in by_label.values() if d), default=0)
    if n < 2:
        return [_of_one_seed(arms, measures[0]), *with_more_seeds(arms, folder)]
    parts = []
    for measure, by_label in zip(measures, found, strict=True):
        parts += [f"By {measure.label}:"] * (len(measures) > 1)
        parts.append("\n".join(f"- {claim(label, d, base, measure)}" for label, d in by_label.items()))
    labels, streams = [measure.label for measure in measures], "recall" in base.first.config
    many = len(others) * len(measures) > 2
    about = {"base": base.label, "measures": labels, "n": n, "rounding": ROUNDING}
    return [*parts, prose("how_compared", **about, own_streams=streams, many=many)]


def _of_one_seed(arms: Sequence[Arm], measure: Measure) -> str:
    means = {arm.label: mean.mean for arm in arms if (mean := arm.mean(measure.of))}
    best, second = [*sorted(means, key=lambda label: -measure.better * means[label]), "", ""][:2]
    gap = measure.shown_difference(abs(means[best] - means[second]), signed=False) if second else ""
    gap += "" if measure.unit_of_differences else f" {measure.label}"
    return prose("one_seed", best=second and best, gap=gap, second=second, rounding=ROUNDING)


def claim(label: str, difference: Mean | None, base: Arm, measure: Measure) -> str:
    """What can be claimed about one arm's ``difference`` to ``base``."""
    if difference is None or math.isnan(difference.half_width):
        return prose("too_few_seeds", label=label, base=base.label)
    size = Mean(abs(difference.mean), difference.half_width, difference.n)
    about = {"label": label, "n": difference.n}
    if difference.leaves_out_zero:
        level = base.mean(measure.of)
        assert level is not None  # there is a difference
        relative = "" if measure.unit_of_differences else f"{size.mean / level.mean:.1%}"
        kind = "better" if difference.mean * measure.better > 0 else "worse"
        shown = measure.shown_difference(size, signed=False)
        return prose("better", **about, kind=kind, size=shown, relative=relative)
    most = measure.shown_difference(size.mean + size.half_width, signed=False)
    side, shown = "below" if measure.better < 0 else "above", measure.shown_difference(difference)
    return prose("no_difference", **about, difference=shown, side=side, most=most)


def results_table(
    arms: Sequence[Arm], base: Arm, measures: Sequence[Measure], more: Mapping[str, Column] | None = None
) -> str:
    """A row for each arm: how many of its seeds have finished, by each measure its mean, and if there are
    several seeds its paired difference to ``base``; then the columns ``more``."""
    columns: dict[str, Column] = {"seeds": lambda arm: f"{len(arm.results)}"}
    for measure in measures:
        head = measure.head or measure.label
        columns[head] = lambda arm, m=measure: m.shown(arm.mean(m.of))  # type: ignore[misc]
        differences = {arm.name: arm.minus(base, measure.of) for arm in arms if arm is not base}
        if any(d and d.n > 1 for d in differences.values()):
            columns[f"{head}, minus {base.label}" if len(measures) > 1 else f"minus {base.label}"] = (
                lambda arm, m=measure, of=differences: m.cell(of.get(arm.name))  # type: ignore[misc]
            )
    return arms_table(arms, columns | dict(more or {}))


def bars(arms: Sequence[Arm], measure: Measure) -> str:
    """What each arm came to, as bars of a page; empty if none has finished."""
    means = {arm.name: mean for arm in arms if (mean := arm.mean(measure.of))}
    most, looks = max((mean.mean for mean in means.values()), default=0.0), looks_of([a.name for a in arms])
    rows = [
        f'<li><span>{html.escape(arm.label)}</span><i style="--share: {means[arm.name].mean / most:.3f}; '
        f'background: var(--c{looks[arm.name]["color"][1:].lower()}, {looks[arm.name]["color"]})"></i>'
        f"<b>{html.escape(measure.shown(means[arm.name]))}</b></li>"
        for arm in arms
        if arm.name in means and most > 0
    ]
    title = f"<p>{html.escape(measure.label)}, {'less' if measure.better < 0 else 'more'} is better</p>"
    return f'<section class="bars">{title}<ul>{"".join(rows)}</ul></section>' if rows else ""


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
        "peak memory": lambda arm: number(
            max((r["peak_memory_bytes"] or 0 for r in arm.results.values()), default=0) / 2**20 or None,
            ",.0f",
            " MiB",
        ),
        **(more or {}),
    }
    note = ""
    if why_not and len(arms) > 1:
        note = "\n\n" + prose("no_ratios", curves=bool(not_comparable(arms)), why=why_not)
    elif not on_one_machine(all_runs(arms)):
        note = "\n\n" + prose("not_alike")
    return arms_table(arms, columns) + note


def median_speed(arm: Arm) -> str:
    """The median of an arm's records of its speed."""
    speeds = [v for run in arm.counted for v in run.metrics.points("tokens_per_second")[2].tolist()]
    return number(median(speeds) if speeds else None, ",.0f")


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
    return "" if any(ratio and ratio.n > 1 for ratio in ratios) else prose("needs_seeds")


def not_comparable(arms: Sequence[Arm]) -> str:
    """Why training times can't be compared, in words; empty if they can."""
    runs = all_runs(arms)
    if not on_one_machine(runs):
        return prose("other_machine")
    for run in runs:
        if len(speeds := steady_speeds(run)) < FEWEST_SPEEDS:
            return prose("too_short", run=run.folder.name)
        if (factor := max(speeds) / max(min(speeds), 1e-9)) > STEADY:
            return prose("unsteady", run=run.folder.name, factor=f"{factor:.1f}")
    return ""


def on_one_machine(runs: Sequence[Run]) -> bool:
    """Whether all runs, from beginning to end, had the same hardware and versions."""
    environments = [e for run in runs for e in run.facts.get("environments", [run.facts["environment"]])]
    return len({json.dumps(environment, sort_keys=True) for environment in environments}) == 1


def steady_speeds(run: Run) -> list[float]:
    """The tokens/s of a run's records since its memory had its final length, since a longer one takes more
    time; except the first of them, in which it warms up."""
    speeds, keys = run.metrics.column("tokens_per_second"), keys_in_records(run)
    is_said = ~np.isnan(speeds)
    return speeds[is_said & (keys == keys[is_said][-1])][1:].tolist() if is_said.any() else []


def keys_in_records(run: Run) -> NDArray[np.float64]:
    """The number of keys per layer in memory at each record; 0 where a record doesn't say it."""
    lengths = (run.metrics.column(f"memory.{name}") for name in ("length", "compressed_length"))
    return sum((np.nan_to_num(length) for length in lengths), start=np.zeros(run.metrics.rows))


def stages_of(arms: Sequence[Arm]) -> list[float]:
    """The tokens at which the memory of any arm became longer during its training, as the middle between two
    training records."""
    found = set()
    for arm in arms:
        run = arm.first
        is_said = ~np.isnan(run.metrics.column("memory.length"))
        tokens, keys = run.metrics.column("tokens")[is_said], keys_in_records(run)[is_said]
        for before, after in pairwise(zip(tokens.tolist(), keys.tolist(), strict=True)):
            if after[1] > before[1]:
                found.add((before[0] + after[0]) / 2)
    return sorted(found)
