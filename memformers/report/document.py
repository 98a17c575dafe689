"""Writes the report of runs: ``report.md`` with figures, one ``report.html`` that holds everything, and the
results as ``results.csv`` and ``results.json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.common.files import csv_text, write_json, write_text
from memformers.report.arms import BITS, Arm, Column, arms_of, arms_table, base_of
from memformers.report.curves import curve_figures, position_figure
from memformers.report.markdown import DASH, fenced, number, plain, prose
from memformers.report.page import write_page
from memformers.report.probe import probe_section
from memformers.report.provenance import how_it_was_made
from memformers.report.recall import write_recall_report
from memformers.report.sections import bars, claims, costs_table, not_comparable, results_table, warnings
from memformers.runs.folder import PROBE, RESULTS, TABLE
from memformers.runs.plan import read_plan
from memformers.runs.reader import read_probe, read_runs

MOST_PERPLEXITY = 10_000
"""The perplexity per word from which it says nothing to a reader."""
WHOLE = "the whole held-out text"


def write_report(folder: Path) -> Path:
    """Write the report of a run's or an experiment's ``folder`` into it; returns ``report.html``.

    Raises ValueError for a folder without a run.
    """
    if (plan := read_plan(folder)) and plan.task == "recall":
        return write_recall_report(folder)
    arms = arms_of(runs := read_runs(folder))
    base = base_of(arms)
    probe = read_probe(folder)
    parts = [f"# {title_of(arms, runs[0].facts['corpus'])}"]
    if probe is None and (folder / PROBE).exists():
        parts.append(f"> {prose('probe_left_out')}")
    parts += warnings(arms, base, folder)
    if len({(run.facts["corpus"]["sha256"], run.config["tokens"]) for run in runs}) == 1:
        parts += claims(arms, base, [BITS], folder)
    parts += [results_table(arms, base, [BITS]), *figures(arms, base, folder)]
    parts += ["### Other units, and accuracy", units_table(arms)]
    parts += ["## What each arm costs", costs_table(arms, base), *samples(arms)]
    parts += probe_section(arms, probe, folder) if probe else []
    method = prose("method", read=what_the_table_is_over(arms))
    write_results(arms, base, folder)
    return write_page([*parts, *how_it_was_made(arms, base, folder, method)], folder, bars(arms, BITS))


def title_of(arms: Sequence[Arm], corpus: dict[str, Any]) -> str:
    """The headline, in a few words."""
    name = plain(corpus["name"].partition(" (seed")[0])
    return f"{'Memory compared' if len(arms) > 1 else plain(arms[0].label)} on {name}"


def units_table(arms: Sequence[Arm]) -> str:
    """What the losses of the results are in other units, and the accuracy, a row for each arm."""

    def perplexity(arm: Arm, name: str) -> str:
        mean = arm.mean(lambda result: result.get(name))
        return number(mean, ",.1f") if mean and mean.mean < MOST_PERPLEXITY else DASH

    columns: dict[str, Column] = {
        "nats per token": lambda arm: number(arm.mean("loss"), ".3f"),
        "bits per byte": lambda arm: number(arm.mean(lambda result: result.get("bits_per_byte")), ".3f"),
        "perplexity": lambda arm: perplexity(arm, "perplexity"),
        "perplexity per word": lambda arm: perplexity(arm, "word_perplexity"),
        "accuracy": lambda arm: number(arm.mean("accuracy"), ".1f", " %", scale=100),
    }
    for name, key in (("perplexity", "perplexity"), ("perplexity per word", "word_perplexity")):
        if not any(result.get(key) for arm in arms for result in arm.results.values()):
            del columns[name]  # of words, and of subwords
    return arms_table(arms, columns)


IN_TABLE = ("loss", "bits_per_character", "bits_per_byte", "perplexity", "word_perplexity", "accuracy",
            "seconds", "evaluation_seconds", "peak_memory_bytes")  # fmt: skip
"""The numbers of a result in the table of each training run; the loss is in nats per token."""


def write_results(arms: Sequence[Arm], base: Arm, folder: Path) -> None:
    """Write the results of each finished run as ``results.csv``, and each arm's means over seeds and its
    difference to ``base`` as ``results.json``."""
    rows = [
        [arm.name, seed, *(result.get(name) for name in IN_TABLE)]
        for arm in arms
        for seed, result in arm.results.items()
    ]
    write_text(folder / TABLE, csv_text(["arm", "seed", *IN_TABLE], rows))
    found = [
        {
            "name": arm.name,
            "label": arm.label,
            "seeds": list(arm.results),
            **{name: arm.mean(lambda result, n=name: result.get(n)) for name in IN_TABLE},  # type: ignore[misc]
            f"{BITS.of}_minus_base": arm.minus(base, BITS.of) if arm is not base else None,
        }
        for arm in arms
    ]
    write_json(folder / RESULTS, {"base": base.name, "arms": found})


def figures(arms: Sequence[Arm], base: Arm, folder: Path) -> list[str]:
    """The figures with their captions."""
    counts = sorted({len(arm.counted) for arm in arms})
    bands = prose("bands", seeds=" or ".join(map(str, counts))) if counts[-1] > 1 else ""
    timed = len(arms) == 1 or not not_comparable(arms)
    curves = curve_figures(arms, base, folder, bands, what_curves_are_over(arms), timed=timed)
    return [*curves, *position_figure(arms, base, folder, bands)]


def what_the_table_is_over(arms: Sequence[Arm]) -> str:
    """How much of the held-out text the last evaluations read."""
    results = [result for arm in arms for result in arm.results.values()]
    read = sorted({(result["evaluated_tokens"], result.get("held_out_tokens", 0)) for result in results})
    parts = [f"{n:,} of {whole:,} tokens" for n, whole in read if n < whole]
    return f"{' or '.join(parts)} of the held-out text" if parts else WHOLE


def what_curves_are_over(arms: Sequence[Arm]) -> str:
    """How much of the held-out text the evaluations of the validation curves read: as much as the last one,
    unless a record has another number of tokens than the result."""
    parts = {}
    for arm in arms:
        read = {int(n) for run in arm.counted for n in run.metrics.points("evaluated_tokens")[2].tolist()}
        whole = (arm.first.result or {}).get("evaluated_tokens")
        told = [f"{n:,} tokens" for n in sorted(read - {whole})]
        parts[plain(arm.label)] = " or ".join(told + ["all"] * (whole in read or not read))
    table_over = what_the_table_is_over(arms)
    if set(parts.values()) == {"all"}:
        return table_over
    table = "all of it" if table_over == WHOLE else table_over
    if len(set(parts.values())) == 1:
        return prose("read_alike", part=next(iter(parts.values())), table=table)
    said = ", ".join(f"{name}: {part}" for name, part in parts.items())
    return prose("read_apart", parts=said, table=table)


def samples(arms: Sequence[Arm]) -> list[str]:
    """The text that each arm generated at the end, and its prompt."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample and arm.first.result}
    prompts = {label: (run.result or {})["prompt"] for label, run in runs.items()}
    if not runs:
        return []
    parts = ["## Samples", prose("samples")]
    if shared := len(set(prompts.values())) == 1:
        parts.append(f"All arms continue the same prompt:\n\n{fenced(next(iter(prompts.values())))}")
    for label, run in runs.items():
        parts.append(f"**{plain(label)}**")
        if not shared:
            parts.append(f"The prompt:\n\n{fenced(prompts[label])}\n\nThe text that the arm wrote:")
        parts.append(fenced(run.sample))
    return parts
