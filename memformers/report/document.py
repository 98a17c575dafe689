"""Writes the report of runs on a text, or of a recall experiment: ``report.md`` with figures, one
``report.html`` that holds everything, and the results as ``results.csv`` and ``results.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.report.arms import ArmRuns, Column, Measure, arms_of, arms_table, base_of, measure_of
from memformers.report.claims import claims, memory_verdict, warnings
from memformers.report.data import Block, Code, Details, ReportData, Section, Table, Text, prose
from memformers.report.made import how_it_was_made
from memformers.report.numbers import number
from memformers.report.plotting import text_figures
from memformers.report.recall import write_recall_report
from memformers.report.rendering import Report, claim_report, in_terminal, write_files
from memformers.report.sections import (
    HELD_OUT_TEXT,
    Probed,
    chart_of,
    costs_table,
    read_probed,
    results_table,
    tokens_of_curves,
    tokens_of_losses,
    tokens_of_results,
    write_results,
)
from memformers.runs.folder import PROBE
from memformers.runs.plan import read_plan
from memformers.runs.reader import read_probe, read_runs

MAX_CLAIMS = 4
"""The most arms whose claims a terminal shows beside their table."""
IN_TABLE = ("loss", "bits_per_character", "bits_per_byte", "perplexity", "word_perplexity", "accuracy",
            "seconds", "evaluation_seconds", "peak_memory_bytes")  # fmt: skip
"""The numbers of a result in the table of each training run; the loss is in nats per token."""


def write_report(folder: Path) -> Report:
    """Write the report of a run's or an experiment's ``folder`` into it. Raises UserError for a folder
    without a run, and for files that no report wrote."""
    # Each task has its report.
    plan = read_plan(folder)
    if plan and plan.task == "recall":
        return write_recall_report(folder)
    arms = arms_of(read_runs(folder))
    base = base_of(arms)
    measure = measure_of(arms)
    probe = read_probe(folder)
    claim_report(folder)
    report = text_report(arms, base, measure, probe, folder)
    write_text_results(arms, base, measure, folder)
    return write_files(report, folder)


def text_report(
    arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure, probe: Mapping[str, Any] | None, folder: Path
) -> ReportData:
    """The report of runs on a text, whose figures are drawn into ``folder``."""
    is_single = len(arms) == 1
    probed = read_probed(arms, probe) if probe else Probed([], [], [])
    corpus, _, _ = arms[0].runs[0].facts["corpus"]["name"].partition(" (seed")
    title = f"{arms[0].label if is_single else 'Memory compared'} on {corpus}"
    notes: list[Text] = []
    if probe is None and (folder / PROBE).exists():
        notes.append(prose("probe_left_out"))
    notes += warnings(arms, base, folder)

    # Claims and results
    claimed: list[Block] = claims(arms, base, measure, folder) if is_fair(arms) else []
    answer = claimed[:1] if len(arms) <= MAX_CLAIMS + 1 else []
    if is_single:
        claimed += memory_verdict(arms[0], probed.findings, folder)
    results = results_table(arms, base, [measure])
    read_at_end = tokens_of_results(arms)
    figures = text_figures(arms, base, measure, folder, shown_curves(arms), read_at_end)

    # Sections, from what many readers want to what few do
    costs = Section("What each model costs", [costs_table(arms)])
    sections = [costs, *samples(arms)]
    if probe:
        sections.append(Section("How much memory helps", [*probed.blocks, prose("limits")]))
    sections.append(how_it_was_made(arms, base, folder, prose("method", read=read_at_end)))
    return ReportData(
        title,
        notes,
        claimed,
        chart_of(arms, base, measure),
        [results, *tokens_of_losses(arms, probe)],
        [*figures, Details("Other units, and accuracy", [units_table(arms)])],
        sections,
        [results, *notes, *answer],
    )


def is_fair(arms: Sequence[ArmRuns]) -> bool:
    """Whether all runs have the same text and the same number of training tokens."""
    trained_on = set()
    for arm in arms:
        for run in arm.runs:
            trained_on.add((run.facts["corpus"]["sha256"], run.config["max_tokens"]))
    return len(trained_on) == 1


def write_text_results(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure, folder: Path) -> None:
    """Write ``results.json`` and ``results.csv``."""

    def numbers(arm: ArmRuns) -> dict[str, Any]:
        difference = None if arm is base else arm.minus(base, measure.of)
        means = {name: arm.mean(name) for name in IN_TABLE}
        return means | {f"{measure.of}_minus_base": difference}

    lines = []
    for arm in arms:
        for seed, result in arm.results.items():
            lines.append([arm.name, seed, *map(result.get, IN_TABLE)])
    write_results(folder, arms, base, numbers, ["arm", "seed", *IN_TABLE], lines)


def probe_answer(folder: Path) -> str:
    """What the probe of the runs in ``folder`` says in a terminal."""
    probe = read_probe(folder)
    return in_terminal(read_probed(arms_of(read_runs(folder)), probe).blocks) if probe else ""


def units_table(arms: Sequence[ArmRuns]) -> Table:
    def mean(name: str, form: str, unit: str = "", scale: float = 1.0) -> Column:
        return lambda arm: number(arm.mean(name), form, unit, scale=scale)

    columns: dict[str, Column] = {
        "nats per token": mean("loss", ".3f"),
        "bits per byte": mean("bits_per_byte", ".3f"),
        "perplexity": mean("perplexity", ",.1f"),  # of words
        "perplexity per word": mean("word_perplexity", ",.1f"),  # of subwords
        "accuracy": mean("accuracy", ".1f", " %", 100),
    }
    return arms_table(arms, columns)


def shown_curves(arms: Sequence[ArmRuns]) -> Text:
    """Which part of the held-out text the curves are over."""
    n_read = tokens_of_curves(arms)
    results = tokens_of_results(arms)
    if not n_read:
        return results
    return prose("read_in_parts", read=n_read, table="all of it" if results == HELD_OUT_TEXT else results)


def samples(arms: Sequence[ArmRuns]) -> list[Section]:
    """The text that each arm generated at the end, and its prompt."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample and arm.first.result}
    if not runs:
        return []
    prompts = {label: str((run.result or {})["prompt"]) for label, run in runs.items()}
    # A prompt that all share stands above the samples, others stand beside theirs.
    shared, *unlike = dict.fromkeys(prompts.values())
    blocks: list[Block] = [prose("samples")]
    if not unlike:
        title = "All models continue the same prompt:" if len(runs) > 1 else "The prompt:"
        blocks += [title, Code(shared)]
    for label, run in runs.items():
        blocks.append(prose("sample_of", label=label))
        if unlike:
            blocks += ["The prompt:", Code(prompts[label]), "The text that the model wrote:"]
        blocks.append(Code(run.sample))
    return [Section("Samples", blocks)]
