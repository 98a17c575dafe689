"""Writes the report of runs: ``report.md`` with PNG figures, and one self-contained ``report.html``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.common.files import write_text
from memformers.report.arms import BITS, Arm, Column, arms_of, arms_table, base_of
from memformers.report.curves import curve_figures, position_figure
from memformers.report.markdown import csv_text, fenced, number, plain, write_page
from memformers.report.probe import probe_section
from memformers.report.provenance import how_it_was_made
from memformers.report.recall import write_recall_report
from memformers.report.sections import claims, costs_table, not_comparable, warnings
from memformers.runs.finished import read_probe, read_runs
from memformers.runs.folder import PROBE, TABLE
from memformers.runs.plan import read_plan

METHOD = (
    "Validation reads the text in its order, in eval mode, from an empty memory that is then carried from "
    "segment to segment; the losses in the table are over {}. "
)


def write_report(folder: Path) -> Path:
    """Write the report of a run's or an experiment's ``folder`` into it; returns ``report.html``.

    Raises ValueError for a folder without a run.
    """
    if (plan := read_plan(folder)) and plan.task == "recall":
        return write_recall_report(folder)
    arms = arms_of(runs := read_runs(folder))
    base = base_of(arms)
    probe = read_probe(folder)
    parts = [f"# {title(runs[0].facts['corpus'])}"]
    if probe is None and (folder / PROBE).exists():
        parts.append(
            "> **The probe was left out**: it measured other runs or checkpoints. Probe these runs again."
        )
    parts += [*warnings(arms, base, folder), results_table(arms, base)]
    if len({(run.facts["corpus"]["sha256"], run.config["tokens"]) for run in runs}) == 1:
        parts += claims(arms, base, [BITS], folder)
    parts += ["The same in other units, and how often the likeliest token is right:", units_table(arms)]
    parts += figures(arms, base, folder)
    write_text(folder / TABLE, results_csv(arms))
    parts += ["## What each arm costs", costs_table(arms, base), *samples(arms)]
    parts += probe_section(arms, probe, folder) if probe else []
    method = METHOD.format(what_the_table_is_over(arms))
    return write_page([*parts, *how_it_was_made(arms, base, folder, method)], folder)


def title(corpus: dict[str, Any]) -> str:
    """The headline, with a warning if the corpus is a stand-in."""
    stand_in = " — NOT Tiny Shakespeare, which was not available"
    name = corpus["name"] + (stand_in if corpus["stands_in_for_tiny_shakespeare"] else "")
    ids = " (token ids, each of which counts as a character here)" * (corpus.get("tokenizer") == "ids")
    return f"How much memory helps: transformers compared on {plain(name)}{ids}"


def results_table(arms: Sequence[Arm], base: Arm) -> str:
    """How well each arm predicts the held-out text, and how much better than ``base``, a row for each arm."""
    differences = {arm.name: arm.minus(base, BITS.of) for arm in arms if arm is not base}
    columns: dict[str, Column] = {
        "seeds": lambda arm: f"{len(arm.results)}",
        BITS.label: lambda arm: BITS.shown(arm.mean(BITS.of)),
    }
    if any(d and d.n > 1 for d in differences.values()):
        columns[f"minus {base.label}"] = lambda arm: BITS.shown_difference(differences.get(arm.name))
    return arms_table(arms, columns)


def units_table(arms: Sequence[Arm]) -> str:
    """What the losses of the results are in other units, and the accuracy, a row for each arm."""
    columns: dict[str, Column] = {
        "nats per token": lambda arm: number(arm.mean("loss"), ".4f"),
        "bits per byte": lambda arm: number(arm.mean(lambda result: result.get("bits_per_byte")), ".4f"),
        "perplexity": lambda arm: number(arm.mean(lambda result: result.get("perplexity")), ",.1f"),
        "perplexity per word": lambda arm: number(
            arm.mean(lambda result: result.get("word_perplexity")), ",.1f"
        ),
        "accuracy": lambda arm: number(arm.mean("accuracy"), ".1%"),
    }
    for name, key in (("perplexity", "perplexity"), ("perplexity per word", "word_perplexity")):
        if not any(result.get(key) for arm in arms for result in arm.results.values()):
            del columns[name]  # of words, and of subwords
    return arms_table(arms, columns)


IN_TABLE = ("loss", "bits_per_character", "bits_per_byte", "perplexity", "word_perplexity", "accuracy",
            "seconds", "evaluation_seconds", "peak_memory_bytes")  # fmt: skip
"""The numbers of a result in the table of each training run; the loss is in nats per token."""


def results_csv(arms: Sequence[Arm]) -> str:
    """The result of each training run that finished, a row for each."""
    rows = [
        [arm.name, seed, *(result.get(name) for name in IN_TABLE)]
        for arm in arms
        for seed, result in arm.results.items()
    ]
    return csv_text(["arm", "seed", *IN_TABLE], rows)


def figures(arms: Sequence[Arm], base: Arm, folder: Path) -> list[str]:
    """The figures with their captions."""
    counts = sorted({len(arm.counted) for arm in arms})
    seeds = " or ".join(map(str, counts))
    bands = f" Curves are means over {seeds} seeds, and bands are 95 % intervals by Student's t."
    bands = bands * (counts[-1] > 1)
    timed = len(arms) == 1 or not not_comparable(arms)
    curves = curve_figures(arms, base, folder, bands, what_curves_are_over(arms), timed=timed)
    return [*curves, *position_figure(arms, base, folder, bands)]


WHOLE = "the whole held-out text"


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
        records = [record for run in arm.counted for record in run.metrics]
        read = {int(r["evaluated_tokens"]) for r in records if "loss.valid" in r}
        whole = (arm.first.result or {}).get("evaluated_tokens")
        told = [f"{n:,} tokens" for n in sorted(read - {whole})]
        parts[plain(arm.label)] = " or ".join(told + ["all"] * (whole in read or not read))
    table_over = what_the_table_is_over(arms)
    if set(parts.values()) == {"all"}:
        return table_over
    table = "all of it" if table_over == WHOLE else table_over
    if len(set(parts.values())) == 1:
        return f"the same {next(iter(parts.values()))} of the held-out text (the table's losses: {table})"
    said = ", ".join(f"{name}: {part}" for name, part in parts.items())
    return f"unequal parts of the held-out text ({said}; the table's losses: {table})"


def samples(arms: Sequence[Arm]) -> list[str]:
    """The text that each arm generated at the end, and its prompt."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample and arm.first.result}
    prompts = {label: (run.result or {})["prompt"] for label, run in runs.items()}
    if not runs:
        return []
    parts = [
        "## Samples",
        "Each arm wrote its text after its training, at temperature 0.8. The prompt is the beginning of the "
        "held-out text.",
    ]
    if shared := len(set(prompts.values())) == 1:
        parts.append(f"All arms continue the same prompt:\n\n{fenced(next(iter(prompts.values())))}")
    for label, run in runs.items():
        parts.append(f"### {plain(label)}")
        if not shared:
            parts.append(f"The prompt:\n\n{fenced(prompts[label])}\n\nThe text that the arm wrote:")
        parts.append(fenced(run.sample))
    return parts
