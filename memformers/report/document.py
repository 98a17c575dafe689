"""Writes the report of runs: ``report.md`` with figures, one ``report.html`` that holds everything, and the
results as ``results.csv`` and ``results.json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.report.arms import BITS, ArmRuns, Column, Quantity, arms_of, arms_table, base_of
from memformers.report.markdown import (
    Part,
    Report,
    Table,
    fenced,
    in_terminal,
    number,
    plain,
    prose,
    write_page,
)
from memformers.report.plotting import comparison_figures
from memformers.report.recall import write_recall_report
from memformers.report.sections import (
    bars,
    claims,
    costs_table,
    how_it_was_made,
    probe_parts,
    results_table,
    warnings,
    write_results,
)
from memformers.runs.folder import PROBE, read_plan
from memformers.runs.reader import read_probe, read_runs

MAX_CLAIMS = 4
"""The most arms whose claims a terminal shows beside their table."""
WHOLE = "the whole held-out text"
IN_TABLE = ("loss", "bits_per_character", "bits_per_byte", "perplexity", "word_perplexity", "accuracy",
            "seconds", "evaluation_seconds", "peak_memory_bytes")  # fmt: skip
"""The numbers of a result in the table of each training run; the loss is in nats per token."""


def write_report(folder: Path) -> Report:
    """Write the report of a run's or an experiment's ``folder`` into it.

    Raises ValueError for a folder without a run.
    """
    if (plan := read_plan(folder)) and plan.task == "recall":
        return write_recall_report(folder)
    arms = arms_of(runs := read_runs(folder))
    base, probe = base_of(arms), read_probe(folder)
    corpus = runs[0].facts["corpus"]["name"].partition(" (seed")[0]
    title = f"{'Memory compared' if len(arms) > 1 else arms[0].label} on {corpus}"
    notes = [prose("probe_left_out")] if probe is None and (folder / PROBE).exists() else []
    notes += warnings(arms, base, folder)
    is_fair = len({(run.facts["corpus"]["sha256"], run.config["tokens"]) for run in runs}) == 1
    claimed = claims(arms, base, BITS, folder) if is_fair else []
    results, read = results_table(arms, base, [BITS]), what_the_table_is_over(arms)
    parts: list[Part] = [f"# {plain(title)}", *(f"> {note}" for note in notes), *claimed, results]
    parts += comparison_figures(arms, base, folder, what_curves_are_over(arms, read))
    parts += ["### Other units, and accuracy", units_table(arms)]
    parts += ["## What each model costs", costs_table(arms), *samples(arms)]
    if probe:
        parts += ["## How much memory helps", *probe_parts(arms, probe), prose("limits")]
    parts += how_it_was_made(arms, base, folder, prose("method", read=read))

    def numbers(arm: ArmRuns) -> dict[str, Any]:
        means = {name: arm.mean(of_result(name)) for name in IN_TABLE}
        return means | {f"{BITS.of}_minus_base": arm.minus(base, BITS.of) if arm is not base else None}

    lines = [
        [arm.name, seed, *(result.get(name) for name in IN_TABLE)]
        for arm in arms
        for seed, result in arm.results.items()
    ]
    write_results(folder, arms, base, numbers, ["arm", "seed", *IN_TABLE], lines)
    answer = [title, results, *notes, *claimed[: len(arms) <= MAX_CLAIMS + 1]]
    return write_page(parts, folder, bars(arms, BITS), answer)


def probe_answer(folder: Path) -> str:
    """What the probe of the runs in ``folder`` says in a terminal."""
    probe = read_probe(folder)
    return in_terminal(probe_parts(arms_of(read_runs(folder)), probe)) if probe else ""


def of_result(name: str) -> Quantity:
    """The number called ``name`` in a result, which some results don't have."""
    return lambda result: result.get(name)


def units_table(arms: Sequence[ArmRuns]) -> Table:
    """The losses of the results in other units, and the accuracy, a row for each arm."""

    def mean(name: str, form: str, unit: str = "", scale: float = 1.0) -> Column:
        return lambda arm: number(arm.mean(of_result(name)), form, unit, scale=scale)

    columns: dict[str, Column] = {
        "nats per token": mean("loss", ".3f"),
        "bits per byte": mean("bits_per_byte", ".3f"),
        "perplexity": mean("perplexity", ",.1f"),  # of words
        "perplexity per word": mean("word_perplexity", ",.1f"),  # of subwords
        "accuracy": mean("accuracy", ".1f", " %", 100),
    }
    return arms_table(arms, columns)


def what_the_table_is_over(arms: Sequence[ArmRuns]) -> str:
    """How much of the held-out text the last evaluations read."""
    results = [result for arm in arms for result in arm.results.values()]
    read = sorted({(result["evaluated_tokens"], result.get("held_out_tokens", 0)) for result in results})
    parts = [f"{n:,} of {whole:,} tokens" for n, whole in read if n < whole]
    return f"{' or '.join(parts)} of the held-out text" if parts else WHOLE


def what_curves_are_over(arms: Sequence[ArmRuns], table_over: str) -> str:
    """How much of the held-out text the evaluations of the validation curves read: the same as the last one,
    unless a record has another number of tokens than the result."""
    parts = {}
    for arm in arms:
        read = {int(n) for run in arm.counted for n in run.metrics.points("evaluated_tokens")[2].tolist()}
        whole = (arm.first.result or {}).get("evaluated_tokens")
        others = [f"{n:,} tokens" for n in sorted(read - {whole})]
        parts[arm.label] = " or ".join(others + ["all"] * (whole in read or not read))
    if set(parts.values()) == {"all"}:
        return table_over
    return prose("read_in_parts", parts=parts, table="all of it" if table_over == WHOLE else table_over)


def samples(arms: Sequence[ArmRuns]) -> list[Part]:
    """The text that each arm generated at the end, and its prompt."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample and arm.first.result}
    prompts = {label: (run.result or {})["prompt"] for label, run in runs.items()}
    if not runs:
        return []
    parts: list[Part] = ["## Samples", prose("samples")]
    if shared := len(set(prompts.values())) == 1:
        title = "All models continue the same prompt:" if len(runs) > 1 else "The prompt:"
        parts.append(f"{title}\n\n{fenced(next(iter(prompts.values())))}")
    for label, run in runs.items():
        parts.append(f"**{plain(label)}**")
        if not shared:
            parts.append(f"The prompt:\n\n{fenced(prompts[label])}\n\nThe text that the model wrote:")
        parts.append(fenced(run.sample))
    return parts
