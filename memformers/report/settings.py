"""The settings of arms as tables: those in which they differ, and those that all share."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.report.arms import Arm
from memformers.report.markdown import table
from memformers.runs.folder import flatten

UNUSED = "–"
OF_A_COMPRESSION = (
    "c_mem_len",
    "compression_rate",
    "compression",
    "compression_start",
    "compression_loss",
    "bptt",
)
LEARNING = ("conv", "dilated")
"""Compressions with weights, which have a start."""


def settings_tables(arms: Sequence[Arm]) -> list[str]:
    """The settings of ``arms`` as paragraphs of Markdown; one that no arm uses is left out."""
    shown = [shown_settings(arm) for arm in arms]
    names = dict.fromkeys(name for settings in shown for name in settings)
    rows = {name: [settings.get(name, UNUSED) for settings in shown] for name in names}
    used = {name: row for name, row in rows.items() if set(row) != {UNUSED}}
    differing = [[name, *row] for name, row in used.items() if len(set(row)) > 1]
    shared = [[name, row[0]] for name, row in used.items() if len(set(row)) == 1]
    parts = []
    if differing:
        parts += [
            f"Settings that differ between the arms; {UNUSED} marks a setting that an arm doesn't use:",
            table(["setting", *(arm.label for arm in arms)], differing),
        ]
    return [
        *parts,
        "Settings of all arms:" if len(arms) > 1 else "Settings:",
        table(["setting", "value"], shared),
    ]


def shown_settings(arm: Arm) -> dict[str, str]:
    """An arm's settings by their names, as a report shows them."""
    config = dict(flatten(arm.first.config))
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    shown = {name: seeds if name == "seed" else in_words(value) for name, value in config.items()}
    return shown | dict.fromkeys(unused(config), UNUSED)


def unused(config: Mapping[str, Any]) -> set[str]:
    """The names of those settings of a training that its model or optimizer doesn't use."""
    model, found = config["model.model"], set()
    if model != "compressive":
        found |= {f"model.{name}" for name in OF_A_COMPRESSION}
    elif config.get("model.compression", LEARNING[0]) not in LEARNING:
        found |= {"model.compression_start", "model.bptt"}
    if model != "transformer-xl":
        found.add("model.same_length")
    if model == "transformer":
        found |= {"model.mem_len", "memory_warmup", "tbptt"}
    if config.get("model.positions") != "sinusoidal":
        found |= {"model.position_features", "model.clamp_len"}
    if config.get("model.embedding") != "adaptive":
        found |= {name for name in config if name.startswith("model.adaptive.")}
    if config.get("optimizer") != "muon":
        found.add("muon_learning_rate")
    return found & config.keys()


def in_words(value: Any) -> str:
    """A setting's value; of an absolute path only the name, since the folders are private."""
    if value is None or value == "":
        return "not given"
    if isinstance(value, str):
        return name_of(value) if value == value.strip() else json.dumps(value)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def name_of(path: str) -> str:
    """The name of an absolute path; any other text unchanged."""
    return Path(path).name if Path(path).is_absolute() else path
