"""The part of a report about a probe: how much context helps, what each part of memory is worth, and where
attention goes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.intervals import Mean
from memformers.common.text_format import counted
from memformers.report.arms import BITS, Arm
from memformers.report.curves import bits
from memformers.report.markdown import DASH, number, prose, table
from memformers.report.plotting import looks_of
from memformers.report.probe_figures import Measured, attention_figure, gains_figure, memory_ablation_figure

PARTS = {"slots": "compressed memory", "memory": "memory"}
"""The names of the parts of a memory in a report."""
CONTROLS = ("slots zeroed", "slots swapped", "memory zeroed", "memory swapped")
SPACE = "\N{NO-BREAK SPACE}"


def probe_section(arms: Sequence[Arm], probe: Measured, folder: Path) -> list[str]:
    """The results of a ``probe`` of the runs in ``folder``, as paragraphs."""
    looks_by_arm = looks_of([arm.name for arm in arms])
    labels = {run.folder.name: arm.label for arm in arms for run in arm.runs}
    looks = {run.folder.name: looks_by_arm[arm.name] for arm in arms for run in arm.runs}
    names = {name: labels[name] for name in probe["checkpoints"]}
    left_out = [arm.label for arm in arms if not names.keys() & {run.folder.name for run in arm.runs}]
    parts = ["## What context and memory are worth", *documents_read(probe)]
    if left_out:
        parts.append(prose("not_probed", labels=left_out))
    if context := probe["effective_context"]:
        parts.append(prose("context", step=context["step"], positions=f"{context['positions']:,}"))
        parts += [context_table(context, names), gains_figure(context, labels, looks, folder)]
    if attention := probe["attention"]:
        parts.append(attention_figure(attention, labels, folder))
    ablation = scaled(probe["memory_ablation"], bits_of(arms))
    if not ablation:
        return [*parts, prose("no_ablation")]
    figure = memory_ablation_figure(ablation, labels, looks, folder)
    return [*parts, *memory_ablation_section(ablation, names, figure)]


def bits_of(arms: Sequence[Arm]) -> float:
    """A nat per token as bits per character of the text that ``arms`` read."""
    results = (result for arm in arms for result in arm.results.values())
    return next((bits(result) for result in results), 1 / math.log(2))


LOSSES = ("loss", "less_untouched", "less_baseline", "swapped_less_zeroed")


def scaled(found: Any, scale: float, of_losses: bool = False) -> Any:
    """What a memory ablation has ``found``, with its losses and their differences multiplied by ``scale``."""
    if isinstance(found, Mapping):
        return {name: scaled(of, scale, of_losses or name in LOSSES) for name, of in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [scaled(each, scale, of_losses) for each in found]
    return found * scale if of_losses and isinstance(found, float) else found


def documents_read(probe: Measured) -> list[str]:
    """How documents were read, and what could not be measured in them; nothing for a plain text."""
    if not probe["documents"]:
        return []
    measured = {
        "effective_context": "how much context helps",
        "attention": "how attention is distributed with full memories",
    }
    missing = [what for name, what in measured.items() if not probe[name]]
    documents = counted(probe["documents"], "held-out document")
    return [prose("documents_read", documents=documents, missing=missing)]


def context_table(context: Measured, names: Mapping[str, str]) -> str:
    """The effective context of each of the models that ``names`` labels."""
    rows = [
        [label, *(effective_length(context, r, name) for r in context["recl"])]
        for name, label in names.items()
    ]
    return table(["arm", *(f"r{SPACE}={SPACE}{r}" for r in context["recl"])], rows, numbers=True)


def effective_length(context: Measured, r: str, name: str) -> str:
    """A model's relative effective context length, with its interval."""

    def shown(length: int | None) -> str:
        if length == context["step"]:
            return f"≤{SPACE}{length:,}"
        return f"{length:,}" if length else f"over {context['step'] * len(context['gains'][r][name]):,}"

    low, high = map(shown, context["recl_intervals"][r][name])
    return f"{shown(context['recl'][r][name])} ({low if low == high else f'{low} – {high}'})"


