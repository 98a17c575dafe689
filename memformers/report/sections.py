"""What every report of arms says: warnings, what the seeds support, and what each arm costs."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from memformers.common.intervals import Mean, mean_of_known
from memformers.report.arms import ArmRuns, Column, Measure, arms_table
from memformers.report.markdown import TEMPLATES, fenced, number, prose
from memformers.report.plotting import line_styles
from memformers.runs.folder import CONFIG, FACTS, METRICS, flatten, read_plan
from memformers.runs.reader import Run, differing_settings

STEADY = 1.5
"""A run whose speed varied by more than this factor shared its machine with other work."""
FEWEST_SPEEDS = 3
"""The fewest records of a run's speed that show whether it varied."""
ROUNDING = 0.03
"""The change of final losses, in bits per character, that rounding alone has made: the same sums in another
order."""
MAY_DIFFER = {
    "seed", "data", "recall.frozen", "agent.core", "model.model", "model.mem_len", "model.divided_len",
    "model.c_mem_len", "model.compression_rate", "model.compression", "model.compression_start",
    "model.compression_loss", "model.bptt",
}  # fmt: skip
"""The settings that an experiment may vary: the memory and the seed, and the path of the text, which its
checksum identifies."""


def all_runs(arms: Sequence[ArmRuns]) -> list[Run]:
    """The runs of all ``arms``."""
    return [run for arm in arms for run in arm.runs]


def warnings(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, *, fewest_tokens: int = 0) -> list[str]:
    """What a reader must know before trusting the numbers; training runs of less than ``fewest_tokens`` are
    too short to compare models."""
    first = arms[0].runs[0]
    corpus, tokens = first.facts["corpus"], first.config["tokens"]
    found: list[str] = [prose("stand_in")] if corpus.get("stands_in_for_tiny_shakespeare") else []
    found += [prose("token_ids")] if corpus.get("tokenizer") == "ids" else []
    found += trial(folder)
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


def trial(folder: Path) -> list[str]:
    """The warning that the comparison in ``folder`` was begun with a share of the usual number of tokens."""
    plan = read_plan(folder)
    scale = re.search(r"--scale[ =]([\d.]+)", plan.commands[0]) if plan and plan.commands else None
    return [prose("trial", percent=f"{100 * float(scale[1]):.3g}")] if scale and float(scale[1]) < 1 else []


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


def unfair_settings(arms: Sequence[ArmRuns], base: ArmRuns) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds only if an arm has none in common with
    ``base``."""
    runs = all_runs(arms)
    every = differing_settings([dict(flatten(run.config)) for run in runs])
    found = [name for name in every if name not in MAY_DIFFER and not name.startswith("model.memory_config.")]
    found += ["text"] * (len({run.facts["corpus"].get("sha256") for run in runs}) > 1)
    seeds = {run.seed for run in base.runs}
    return found + ["seed"] * any(seeds.isdisjoint(run.seed for run in arm.runs) for arm in arms)


def claims(arms: Sequence[ArmRuns], base: ArmRuns, measures: Sequence[Measure], folder: Path) -> list[str]:
    """What the seeds support about each arm against ``base``, as paragraphs: a difference only if its
    interval does not contain zero. For one seed, how to train more in the experiment's ``folder``."""
    others = [arm for arm in arms if arm is not base]
    if not others:
        return []
    if not base.results:
        return [prose("no_base", base=base.label)]
    found = [[(arm, arm.minus(base, m.of)) for arm in others] for m in measures]
    n = max((d.n for pairs in found for _, d in pairs if d), default=0)
    if n < 2:
        return of_one_seed(arms, measures[0], folder)
    parts = []
    for measure, pairs in zip(measures, found, strict=True):
        about = {"base": base.label, "measure": measure, "level": base.mean(measure.of)}
        said = [prose("claim", label=arm.label, difference=d, **about) for arm, d in pairs]
        parts += [f"By {measure.label}:"] * (len(measures) > 1)
        parts.append("\n".join(f"- {claim}" for claim in said))
    about = {"base": base.label, "measures": [m.label for m in measures], "n": n, "rounding": ROUNDING}
    about |= {"own_streams": "recall" in base.first.config, "many": len(others) * len(measures) > 2}
    return [*parts, prose("how_compared", **about)]


def of_one_seed(arms: Sequence[ArmRuns], measure: Measure, folder: Path) -> list[str]:
    """That nothing is claimed, and how the command that began the experiment in ``folder`` adds seeds, unless
    it was a trial or no command began it."""
    means = {arm.label: mean.mean for arm in arms if (mean := arm.mean(measure.of))}
    best = sorted(means, key=lambda label: -measure.better * means[label])[:2]
    gap = abs(means[best[0]] - means[best[-1]]) if best else 0.0
    said: list[str] = [prose("one_seed", best=best, gap=gap, measure=measure, rounding=ROUNDING)]
    plan = read_plan(arms[0].first.folder.parent)
    words = shlex.split(plan.commands[0]) if plan and plan.commands else []
    if "--quick" in words or not re.search(r"\b(memformers|experiments)\b", " ".join(words[:3])):
        return said
    kept = re.sub(r" --(resume|(seeds|out)[ =]('[^']*'|\S+))(?!\S)", "", shlex.join(words))
    where = folder.name if folder.is_absolute() else str(folder)
    return [*said, prose("more_seeds"), fenced(f"{kept} --seeds 5 --resume --out {shlex.quote(where)}")]


