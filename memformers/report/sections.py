"""What every report of arms says: warnings, what the seeds support, what each arm costs, what its memory is
for, and how it was made."""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from memformers.common.command_line import OF_A_FOLDER, without_options
from memformers.common.files import csv_text, write_json, write_text
from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean
from memformers.report.arms import BITS, ArmRuns, Column, Measure, arms_table
from memformers.report.keys import keys_text, unequal_keys
from memformers.report.markdown import DASH, TEMPLATES, Table, bullets, fenced, number, prose, table
from memformers.report.plotting import CONTROL_LINES, bits, line_styles
from memformers.runs.card import known_card
from memformers.runs.folder import CONFIG, FACTS, METRICS, RESULTS, TABLE, flatten
from memformers.runs.plan import read_plan
from memformers.runs.reader import Run, differing_settings, finite_number

MEMORY_SETTINGS = {
    "seed", "data", "recall.frozen", "agent.core", "model.model", "model.mem_len", "model.c_mem_len",
    "model.compression_rate", "model.compression", "model.compression_start", "model.compression_loss",
    "model.bptt",
}  # fmt: skip
"""The settings that an experiment may vary: the memory and the seed, and the path of the text, which its
checksum identifies."""
TRIAL_OPTIONS = {"text": ("--scale",), "recall": ("--quick", "--tokens")}
"""The options that make an experiment on each task a trial."""
HELD_OUT_TEXT = "the whole held-out text"


def all_runs(arms: Sequence[ArmRuns]) -> list[Run]:
    return [run for arm in arms for run in arm.runs]


def warnings(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path) -> list[str]:
    """What a reader must know before trusting the numbers."""
    corpus = arms[0].runs[0].facts["corpus"]
    notes: list[str] = [prose("stand_in")] if corpus.get("stands_in_for_tiny_shakespeare") else []
    notes += [prose("token_ids")] if corpus.get("tokenizer") == "ids" else []
    notes += [prose("loses_text")] if any(r.facts["corpus"].get("loses_text") for r in all_runs(arms)) else []
    notes += trial(folder)
    for arm in arms:
        for run in arm.runs:
            if run.result is None:
                seed = run.seed if len(arm.runs) > 1 else None
                notes.append(prose("not_finished", label=arm.label, seed=seed, has_others=bool(arm.results)))
    notes += [prose("missing", names=names, why=why) for why, names in missing(folder).items()]
    if others := unfair_settings(arms, base):
        notes.append(prose("differing", names=others))
    return [*notes, *unequal_keys({arm.label: arm.first.facts for arm in arms})]


def trial(folder: Path) -> list[str]:
    """The warning that the experiment in ``folder`` is a trial with a part of the usual number of tokens."""
    scale = plan.scale if (plan := read_plan(folder)) else 1.0
    return [prose("trial", percent=f"{100 * scale:.2g}")] if scale < 1 else []


def missing(folder: Path) -> dict[str, list[str]]:
    """The names of planned runs without results, by the reason."""
    planned = plan.runs if (plan := read_plan(folder)) else {}
    names = dict.fromkeys([*planned, *(path.parent.name for path in folder.glob(f"*/{CONFIG}"))])
    why = {METRICS: f"{FACTS} is lost", CONFIG: "no step was made", "": "not started"}
    by_reason: dict[str, list[str]] = {}
    for run in (folder / name for name in names):
        if not (run / FACTS).exists():
            reason = next(w for file, w in why.items() if not file or (run / file).exists())
            by_reason.setdefault(reason, []).append(run.name)
    return by_reason


