"""The part of a report about a probe: how much context helps, how much each part of memory helps, and where
attention goes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memformers.common.intervals import Mean
from memformers.common.text_format import counted
from memformers.report.arms import BITS, ArmRuns, Measure
from memformers.report.curves import bits
from memformers.report.markdown import DASH, prose, table
from memformers.report.probe_figures import (
    CONTROLS,
    PARTS,
    Measured,
    attention_figure,
    gains_figure,
    memory_ablation_figure,
)

SPACE = "\N{NO-BREAK SPACE}"


def probe_section(arms: Sequence[ArmRuns], probe: Measured, folder: Path) -> list[str]:
    """The results of a ``probe`` of the runs in ``folder``, as paragraphs."""
    of_runs = {run.folder.name: arm for arm in arms for run in arm.runs}
    probed = {name: of_runs[name] for name in probe["checkpoints"]}
    context, attention, ablation = (
        probe[name] for name in ("effective_context", "attention", "memory_ablation")
    )
    parts = ["## How much context and memory help"]
    if probe["documents"]:
        missing = ["how much context helps"] * (not context)
        missing += ["how attention is distributed with full memories"] * (not attention)
        documents = counted(probe["documents"], "held-out document")
        parts.append(prose("documents_read", documents=documents, missing=missing))
    if left_out := [arm.label for arm in arms if arm not in probed.values()]:
        parts.append(prose("not_probed", labels=left_out))
    if context:
        parts.append(prose("context", step=context["step"], positions=f"{context['positions']:,}"))
        rows = [
            [arm.label, *(effective_length(context, r, name) for r in context["recl"])]
            for name, arm in probed.items()
        ]
        parts.append(table(["model", *(f"r{SPACE}={SPACE}{r}" for r in context["recl"])], rows, numbers=True))
        parts.append(gains_figure(context, of_runs, folder))
    if attention:
        parts.append(attention_figure(attention, of_runs, folder))
    if not ablation:
        return [*parts, prose("no_ablation")]
    results = (result for arm in arms for result in arm.results.values())
    measure = replace(BITS, scale=next(map(bits, results), 1 / math.log(2)))  # of a nat per token
    figure = memory_ablation_figure(ablation, of_runs, measure, folder)
    return [*parts, *memory_ablation_section(ablation, probed, measure, figure)]


def effective_length(context: Measured, r: str, name: str) -> str:
    """A model's relative effective context length, with its interval."""

    def shown(length: int | None) -> str:
        if length == context["step"]:
            return f"≤{SPACE}{length:,}"
        return f"{length:,}" if length else f"over {context['step'] * len(context['gains'][r][name]):,}"

    low, high = map(shown, context["recl_intervals"][r][name])
    return f"{shown(context['recl'][r][name])} ({low if low == high else f'{low} – {high}'})"


def memory_ablation_section(
    ablation: Measured, probed: Mapping[str, ArmRuns], measure: Measure, figure: Sequence[str]
) -> list[str]:
    """The tables and findings of the ``ablation`` of each model's memory, with its ``figure``, as paragraphs;
    losses are in nats per token, and shown by the ``measure``."""
    overall, baseline = ablation["overall"], ablation["baseline"]

    def shown(difference: Measured | None) -> str:
        return DASH if difference is None else measure.cell(Mean.from_json(difference))

    def finding(run: str, part: str) -> str:
        costs = overall["less_untouched"][run]
        found = {
            "swapped": costs[f"{part} swapped"],
            "zeroed": costs[f"{part} zeroed"],
            "more": ablation["swapped_less_zeroed"][run][part],
        }
        means = {name: Mean.from_json(mean) for name, mean in found.items()}
        return prose(
            "finding", label=probed[run].label, part=PARTS[part], show=measure.shown_difference, **means
        )

    def of_groups(head: str, grouping: str) -> str:
        groups = ablation[grouping]
        rows = [["tokens", *(f"{group['tokens']:,}" for group in groups)]]
        for run, arm in probed.items():
            losses = (measure.shown(group["loss"].get(run)) for group in groups)
            rows.append([f"{arm.label}: loss", *losses])
        for run, arm in probed.items():
            if baseline not in (None, run):
                less = (shown(group["less_baseline"].get(run)) for group in groups)
                rows.append([f"{arm.label}, minus {probed[baseline].label}", *less])
        for run, arm in probed.items():
            for control in overall["less_untouched"][run]:
                less = (shown(group["less_untouched"].get(run, {}).get(control)) for group in groups)
                rows.append([f"{arm.label}: {in_words(control)}", *less])
        return table([head, *(group["name"] for group in groups)], rows, numbers=True)

    costs = []
    for run, arm in probed.items():
        more = (shown(overall["less_untouched"][run].get(control)) for control in CONTROLS)
        costs.append([arm.label, measure.shown(overall["loss"][run]), *more])
    about = {name: ablation[name] for name in ("streams", "warm_up", "of_documents")}
    findings = [f"- {finding(run, part)}" for run in probed for part in ablation["swapped_less_zeroed"][run]]
    return [
        prose("ablation", tokens=overall["tokens"], **about),
        table(["model", "loss with unchanged memory", *map(in_words, CONTROLS)], costs, numbers=True),
        *(["\n".join(findings)] if findings else []),
        prose("limits"),
        *figure,
        "### Losses by the distance of repeats, and by the frequency of words",
        prose("repeats", before=ablation["n_gram"] - 1, has_base=baseline is not None),
        of_groups("distance to the last occurrence, in tokens", "by_repeat_distance"),
        prose("occurrences"),
        of_groups("occurrences of the word in training", "by_occurrences"),
    ]


def in_words(control: str) -> str:
    """The words of a report for a control."""
    part, change = control.split()
    return f"{PARTS[part]} {change}"
