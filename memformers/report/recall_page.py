"""The report of a recall experiment: ``report.md`` with its figures, and a self-contained ``report.html``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memformers.report.markdown import number, table, write_page
from memformers.report.recall_figures import save_recall_figures
from memformers.runs.folder import FIGURES, flatten

FEWEST_TOKENS = 500_000
"""Shorter trainings show that everything works, and not what a memory is worth."""
BANDS = "Bands are 95 % intervals over {} seeds, by Student's t. "
TITLES = {
    "accuracy": "Share of right answers, by how long ago the value was set",
    "controls": "Share of right answers with changed memories, by how long ago the value was set",
}
CAPTIONS = {
    "accuracy": "The share of answers that are right, by how many positions ago the value was set. Vertical "
    "lines, and the bars at the top, show how far one layer of each arm looks back from the end of its "
    "segment. {}",
    "controls": "The same models without further training. Before each segment, a part of the memory was "
    "zeroed, or swapped with that of another stream. Grey marks the distances at which one layer sees only "
    "slots. {}",
}
PLACES = ("segment", "memory", "slots", "beyond")


def write_recall_report(summary: Mapping[str, Any], folder: Path) -> Path:
    """Write the report of ``summary``, as ``results.json`` has it, into ``folder``; returns its page."""
    figures = save_recall_figures(summary, folder / FIGURES)
    one = "There is only one seed, so there are no bands. "
    band = BANDS.format(summary["seeds"]) if summary["seeds"] > 1 else one
    parts = ["# Recall by distance: memories with equal numbers of keys", *warnings(summary)]
    parts += [claim(summary), how_it_is_asked(summary)]
    parts += [
        f"![{TITLES[name]}]({FIGURES}/{path.name})\n\n{CAPTIONS[name].format(band).strip()}"
        for name, path in figures.items()
    ]
    parts += ["## What each arm costs", costs(summary), "## Right answers by distance", by_distance(summary)]
    if any(arm["controls"] for arm in summary["arms"]):
        parts += ["## Causal controls by the place of the value", CONTROLS, by_place(summary)]
    parts += ["## How it was made", how_it_was_made(summary)]
    return write_page(parts, folder)


CONTROLS = (
    "Shares of right answers by the place where the value was set: in the segment that the model reads, in "
    "the memory, in the compressed slots, or farther back than one layer looks (beyond). A control changes "
    "only the memory with which the model reads a segment; the next segment gets the memory that was "
    "computed without the change."
)


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if missing := "; ".join(summary["missing"]):
        found.append(f"> **Some trainings are missing**, since they failed or did not finish: {missing}.")
    if (tokens := summary["setting"]["train"]["tokens"]) < FEWEST_TOKENS:
        found.append(
            f"> **Each training has only {tokens:,} tokens**: too few to learn to recall. This report only "
            f"shows that the experiment runs."
        )
    environments = {json.dumps(e, sort_keys=True) for arm in summary["arms"] for e in arm["environments"]}
    if len(environments) > 1 or len({jobs for arm in summary["arms"] for jobs in arm["jobs"]}) > 1:
        found.append(
            "> **Not all arms had the same machine, package versions and number of trainings at a time**: "
            "don't compare their times."
        )
    return found


def claim(summary: Mapping[str, Any]) -> str:
    """The claim about the worth of the slots, as far as the seeds support one."""
    found = summary["headline"]
    if found is None:
        return (
            "Nothing is claimed, since a claim compares Transformer-XL with the Compressive Transformer, and "
            "this experiment doesn't have both."
        )
    titles = {arm["name"]: arm["title"] for arm in summary["arms"]}
    both = (
        f"Of the questions about values that were set {found['from']:,} to {found['to']:,} positions ago, "
        f"{percent(found['transformer-xl'])} are answered rightly by the first model "
        f"({titles['transformer-xl']}), and {percent(found['compressive'])} by the second "
        f"({titles['compressive']}); chance is {100 * summary['chance']:.0f} %. One layer of the first model "
        f"doesn't look back so far; one layer of the second does."
    )
    difference = found["difference"]
    if difference["half_width"] is None:
        return f"{both} There is only one seed, so nothing is claimed; --seeds 5 gives an interval."
    mean, half = 100 * difference["mean"], 100 * difference["half_width"]
    said = (
        f"{both} The paired difference over {len(found['seeds'])} seeds is {mean:+.1f} points, with a 95 % "
        f"interval from {mean - half:+.1f} to {mean + half:+.1f} by Student's t"
    )
    if abs(mean) > half:
        return f"{said}."
    return (
        f"{said}. The interval contains zero: no difference was seen, and one of up to "
        f"{abs(mean) + half:.1f} points is not excluded."
    )


def how_it_is_asked(summary: Mapping[str, Any]) -> str:
    """The task, in a paragraph."""
    stream = summary["setting"]["stream"]
    return (
        f"The models read a stream of symbols. With probability {stream['set_probability']:.3g}, a token "
        f"sets one of {stream['keys']} keys to one of {stream['values']} values; otherwise it asks for a "
        f"key. After a question, the model must predict the value that was last set for the key. For each "
        f"question, a band of distances is drawn first (below 64 positions, and then each octave), and then "
        f"a key in this band. The streams that are measured are the same for all arms and seeds, and no "
        f"model was trained on them."
    )


def costs(summary: Mapping[str, Any]) -> str:
    """A row for each arm."""
    head = ["arm", "keys per layer, without the segment's", "one layer looks back (positions)",
            "attention operations per token", "parameters", "training time", "peak memory",
            "right answers within its reach"]  # fmt: skip
    return table(
        head,
        [
            [
                arm["title"],
                f"{arm['keys']:,}",
                f"{arm['sees_back']:,}",
                f"{arm['attention_operations']:,}",
                f"{arm['parameters']:,}",
                number(arm["seconds"]["mean"], ",.0f", " s"),
                number((arm["peak_memory_bytes"] or 0) / 2**20 or None, ",.0f", " MiB"),
                percent(arm["within_reach"]),
            ]
            for arm in summary["arms"]
        ],
    )


def by_distance(summary: Mapping[str, Any]) -> str:
    """A row for each bin, a column for each arm."""
    edges, arms = summary["edges"], summary["arms"]
    return table(
        ["positions since the value was set", *(arm["title"] for arm in arms)],
        [
            [f"{edges[i]:,} – {edges[i + 1] - 1:,}", *(percent(arm["recall"]["accuracy"][i]) for arm in arms)]
            for i in range(len(edges) - 1)
        ],
    )


def by_place(summary: Mapping[str, Any]) -> str:
    """A row for each control of each arm, a column a place."""
    lines = [
        [arm["title"], name, *(percent(recall["by_place"][place]) for place in PLACES)]
        for arm in summary["arms"]
        for name, recall in {"untouched": arm["recall"], **arm["controls"]}.items()
        if arm["controls"]
    ]
    return table(["arm", "control", *PLACES], lines)


def percent(value: Mapping[str, float | None]) -> str:
    """A mean with its interval, in per cent."""
    if value["mean"] is None:
        return "–"
    half = value["half_width"]
    return f"{100 * value['mean']:.1f} %" + ("" if half is None else f" ± {100 * half:.1f}")


ARM_SETTINGS = (
    "model",
    "mem_len",
    "c_mem_len",
    "compression_rate",
    "compression",
    "compression_start",
    "frozen",
)
"""What the table of settings says of each arm, a column each."""
OF_AN_ARM = (
    "train.model.model", "train.model.vocab_size", "train.model.mem_len", "train.model.c_mem_len",
    "train.model.compression", "train.model.adaptive", "train.seed", "train.data", "train.tokenizer",
    "train.chunk_len", "train.evaluation_share", "train.checkpoint", "train.keep_checkpoints",
    "train.parallel",
)  # fmt: skip
"""The beginnings of the names of settings that differ between arms or seeds, or have no meaning here."""


def how_it_was_made(summary: Mapping[str, Any]) -> str:
    """Everything needed to make it again."""
    first = summary["arms"][0]
    environment = first["environments"][0]
    jobs = sorted({jobs for arm in summary["arms"] for jobs in arm["jobs"]})
    facts = [
        ["seeds", f"{summary['seeds']}"],
        ["trainings at a time", ", ".join(map(str, jobs))],
        ["threads of each training", str(environment["threads"])],
        ["device", environment["device"]],
        ["system", f"{environment['platform']}, Python {environment['python']}"],
        ["packages", ", ".join(f"{name} {version}" for name, version in environment["packages"].items())],
    ]
    settings = [[n, str(v)] for n, v in flatten(summary["setting"]) if not n.startswith(OF_AN_ARM)]
    of_arms = [
        [arm["title"], *(str(arm[name]) for name in ARM_SETTINGS), others(arm)] for arm in summary["arms"]
    ]
    interval = "± is half the width of a 95 % interval over seeds, by Student's t. "
    return "\n\n".join(
        [
            f"{interval if summary['seeds'] > 1 else ''}Training times do not include measurements. "
            f"Attention operations are those of one token with full memories; a multiply-add counts as two, "
            f"and scores that the causal mask hides are included.",
            table(["", "value"], facts),
            table(["arm", *ARM_SETTINGS, "other settings"], of_arms),
            table(["setting", "value in all arms"], settings),
        ]
    )


def others(arm: Mapping[str, Any]) -> str:
    """The settings of an arm besides [`ARM_SETTINGS`][]; earlier versions had none."""
    return ", ".join(f"{name} {value}" for name, value in arm.get("settings", {}).items()) or "–"