def memory_ablation_section(
    ablation: Measured, labels: Mapping[str, str], figure: Sequence[str]
) -> list[str]:
    """The tables and findings of the ``ablation`` of each model's memory, with its ``figure``, as paragraphs;
    ``labels`` has the names of the models by their runs."""
    overall = ablation["overall"]
    head = ["arm", "loss with unchanged memory", *map(control_name, CONTROLS)]
    costs = [
        [
            label,
            number(overall["loss"][run], ".3f"),
            *(cell(overall["less_untouched"][run].get(control)) for control in CONTROLS),
        ]
        for run, label in labels.items()
    ]
    findings = [
        f"- {finding(label, part, ablation, run)}"
        for run, label in labels.items()
        for part in ablation["swapped_less_zeroed"][run]
    ]
    about = {name: ablation[name] for name in ("streams", "warm_up", "of_documents")}
    about |= {"tokens": f"{overall['tokens']:,}", "warm_up": f"{about['warm_up']:,}"}
    has_base = ablation["baseline"] is not None
    return [
        prose("ablation", **about),
        table(head, costs, numbers=True),
        *(["\n".join(findings)] if findings else []),
        prose("limits"),
        *figure,
        "### Losses by the distance of repeats, and by the frequency of words",
        prose("repeats", before=ablation["n_gram"] - 1, has_base=has_base),
        group_table("distance to the last occurrence, in tokens", "by_repeat_distance", ablation, labels),
        prose("occurrences"),
        group_table("occurrences of the word in training", "by_occurrences", ablation, labels),
    ]


def finding(label: str, part: str, ablation: Measured, run: str) -> str:
    """Whether the contents of a ``part`` are used, and how zeros compare with them: claimed only where an
    interval leaves out zero."""
    costs = ablation["overall"]["less_untouched"][run]
    swapped, zeroed = (Mean.from_json(costs[f"{part} {change}"]) for change in ("swapped", "zeroed"))
    more = Mean.from_json(ablation["swapped_less_zeroed"][run][part])
    shown = {
        name: number(mean, ".3f", signed=True)
        for name, mean in (("swapped", swapped), ("zeroed", zeroed), ("more", more))
    }
    use = prose(
        "finding", label=label, part=PARTS[part], swapped=shown["swapped"],
        is_seen=swapped.leaves_out_zero, is_worse=swapped.mean > 0,
        most=f"{swapped.mean + swapped.half_width:.3f}",
    )  # fmt: skip
    zeros = {"zeroed": shown["zeroed"], "more": shown["more"]}
    return f"{use} {prose('zeros', **zeros, is_seen=more.leaves_out_zero, is_more=more.mean > 0)}"


def group_table(head: str, grouping: str, ablation: Measured, labels: Mapping[str, str]) -> str:
    """A column for each group of tokens: their number, the loss of each arm, and its differences."""
    groups, baseline = ablation[grouping], ablation["baseline"]
    rows = [["tokens", *(f"{group['tokens']:,}" for group in groups)]]
    rows += [
        [f"{label}: loss", *(number(g["loss"].get(run), ".3f") for g in groups)]
        for run, label in labels.items()
    ]
    rows += [
        [f"{label}, minus {labels[baseline]}", *(cell(group["less_baseline"].get(run)) for group in groups)]
        for run, label in labels.items()
        if baseline not in (None, run)
    ]
    rows += [
        [f"{label}: {control_name(control)}"]
        + [cell(group["less_untouched"].get(run, {}).get(control)) for group in groups]
        for run, label in labels.items()
        for control in ablation["overall"]["less_untouched"][run]
    ]
    return table([head, *(group["name"] for group in groups)], rows, numbers=True)


def control_name(control: str) -> str:
    """The words of a report for it."""
    part, change = control.split()
    return f"{PARTS[part]} {change}"


def cell(difference: Measured | None) -> str:
    """A difference in a table, or a dash if there is none."""
    return DASH if difference is None else BITS.cell(Mean.from_json(difference))
