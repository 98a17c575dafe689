"""The last section of a report: everything needed to make it again."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memformers.report.arms import Arm
from memformers.report.markdown import DASH, plain, table
from memformers.report.sections import all_runs, differing_settings
from memformers.runs.finished import FinishedRun
from memformers.runs.folder import Card, flatten, known_card
from memformers.runs.plan import read_plan
from memformers.runs.settings import unused

FAIRNESS = (
    "All arms have the same data, seeds, order of segments, number of training tokens, optimizer, width and "
    "depth. From the same seed, all arms start with the same weights in all modules that they share. "
)
COSTS = (
    "Attention operations are those of one token with full memories; a multiply-add counts as two, and "
    "scores that the causal mask hides are included. The folder figures, beside this report, has each figure "
    "as PNG, SVG and PDF, and its data as CSV."
)


def how_it_was_made(arms: Sequence[Arm], base: Arm, folder: Path, method: str) -> list[str]:
    """The last section of the report of ``folder``; ``method`` says how its task is measured."""
    alike = FAIRNESS if len(arms) > 1 and not differing_settings(arms, base) else ""
    return [
        "## How it was made",
        alike + parameters_that_differ(arms, base) + method + COSTS,
        facts_table(arms, folder),
        *settings_tables(arms),
    ]


def parameters_that_differ(arms: Sequence[Arm], base: Arm) -> str:
    """How many more or fewer parameters arms have than ``base``, in a sentence; empty if there is no
    difference."""
    level = base.first.facts["parameters"]
    more = {arm.label: arm.first.facts["parameters"] - level for arm in arms}
    told = [
        f"{plain(label)} has {abs(n):,} {'more' if n > 0 else 'fewer'} parameters than {plain(base.label)} "
        f"({abs(n) / level:.1%})"
        for label, n in more.items()
        if n
    ]
    return f"The arms are not of equal size: {'; '.join(told)}. " if told else ""


def facts_table(arms: Sequence[Arm], folder: Path) -> str:
    """Name, date, command, commit, data and machine."""
    runs = all_runs(arms)
    corpus = runs[0].facts["corpus"]
    environments = [run.facts["environment"] for run in runs]
    plan = read_plan(folder)
    commands = plan.commands if plan and plan.commands else (run.facts.get("command") for run in runs)
    characters = f"{corpus['characters']:,}, {corpus['sha256']}" if "sha256" in corpus else ""
    rows = {
        "name": folder.resolve().name,
        "trained": dates(runs),
        "command": distinct(commands),
        "git commit": distinct(run.facts.get("commit") for run in runs),
        "corpus": f"{corpus['name']}: {name_of(corpus['source'])}",
        "characters, sha256": characters,
        "runs at the same time": distinct(f"{e['jobs']}" for e in environments if "jobs" in e),
        "device": distinct(f"{e['device']}, {e['threads']} threads" for e in environments),
        "system": distinct(f"{e['platform']}, Python {e['python']}" for e in environments),
        "packages": distinct(", ".join(f"{n} {v}" for n, v in e["packages"].items()) for e in environments),
    }
    return table(["", "value"], [[name, value] for name, value in rows.items() if value])


def dates(runs: Sequence[FinishedRun]) -> str:
    """The times when the training of ``runs`` began and ended."""
    cards = [card for run in runs if (card := known_card(run.folder))] or [Card("", "")]
    times = min(card.started for card in cards), max(card.ended for card in cards)
    return " to ".join(f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M} UTC" for t in times if t)


def distinct(values: Iterable[str | None]) -> str:
    """Each of ``values`` once, without unknown ones."""
    return "; ".join(dict.fromkeys(value for value in values if value))


def settings_tables(arms: Sequence[Arm]) -> list[str]:
    """The settings of ``arms``, those that differ and those that all share, as paragraphs; one that no arm
    uses is left out."""
    of_arms = [shown_settings(arm) for arm in arms]
    names = dict.fromkeys(name for settings in of_arms for name in settings)
    rows = {name: [settings.get(name, DASH) for settings in of_arms] for name in names}
    differing = [[name, *row] for name, row in rows.items() if len(set(row)) > 1]
    shared = [[name, row[0]] for name, row in rows.items() if len(set(row)) == 1 and row[0] != DASH]
    parts = []
    if differing:
        parts = [
            f"Settings that differ between the arms; {DASH} marks a setting that an arm doesn't use:",
            table(["setting", *(arm.label for arm in arms)], differing),
        ]
    return [
        *parts,
        "Settings of all arms:" if len(arms) > 1 else "Settings:",
        table(["setting", "value"], shared),
    ]


def shown_settings(arm: Arm) -> dict[str, str]:
    """An arm's settings by their names, as a report shows them."""
    config, facts = dict(flatten(arm.first.config)), arm.first.facts
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    read = {"seed": seeds, "data": config["data"] or facts["corpus"]["name"]}
    used = config | facts.get("decided", {}) | read
    return {name: in_words(used[name]) for name in config} | dict.fromkeys(unused(config), DASH)


def in_words(value: Any) -> str:
    """A setting's value; of an absolute path only the name, since the folders are private."""
    if value is None:
        return "not given"
    if isinstance(value, str):
        return name_of(value) or "none" if value == value.strip() else json.dumps(value)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def name_of(path: str) -> str:
    """The name of an absolute path; any other text unchanged."""
    return Path(path).name if Path(path).is_absolute() else path