def unfair_settings(arms: Sequence[ArmRuns], base: ArmRuns) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds if an arm shares none with ``base``."""
    runs = all_runs(arms)
    names = differing_settings([dict(flatten(run.config)) for run in runs])
    unfair = [name for name in names if name not in MEMORY_SETTINGS and ".memory_config." not in name]
    unfair += ["text"] * (len({run.facts["corpus"].get("sha256") for run in runs}) > 1)
    seeds = {run.seed for run in base.runs}
    return unfair + ["seed"] * any(seeds.isdisjoint(run.seed for run in arm.runs) for arm in arms)


def claims(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure, folder: Path) -> list[str]:
    """What the seeds support about each arm against ``base``; of fewer than three, how to train more."""
    others = [arm for arm in arms if arm is not base]
    if not others:
        return []
    if not base.results:
        return [prose("no_base", base=base.label)]
    differences = [(arm, arm.minus(base, measure.of)) for arm in others]
    n = max((difference.n for _, difference in differences if difference), default=0)
    if n < MIN_FOR_A_CLAIM:
        return few_seeds(arms, n, measure, folder)
    about = {"base": base.label, "measure": measure, "least": MIN_FOR_A_CLAIM, "level": base.mean(measure.of)}
    claimed = [prose("claim", label=arm.label, difference=mean, **about) for arm, mean in differences]
    about |= {"n": n, "many": len(others) > 2}
    return [bullets(claimed), prose("how_compared", own_streams="recall" in base.first.config, **about)]


def few_seeds(arms: Sequence[ArmRuns], n: int, measure: Measure, folder: Path) -> list[str]:
    """That nothing is claimed from ``n`` common seeds, and the command for more, or for more than a trial."""
    means = {arm.label: mean.mean for arm in arms if (mean := arm.mean(measure.of))}
    best = sorted(means, key=lambda label: -measure.better * means[label])[:2]
    gap = abs(means[best[0]] - means[best[-1]]) if best else 0.0
    parts: list[str] = [prose("few_seeds", n=n, best=best, gap=gap, measure=measure)]
    plan = read_plan(folder)
    words = shlex.split(plan.commands[0]) if plan and plan.commands else []
    module = words[2] if words[:2] == ["python", "-m"] else "".join(words[:1])
    if plan is None or module.partition(".")[0] not in ("memformers", "experiments"):
        return parts
    if plan.scale < 1:
        trial_options = TRIAL_OPTIONS.get(plan.task, ())
        command = without_options(words, (*OF_A_FOLDER, *trial_options))
        command += ["--out", f"{folder}-whole"]
    else:
        command = without_options(words, (*OF_A_FOLDER, "--seeds"))
        command += ["--seeds", "5", "--resume", "--out", f"{folder}"]
    return [*parts, prose("more_training", is_trial=plan.scale < 1), fenced(shlex.join(command))]


def results_table(
    arms: Sequence[ArmRuns],
    base: ArmRuns,
    measures: Sequence[Measure],
    more: Mapping[str, Column] | None = None,
) -> Table:
    """Finished seeds, the mean of each measure, of several seeds the paired difference to ``base``."""
    columns: dict[str, Column] = {"seeds": lambda arm: f"{len(arm.results)}"}
    for measure in measures:
        head = measure.label
        columns[head] = lambda arm, m=measure: m.shown(arm.mean(m.of))  # type: ignore[misc]
        differences = {arm.name: arm.minus(base, measure.of) for arm in arms if arm is not base}
        if any(d and d.n > 1 for d in differences.values()):
            against = f"{head}, minus {base.label}" if len(measures) > 1 else f"minus {base.label}"
            columns[against] = lambda arm, m=measure, of=differences: m.cell(of.get(arm.name))  # type: ignore[misc]
    return arms_table(arms, columns | dict(more or {}))


def tokens_of_results(arms: Sequence[ArmRuns]) -> str:
    """Which part of the held-out text the losses in ``result.json`` are over."""
    parts: set[tuple[int, int]] = set()
    for arm in arms:
        for result in arm.results.values():
            n_read = int(finite_number(result.get("evaluated_tokens")) or 0)
            n_tokens = int(finite_number(result.get("held_out_tokens")) or 0)
            if n_read < n_tokens:
                parts.add((n_read, n_tokens))
    if not parts:
        return HELD_OUT_TEXT
    shown = [f"{n_read:,} of {n_tokens:,} tokens" for n_read, n_tokens in sorted(parts)]
    return f"{' or '.join(shown)} of the held-out text"


def tokens_of_curves(arms: Sequence[ArmRuns]) -> list[int]:
    """How many tokens the evaluations during the training read, if the results are over others: a number
    for each kind of evaluation."""
    runs = [run for arm in arms for run in arm.counted]
    read_in_training: set[int] = set()
    for run in runs:
        read_in_training.update(map(int, run.metrics.points("evaluated_tokens")[2].tolist()))
    read_for_results = {finite_number((run.result or {}).get("evaluated_tokens")) for run in runs}
    return sorted(read_in_training) if read_in_training - read_for_results else []


def tokens_of_losses(arms: Sequence[ArmRuns], probe: Mapping[str, Any] | None = None) -> list[str]:
    """Why one model has several losses, a paragraph; none if all are over the same tokens."""
    curves = " or ".join(f"{n:,}" for n in tokens_of_curves(arms))
    ablation = (probe or {}).get("memory_ablation")
    n_probed = ablation["tokens"] if ablation else 0
    if not curves and not n_probed:
        return []
    results = tokens_of_results(arms)
    return [prose("tokens_of_losses", results=results, curves=curves, probe=n_probed)]


def bars(arms: Sequence[ArmRuns], measure: Measure) -> str:
    """The means of arms as bars of a page; empty for fewer than two."""
    means = [(arm, mean) for arm in arms if (mean := arm.mean(measure.of))]
    most, lines = max((mean.mean for _, mean in means), default=0.0), line_styles([arm.name for arm in arms])
    if len(means) < 2 or most <= 0:
        return ""
    rows = [(arm.label, lines[arm.name]["color"], mean.mean / most, mean) for arm, mean in means]
    return TEMPLATES.get_template("bars.html").render(rows=rows, measure=measure)


def costs_table(arms: Sequence[ArmRuns]) -> Table:
    def fact(name: str, form: str, unit: str = "", scale: float = 1.0) -> Column:
        return lambda arm: number(arm.first.facts.get(name), form, unit, scale=scale)

    def reach(layers: str) -> Column:
        return lambda arm: number(arm.first.facts["memory"][layers], ",.0f")

    def speed(arm: ArmRuns) -> str:
        speeds = [v for run in arm.counted for v in run.metrics.points("tokens_per_second")[2].tolist()]
        return number(median(speeds) if speeds else None, ",.0f")

    def peak_memory(arm: ArmRuns) -> str:
        peaks = arm.values("peak_memory_bytes").values()
        return number(max(peaks, default=None), ",.0f", " MiB", scale=2**-20)

    columns: dict[str, Column] = {
        "keys a layer": lambda arm: keys_text(arm.first.facts),
        "reach of a layer": reach("one_layer"),
        "reach of all": reach("all_layers"),
        "state per stream": fact("state_bytes", ",.0f", " KiB", scale=1 / 1024),
        "operations a token": fact("attention_operations", ",.0f"),
        "parameters": fact("parameters", ",.0f"),
        "tokens/s": speed,
        "training": lambda arm: number(arm.mean("seconds"), ",.0f", " s"),
        "evaluation": lambda arm: number(arm.mean("evaluation_seconds"), ",.0f", " s"),
        "peak memory": peak_memory,
    }
    return arms_table(arms, columns)


def probe_parts(arms: Sequence[ArmRuns], probe: Mapping[str, Any]) -> list[str]:
    """How a ``probe`` was measured, a table, and what it says about each part of each memory."""
    of_runs = {run.folder.name: arm for arm in arms for run in arm.runs}
    probed, ablation = {name: of_runs[name] for name in probe["checkpoints"]}, probe["memory_ablation"]
    left_out = [arm.label for arm in arms if arm not in probed.values()]
    parts: list[str] = [prose("not_probed", labels=left_out)] if left_out else []
    if not ablation:
        return [*parts, prose("no_ablation")]
    # How many bits per character a nat per token is. Without a result, a character counts as a token.
    scales = [bits(result) for arm in arms for result in arm.results.values()] or [1 / math.log(2)]
    nat = scales[0]
    measure = replace(BITS, label="nats per token") if nat is None else replace(BITS, scale=nat)
    rows, findings = [], []
    for run, arm in probed.items():
        costs = {name: Mean.from_json(mean) for name, mean in ablation["costs"][run].items()}
        cells = [measure.cell(costs.get(control)) for control in CONTROL_LINES]
        rows.append([arm.label, measure.shown(ablation["loss"][run]), *cells])
        for part in ("slots", "memory"):
            if f"{part} zeroed" in costs:
                means = {how: costs[f"{part} {how}"] for how in ("zeroed", "swapped")}
                show = measure.shown_difference
                findings.append(prose("finding", label=arm.label, part=part, show=show, **means))
    parts += [prose("ablation", unit=measure.label, of=ablation)]
    parts.append(table(["model", "loss", *CONTROL_LINES], rows, numbers=True))
    return [*parts, bullets(findings or [prose("no_memory")])]


def how_it_was_made(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, method: str) -> list[str]:
    """The last section of the report of ``folder``; ``method`` says how its task is measured."""
    alike = [prose("fairness")] if len(arms) > 1 and not unfair_settings(arms, base) else []
    level = base.first.facts["parameters"]
    more = {arm.label: n for arm in arms if (n := arm.first.facts["parameters"] - level)}
    sizes = [prose("unequal_size", more=more, base=base.label, level=level)] if more else []
    tables = [facts_table(arms, folder), "### Settings", *settings_tables(arms)]
    return ["## How it was made", " ".join([*alike, *sizes, method, prose("costs")]), *tables]


def write_results(
    folder: Path, arms: Sequence[ArmRuns], base: ArmRuns, numbers: Callable[[ArmRuns], dict[str, Any]],
    head: Sequence[str], lines: Sequence[Sequence[Any]], **about: Any,
) -> None:  # fmt: skip
    """``results.json`` has arms, and ``results.csv`` training runs."""
    names = [{"name": arm.name, "label": arm.label, "seeds": list(arm.results)} for arm in arms]
    of_arms = [name | numbers(arm) for name, arm in zip(names, arms, strict=True)]
    write_json(folder / RESULTS, {"base": base.name, **about, "arms": of_arms})
    write_text(folder / TABLE, csv_text(head, lines))


def facts_table(arms: Sequence[ArmRuns], folder: Path) -> str:
    facts = facts_of(arms, folder)
    command = fenced(facts.pop("command")) if "command" in facts else ""
    return "\n\n".join(filter(None, [command, table(["", "value"], [*map(list, facts.items())])]))


def facts_of(arms: Sequence[ArmRuns], folder: Path) -> dict[str, str]:
    """Name, date, commands, a line for each, commit, data and machine."""
    runs = all_runs(arms)
    corpus = runs[0].facts["corpus"]
    environments = [e for run in runs for e in run.facts.get("environments", [run.facts["environment"]])]
    plan = read_plan(folder)
    commands = plan.commands if plan and plan.commands else (run.facts.get("command") for run in runs)
    cards = [card for run in runs if (card := known_card(run.folder))]
    times = [min(card.started for card in cards), max(card.ended for card in cards)] if cards else []
    dates = [f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M} UTC" for t in times if t]

    def distinct(values: Iterable[str | None], between: str = "; ") -> str:
        return between.join(dict.fromkeys(value for value in values if value))

    rows = {
        "command": distinct(commands, "\n"),
        "name": folder.resolve().name,
        "trained": " to ".join(dates),
        "git commit": distinct(run.facts.get("commit") for run in runs),
        "corpus": f"{corpus['name']}: {shown_path(corpus['source'])}",
        "characters, sha256": f"{corpus['characters']:,}, {corpus['sha256']}" if "sha256" in corpus else "",
        "runs at the same time": distinct(f"{e['jobs']}" for e in environments if "jobs" in e),
        "device": distinct(f"{e['device']}, {e['threads']} threads" for e in environments),
        "system": distinct(f"{e['platform']}, Python {e['python']}" for e in environments),
        "packages": distinct(", ".join(f"{n} {v}" for n, v in e["packages"].items()) for e in environments),
    }
    return {name: value for name, value in rows.items() if value}


def settings_tables(arms: Sequence[ArmRuns]) -> list[str]:
    """The settings of ``arms``: those that differ, and those that all share and some arm uses."""
    of_arms = [shown_settings(arm) for arm in arms]
    differing = differing_settings(of_arms)
    shared = {name: value for name, value in of_arms[0].items() if name not in differing and value != DASH}
    rows = [[name, *(settings.get(name, DASH) for settings in of_arms)] for name in differing]
    head = ["setting", *(arm.label for arm in arms)]
    parts = [prose("settings_differ"), table(head, rows, numbers=True)] if rows else []
    title = "Settings of all models:" if len(arms) > 1 else "Settings:"
    return [*parts, title, table(["setting", "value"], [*shared.items()])]


def shown_settings(arm: ArmRuns) -> dict[str, str]:
    run, config = arm.first, dict(flatten(arm.first.config))
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    used = run.settings | {"seed": seeds, "data": config["data"] or run.facts["corpus"]["name"]}
    unused = run.facts.get("unused", ())
    return {name: DASH if name in unused else setting_text(value) for name, value in used.items()}


def setting_text(value: Any) -> str:
    """A setting's value; of an absolute path only the name."""
    if value is None:
        return "not given"
    if isinstance(value, str):
        return shown_path(value) or "none" if value == value.strip() else json.dumps(value)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def shown_path(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path
