"""The part of a report about a probe, as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.report.arms import Arm
from memformers.report.curves import looks_of
from memformers.report.markdown import pictured, table
from memformers.report.memory_ablation_section import memory_ablation_section
from memformers.report.probe_figures import CAPTIONS, TITLES, save_probe_figures
from memformers.runs.folder import FIGURES


def probe_section(arms: Sequence[Arm], probe: dict[str, Any], folder: Path) -> list[str]:
    """The results of a probe: how much context helps each model, what each part of its memory is worth, and
    the distribution of its attention. Probes of older versions did not measure the second."""
    labels = {run.folder.name: arm.label for arm in arms for run in arm.runs}
    names = {name: labels[name] for name in probe["checkpoints"]}
    looks_by_arm = looks_of([arm.name for arm in arms])
    looks = {run.folder.name: looks_by_arm[arm.name] for arm in arms for run in arm.runs}
    drawn = save_probe_figures(probe, labels, looks, folder / FIGURES)
    of_worth = drawn.pop("memory_ablation", None)
    return [
        "## What context and memory are worth",
        *documents_read(probe),
        *(context_table(probe["effective_context"], names) if probe["effective_context"] else ()),
        *(pictured(path, TITLES[name], CAPTIONS[name], folder) for name, path in drawn.items()),
        *(
            memory_ablation_section(probe["memory_ablation"], names, of_worth, folder)
            if "memory_ablation" in probe
            else ()
        ),
    ]


def documents_read(probe: dict[str, Any]) -> list[str]:
    """How documents were read, and what could not be measured in them; nothing for a plain text."""
    if not probe.get("documents"):
        return []
    missing = [
        *([] if probe["effective_context"] else ["how much context helps"]),
        *([] if probe["attention"] else ["how attention is distributed with full memories"]),
    ]
    too_short = f" They are too short to measure {' and '.join(missing)}." * bool(missing)
    return [
        f"Each of the {probe['documents']:,} held-out documents is read from an empty memory, so contexts "
        f"and memories never hold another document.{too_short}"
    ]


def context_table(context: dict[str, Any], names: dict[str, str]) -> list[str]:
    """The effective context of each of the models that ``names`` labels, as paragraphs."""
    rows = [
        [label, *(effective_length(context, r, name) for r in context["recl"])]
        for name, label in names.items()
    ]
    head = ["arm"] + [f"r\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{r}" for r in context["recl"]]
    return [
        f"The table has the relative effective context length in tokens (Dai et al. 2019, section 4.3). It "
        f"is over the fraction r of tokens that are the hardest to predict from a short context. Contexts "
        f"grow in steps of {context['step']} tokens. The measurement uses {context['positions']:,} tokens of "
        f"the held-out text and one seed of each arm. ≤ marks the shortest context that was measured."
        + (INTERVALS if "recl_intervals" in context else "")
        + " Nothing is claimed about which arm's context is longer:",
        table(head, rows),
    ]


INTERVALS = (
    " Brackets have 95 % intervals over resamples of these tokens; the intervals do not cover other seeds."
)


def effective_length(context: dict[str, Any], r: str, name: str) -> str:
    """A model's RECL with its interval, which probes of older versions don't have."""

    def shown(length: int | None) -> str:
        if length == context["step"]:
            return f"≤\N{NO-BREAK SPACE}{length:,}"
        return f"{length:,}" if length else f"over {context['step'] * len(context['gains'][r][name]):,}"

    length = shown(context["recl"][r][name])
    if "recl_intervals" not in context:
        return length
    low, high = map(shown, context["recl_intervals"][r][name])
    return f"{length} ({low} – {high})" if low != high else f"{length} ({low})"
