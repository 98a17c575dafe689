"""The worth of each part of memory, as a probe measured it: tables and findings in Markdown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.intervals import Mean
from memformers.report.evidence import signed
from memformers.report.markdown import number, pictured, table
from memformers.report.page import plain

PARTS = {"slots": "compressed memory", "memory": "memory"}
"""The names of the parts of a memory in a report."""
CONTROLS = ("slots zeroed", "slots swapped", "memory zeroed", "memory swapped")
Measured = Mapping[str, Any]
"""The measurements in ``probe.json``, or a part of them."""


def memory_ablation_section(
    ablation: Measured | None, labels: Mapping[str, str], figure: Path | None, folder: Path
) -> list[str]:
    """The section on the ``ablation`` of each model's memory, as paragraphs, with its ``figure`` if
    there is one. A probe of ``folder`` measured it, and ``labels`` has the names of the models by their
    runs."""
    head = "### What each part of memory is worth"
    if ablation is None:
        return [
            head,
            "It was not measured: the held-out text is too short to fill the memories of two streams, or of "
            "two of its documents.",
        ]
    overall = ablation["overall"]
    several = ablation["baseline"] is not None
    of_documents = ablation.get("of_documents", False)
    place = (
        "reads the same position of another document" if of_documents else "reads another part of the text"
    )
    streams = "documents, each a stream" if of_documents else "streams"
    return [
        head,
        f"The table has the validation loss in nats per token, and how much it rises when a part of the "
        f"memory is changed before each segment that a trained model reads: the part is *zeroed*, or "
        f"*swapped* with that of another stream, which {place}. This rise is what the part is worth to the "
        f"model. The losses are over {overall['tokens']:,} tokens of the held-out text in "
        f"{ablation['streams']} {streams}, after the first {ablation['warm_up']:,} of each, which fill the "
        f"memories. ± is half the width of a 95 % interval over streams, by Student's t. There is one "
        f"trained model of each arm; – marks a part that an arm doesn't have.",
        memory_ablation_table(overall, labels),
        *findings(ablation, labels),
        LIMITS,
        *([pictured(figure, TITLE, caption(ablation, labels), folder)] if figure else []),
        f"A token is a repeat if its stream already contains the same token after the same "
        f"{ablation['n_gram'] - 1} tokens; the distance is that to the last such occurrence. Repeats are "
        f"easy to predict for every model, since common words repeat too, "
        + (
            "so compare the differences between arms and not the losses"
            if several
            else "so a low loss there doesn't show that the model copied them"
        )
        + ". There are few repeats, and by chance one 95 % interval in twenty leaves out zero:",
        group_table(
            "distance to the last occurrence, in tokens",
            ablation["by_repeat_distance"],
            ablation,
            labels,
        ),
        "The next table has the same quantities by how often the word that contains the token occurs in the "
        "training text, in upper or lower case. Words are counted and not tokens, because texts repeat rare "
        "words, such as names, and a rare character says little about the word.",
        group_table("occurrences of the word in training", ablation["by_occurrences"], ablation, labels),
    ]


TITLE = "Cost of a changed memory, and loss by the distance of repeats"
LIMITS = (
    "These numbers show how much a trained model relies on a part of its memory. They do not show how good "
    "a model is that was trained without this part; the table of results shows that. No model has seen "
    "zeros in training, and zeros are still keys, which receive attention. So zeroed memory may raise the "
    "loss although the model did not use its contents. A cost that only swapped memory has depends on the "
    "contents. The intervals are over parts of one text, not over seeds."
)


def memory_ablation_table(overall: Measured, labels: Mapping[str, str]) -> str:
    """A row an arm: its loss, and what each change costs it."""
    head = ["arm", "loss with unchanged memory", *map(control_name, CONTROLS)]
    rows = [
        [
            label,
            number(overall["loss"][run], ".4f"),
            *(cell(overall["less_untouched"][run], c) for c in CONTROLS),
        ]
        for run, label in labels.items()
    ]
    return table(head, rows)


def findings(ablation: Measured, labels: Mapping[str, str]) -> list[str]:
    """What may be claimed of each part of each arm's memory, as a list: a use only where an interval leaves
    out zero. Nothing where no arm has a memory."""
    lines = [
        f"- {finding(plain(label), part, ablation, run)}"
        for run, label in labels.items()
        for part in ablation["swapped_less_zeroed"][run]
    ]
    return ["\n".join(lines)] * bool(lines)


def finding(label: str, part: str, ablation: Measured, run: str) -> str:
    """Whether the contents of a ``part`` are used, and how zeros compare with them."""
    costs = ablation["overall"]["less_untouched"][run]
    swapped, zeroed = measured(costs[f"{part} swapped"]), measured(costs[f"{part} zeroed"])
    name = PARTS[part]
    if swapped.leaves_out_zero and swapped.mean > 0:
        said = f"{label} uses the contents of its {name}: those of another stream cost {signed(swapped)}."
    elif swapped.leaves_out_zero:
        said = (
            f"{label} has a lower loss with another stream's {name} than with its own: the difference is "
            f"{signed(swapped)}."
        )
    else:
        said = (
            f"{label}: no use of the contents of its {name} was seen. Those of another stream cost "
            f"{signed(swapped)}, and a cost of up to {swapped.mean + swapped.half_width:.4f} is not excluded."
        )
    more = measured(ablation["swapped_less_zeroed"][run][part])
    if not more.leaves_out_zero:
        return f"{said} Zeros cost {signed(zeroed)}; no difference between the two was seen."
    if more.mean > 0:
        return f"{said} That is {signed(more)} more than zeros cost, so zeros disturb the model less."
    return (
        f"{said} Zeros cost {signed(zeroed)}, more than another stream's contents, so only a part of that "
        f"cost is due to the missing contents."
    )


def group_table(head: str, groups: Sequence[Measured], ablation: Measured, labels: Mapping[str, str]) -> str:
    """A column for each group of tokens: their number, the loss of each arm, and its differences."""
    rows = [["tokens", *(f"{group['tokens']:,}" for group in groups)]]
    rows += [
        [f"{label}: loss", *(number(g["loss"].get(run), ".4f") for g in groups)]
        for run, label in labels.items()
    ]
    baseline = ablation["baseline"]
    for run, label in labels.items() if baseline else ():
        if run != baseline:
            name = f"{label}, minus {labels[baseline]}"
            rows.append([name, *(cell(group["less_baseline"], run) for group in groups)])
    for run, label in labels.items():
        for control in ablation["overall"]["less_untouched"][run]:
            name = f"{label}: {control_name(control)}"
            rows.append([name, *(cell(g["less_untouched"].get(run, {}), control) for g in groups)])
    return table([head, *(group["name"] for group in groups)], rows)


def caption(ablation: Measured, labels: Mapping[str, str]) -> str:
    """The caption of the figure."""
    bars = "Bars are 95 % intervals over streams."
    costs = (
        "how much the loss of a trained model rises, in nats per token, when a part of its memory is changed"
    )
    if ablation["baseline"] is None:
        return f"What memory is worth: {costs}. {bars}"
    against = (
        f"the loss of each arm minus that of {plain(labels[ablation['baseline']])}, by the distance of "
        f"repeats in tokens; a value below zero is better"
    )
    if not any(ablation["overall"]["less_untouched"].values()):
        return f"What memory is worth: {against}. {bars}"
    return f"What memory is worth: above, {costs}; below, {against}. {bars}"


def control_name(control: str) -> str:
    """The words of a report for it."""
    part, change = control.split()
    return f"{PARTS[part]} {change}"


def cell(differences: Measured, name: str) -> str:
    """A difference in a table, or a dash if there is none."""
    return signed(measured(differences[name])) if name in differences else "–"


def measured(difference: Measured) -> Mean:
    """A difference of the file as a Mean; without an interval, it claims nothing."""
    half = difference["half_width"]
    return Mean(difference["mean"], math.nan if half is None else half, 1 if half is None else 2)