def results_table(
    arms: Sequence[ArmRuns],
    base: ArmRuns,
    measures: Sequence[Measure],
    more: Mapping[str, Column] | None = None,
) -> str:
    """A row for each arm: how many of its seeds have finished, by each measure its mean, and if there are
    several seeds its paired difference to ``base``; then the columns ``more``."""
    columns: dict[str, Column] = {"seeds": lambda arm: f"{len(arm.results)}"}
    for measure in measures:
        head = measure.head or measure.label
        columns[head] = lambda arm, m=measure: m.shown(arm.mean(m.of))  # type: ignore[misc]
        differences = {arm.name: arm.minus(base, measure.of) for arm in arms if arm is not base}
        if any(d and d.n > 1 for d in differences.values()):
            against = f"{head}, minus {base.label}" if len(measures) > 1 else f"minus {base.label}"
            columns[against] = lambda arm, m=measure, of=differences: m.cell(of.get(arm.name))  # type: ignore[misc]
    return arms_table(arms, columns | dict(more or {}))


def bars(arms: Sequence[ArmRuns], measure: Measure) -> str:
    """What each arm came to, as bars of a page; empty if none has finished."""
    found = [(arm, mean) for arm in arms if (mean := arm.mean(measure.of))]
    most, lines = max((mean.mean for _, mean in found), default=0.0), line_styles([arm.name for arm in arms])
    rows = [(arm.label, lines[arm.name]["color"], mean.mean / most, mean) for arm, mean in found if most > 0]
    return TEMPLATES.get_template("bars.html").render(rows=rows, measure=measure) if rows else ""


def costs_table(arms: Sequence[ArmRuns], base: ArmRuns, more: Mapping[str, Column] | None = None) -> str:
    """The costs and the reach of each arm, a row for each, and the columns ``more``; below the table, why
    there are no ratios of time, if there are none."""
    why_not = not_comparable(arms)
    is_timed, ratios = not why_not, {arm.name: time_ratio(arm, base) for arm in arms if arm is not base}
    if is_timed and not any(ratio and ratio.n > 1 for ratio in ratios.values()):
        why_not = prose("needs_seeds")
    columns: dict[str, Column] = {
        "keys per layer, without the segment's": lambda arm: number(arm.first.facts["keys"], ",.10g"),
        "memory reach, one layer / all layers (positions)": lambda arm: (
            f"{arm.first.facts['memory']['one_layer']:,} / {arm.first.facts['memory']['all_layers']:,}"
        ),
        "state per stream": lambda arm: number(
            arm.first.facts.get("state_bytes"), ",.0f", " KiB", scale=1 / 1024
        ),
        "attention operations per token": lambda arm: f"{arm.first.facts['attention_operations']:,}",
        "parameters": lambda arm: f"{arm.first.facts['parameters']:,}",
        "tokens/s (median)": median_speed,
        "training time": lambda arm: number(arm.mean("seconds"), ",.0f", " s"),
    }
    if not why_not:
        columns[f"training time divided by that of {base.label}"] = lambda arm: number(
            ratios.get(arm.name), ".2f"
        )
    columns |= {
        "evaluation time": lambda arm: number(arm.mean("evaluation_seconds"), ",.0f", " s"),
        "peak memory": lambda arm: number(
            max((r["peak_memory_bytes"] or 0 for r in arm.results.values()), default=0) / 2**20 or None,
            ",.0f",
            " MiB",
        ),
        **(more or {}),
    }
    parts = [arms_table(arms, columns)]
    if why_not and len(arms) > 1:
        parts.append(prose("no_ratios", curves=not is_timed, why=why_not))
    elif not on_one_machine(all_runs(arms)):
        parts.append(prose("not_alike"))
    return "\n\n".join(parts)


def median_speed(arm: ArmRuns) -> str:
    """The median of an arm's records of its speed."""
    speeds = [v for run in arm.counted for v in run.metrics.points("tokens_per_second")[2].tolist()]
    return number(median(speeds) if speeds else None, ",.0f")


def time_ratio(arm: ArmRuns, base: ArmRuns) -> Mean | None:
    """The training time of ``arm`` divided by that of ``base`` from the same seed."""
    ours, theirs = arm.values("seconds"), base.values("seconds")
    return mean_of_known(ours[seed] / theirs[seed] for seed in ours if seed in theirs)


def not_comparable(arms: Sequence[ArmRuns]) -> str:
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


def stages_of(arms: Sequence[ArmRuns]) -> list[float]:
    """The tokens at which the memory of any arm became longer during its training, as the middle between two
    training records."""
    found = set()
    for run in (arm.first for arm in arms):
        is_said = ~np.isnan(run.metrics.column("memory.length"))
        tokens, keys = run.metrics.column("tokens")[is_said], keys_in_records(run)[is_said]
        pairs = pairwise(zip(tokens.tolist(), keys.tolist(), strict=True))
        found |= {(at + later) / 2 for (at, before), (later, after) in pairs if after > before}
    return sorted(found)
