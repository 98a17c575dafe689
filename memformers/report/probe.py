"""The part of a report about a probe: how much context helps, what each part of memory is worth, and where
attention goes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.intervals import Mean
from memformers.common.text_format import counted
from memformers.report.arms import Arm
from memformers.report.curves import bits
from memformers.report.markdown import DASH, number, plain, table
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
    left_out = [plain(arm.label) for arm in arms if not names.keys() & {run.folder.name for run in arm.runs}]
    parts = ["## What context and memory are worth", *documents_read(probe)]
    if left_out:
        parts.append(f"**Not probed, since no checkpoint was there**: {', '.join(left_out)}.")
    if context := probe["effective_context"]:
        parts += [*context_table(context, names), gains_figure(context, labels, looks, folder)]
    if attention := probe["attention"]:
        parts.append(attention_figure(attention, labels, folder))
    parts.append("### What each part of memory is worth")
    if ablation := scaled(probe["memory_ablation"], bits_of(arms)):
        figure = memory_ablation_figure(ablation, labels, looks, folder)
        return [*parts, *memory_ablation_section(ablation, names, figure)]
    return [
        *parts,
        "It was not measured: the held-out text is too short to fill the memories of two streams, or of two "
        "of its documents.",
    ]


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
    missing = [
        *([] if probe["effective_context"] else ["how much context helps"]),
        *([] if probe["attention"] else ["how attention is distributed with full memories"]),
    ]
    too_short = f" They are too short to measure {' and '.join(missing)}." * bool(missing)
    return [
        f"Of {counted(probe['documents'], 'held-out document')}, each is read from an empty memory, so "
        f"contexts and memories never hold another document.{too_short}"
    ]


def context_table(context: Measured, names: Mapping[str, str]) -> list[str]:
    """The effective context of each of the models that ``names`` labels, as paragraphs."""
    rows = [
        [label, *(effective_length(context, r, name) for r in context["recl"])]
        for name, label in names.items()
    ]
    return [
        f"The table has the relative effective context length in tokens (Dai et al. 2019, section 4.3). It "
        f"is over the fraction r of tokens that are the hardest to predict from a short context. Contexts "
        f"grow in steps of {context['step']} tokens. The measurement uses {context['positions']:,} tokens of "
        f"the held-out text and one seed of each arm. ≤ marks the shortest context that was measured. "
        f"Brackets have 95 % intervals over resamples of these tokens; the intervals do not cover other "
        f"seeds. Nothing is claimed about which arm's context is longer:",
        table(["arm", *(f"r{SPACE}={SPACE}{r}" for r in context["recl"])], rows),
    ]


def effective_length(context: Measured, r: str, name: str) -> str:
    """A model's relative effective context length, with its interval."""

    def shown(length: int | None) -> str:
        if length == context["step"]:
            return f"≤{SPACE}{length:,}"
        return f"{length:,}" if length else f"over {context['step'] * len(context['gains'][r][name]):,}"

    low, high = map(shown, context["recl_intervals"][r][name])
    return f"{shown(context['recl'][r][name])} ({low if low == high else f'{low} – {high}'})"


LIMITS = (
    "These numbers show how much a trained model relies on a part of its memory. They do not show how good "
    "a model is that was trained without this part; the table of results shows that. No model has seen "
    "zeros in training, and zeros are still keys, which receive attention. So zeroed memory may raise the "
    "loss although the model did not use its contents. A cost that only swapped memory has depends on the "
    "contents. The intervals are over parts of one text, not over seeds."
)


def memory_ablation_section(
    ablation: Measured, labels: Mapping[str, str], figure: Sequence[str]
) -> list[str]:
    """The tables and findings of the ``ablation`` of each model's memory, with its ``figure``, as paragraphs;
    ``labels`` has the names of the models by their runs."""
    overall = ablation["overall"]
    place, streams = "reads another part of the text", "streams"
    if ablation["of_documents"]:
        place, streams = "reads the same position of another document", "documents, each a stream"
    advice = "so a low loss there doesn't show that the model copied them"
    if ablation["baseline"] is not None:
        advice = "so compare the differences between arms and not the losses"
    findings = [
        f"- {finding(plain(label), part, ablation, run)}"
        for run, label in labels.items()
        for part in ablation["swapped_less_zeroed"][run]
    ]
    return [
        f"The table has the validation loss in bits per character, and how much it rises when a part of the "
        f"memory is changed before each segment that a trained model reads: the part is *zeroed*, or "
        f"*swapped* with that of another stream, which {place}. This rise is what the part is worth to the "
        f"model. The losses are over {overall['tokens']:,} tokens of the held-out text in "
        f"{ablation['streams']} {streams}, after the first {ablation['warm_up']:,} of each, which fill the "
        f"memories. ± is half the width of a 95 % interval over streams, by Student's t. There is one "
        f"trained model of each arm; – marks a part that an arm doesn't have.",
        table(
            ["arm", "loss with unchanged memory", *map(control_name, CONTROLS)],
            [
                [
                    label,
                    number(overall["loss"][run], ".4f"),
                    *(cell(overall["less_untouched"][run].get(control)) for control in CONTROLS),
                ]
                for run, label in labels.items()
            ],
        ),
        *(["\n".join(findings)] if findings else []),
        LIMITS,
        *figure,
        f"A token is a repeat if its stream already contains the same token after the same "
        f"{ablation['n_gram'] - 1} tokens; the distance is that to the last such occurrence. Repeats are "
        f"easy to predict for every model, since common words repeat too, {advice}. There are few repeats, "
        f"and by chance one 95 % interval in twenty leaves out zero:",
        group_table("distance to the last occurrence, in tokens", "by_repeat_distance", ablation, labels),
        "The next table has the same quantities by how often the word that contains the token occurs in the "
        "training text, in upper or lower case. Words are counted and not tokens, because texts repeat rare "
        "words, such as names, and a rare character says little about the word.",
        group_table("occurrences of the word in training", "by_occurrences", ablation, labels),
    ]


def finding(label: str, part: str, ablation: Measured, run: str) -> str:
    """Whether the contents of a ``part`` are used, and how zeros compare with them: claimed only where an
    interval leaves out zero."""
    costs = ablation["overall"]["less_untouched"][run]
    swapped, zeroed = Mean.from_json(costs[f"{part} swapped"]), Mean.from_json(costs[f"{part} zeroed"])
    more = Mean.from_json(ablation["swapped_less_zeroed"][run][part])
    cost, cost_of_zeros, difference = (number(m, ".4f", signed=True) for m in (swapped, zeroed, more))
    name = PARTS[part]
    if not swapped.leaves_out_zero:
        said = (
            f"{label}: no use of the contents of its {name} was seen. Those of another stream cost {cost}, "
            f"and a cost of up to {swapped.mean + swapped.half_width:.4f} is not excluded."
        )
    elif swapped.mean > 0:
        said = f"{label} uses the contents of its {name}: those of another stream cost {cost}."
    else:
        said = (
            f"{label} has a lower loss with another stream's {name} than with its own: the difference is "
            f"{cost}."
        )
    if not more.leaves_out_zero:
        return f"{said} Zeros cost {cost_of_zeros}; no difference between the two was seen."
    if more.mean > 0:
        return f"{said} That is {difference} more than zeros cost, so zeros disturb the model less."
    return (
        f"{said} Zeros cost {cost_of_zeros}, more than another stream's contents, so only a part of that "
        f"cost is due to the missing contents."
    )


def group_table(head: str, grouping: str, ablation: Measured, labels: Mapping[str, str]) -> str:
    """A column for each group of tokens: their number, the loss of each arm, and its differences."""
    groups, baseline = ablation[grouping], ablation["baseline"]
    rows = [["tokens", *(f"{group['tokens']:,}" for group in groups)]]
    rows += [
        [f"{label}: loss", *(number(g["loss"].get(run), ".4f") for g in groups)]
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
    return table([head, *(group["name"] for group in groups)], rows)


def control_name(control: str) -> str:
    """The words of a report for it."""
    part, change = control.split()
    return f"{PARTS[part]} {change}"


def cell(difference: Measured | None) -> str:
    """A difference in a table, or a dash if there is none."""
    return DASH if difference is None else number(Mean.from_json(difference), ".4f", signed=True)
