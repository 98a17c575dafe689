"""How runs were made: the command, the data, the machine, and the settings."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memformers.report.arms import ArmRuns, labels_of
from memformers.report.claims import all_runs, unfair_settings
from memformers.report.data import Block, Code, Details, Paragraphs, Section, Table, Text, prose
from memformers.report.numbers import DASH
from memformers.runs.card import known_card
from memformers.runs.folder import flatten
from memformers.runs.plan import read_plan
from memformers.runs.reader import differing_settings


def how_it_was_made(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, method: Text) -> Section:
    """The last section of the report of ``folder``; ``method`` says how its task is measured."""
    sentences: list[Text] = []
    if len(arms) > 1 and not unfair_settings(arms, base):
        sentences.append(prose("fairness"))
    level = base.first.facts["parameters"]
    differences = {}
    for arm in arms:
        if difference := arm.first.facts["parameters"] - level:
            differences[arm.label] = difference
    if differences:
        sentences.append(prose("unequal_size", differences=differences, base=base.label, level=level))
    sentences += [method, prose("costs")]
    settings = Details("Settings", settings_tables(arms))
    return Section("How it was made", [Paragraphs(sentences), *facts_table(arms, folder), settings])


def facts_table(arms: Sequence[ArmRuns], folder: Path) -> list[Block]:
    facts = facts_of(arms, folder)
    command = facts.pop("command", "")
    table = Table(["", "value"], list(facts.items()))
    return [Code(command), table] if command else [table]


def facts_of(arms: Sequence[ArmRuns], folder: Path) -> dict[str, str]:
    """Name, date, commands, a line for each, commit, data and machine."""
    runs = all_runs(arms)
    corpus = runs[0].facts["corpus"]
    plan = read_plan(folder)
    commands = []
    commits = []
    jobs = []
    devices = []
    systems = []
    packages = []
    for run in runs:
        commands.append(run.facts.get("command"))
        commits.append(run.facts.get("commit"))
        # A training that was resumed has several.
        for environment in run.facts.get("environments", [run.facts["environment"]]):
            jobs.append(f"{environment.get('jobs', '')}")
            devices.append(f"{environment['device']}, {environment['threads']} threads")
            systems.append(f"{environment['platform']}, Python {environment['python']}")
            packages.append(", ".join(map(" ".join, environment["packages"].items())))
    checksum = f"{corpus['characters']:,}, {corpus['sha256']}" if "sha256" in corpus else ""

    rows = {
        "command": distinct(plan.commands if plan and plan.commands else commands, "\n"),
        "name": folder.resolve().name,
        "trained": dates_of(arms),
        "git commit": distinct(commits),
        "corpus": f"{corpus['name']}: {shown_path(corpus['source'])}",
        "characters, sha256": checksum,
        "runs at the same time": distinct(jobs),
        "device": distinct(devices),
        "system": distinct(systems),
        "packages": distinct(packages),
    }
    return {name: value for name, value in rows.items() if value}


def distinct(values: Iterable[str | None], separator: str = "; ") -> str:
    """The different ``values``, without empty ones."""
    return separator.join(dict.fromkeys(filter(None, values)))


def dates_of(arms: Sequence[ArmRuns]) -> str:
    """When the first training started and the last one ended, as far as it is known."""
    starts = []
    ends = []
    for run in all_runs(arms):
        if card := known_card(run.folder):
            starts.append(card.started)
            ends.append(card.ended)
    dates = []
    for seconds in (min(starts, default=0.0), max(ends, default=0.0)):
        if seconds:
            dates.append(f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC")
    return " to ".join(dates)


def settings_tables(arms: Sequence[ArmRuns]) -> list[Block]:
    """The settings of ``arms``: those that differ, and those that all share and some arm uses."""
    by_arm = list(map(shown_settings, arms))
    differing = differing_settings(by_arm)
    blocks: list[Block] = []
    if differing:
        rows = []
        for name in differing:
            rows.append([name, *(settings.get(name, DASH) for settings in by_arm)])
        blocks += [prose("settings_differ"), Table(["setting", *labels_of(arms)], rows, has_numbers=True)]
    shared = []
    for name, value in by_arm[0].items():
        if name not in differing and value != DASH:
            shared.append([name, value])
    title = "Settings of all models:" if len(arms) > 1 else "Settings:"
    return [*blocks, title, Table(["setting", "value"], shared)]


def shown_settings(arm: ArmRuns) -> dict[str, str]:
    run = arm.first
    config = dict(flatten(run.config))
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    used = run.settings | {"seed": seeds, "data": config["data"] or run.facts["corpus"]["name"]}
    unused = run.facts.get("unused", ())
    return {name: DASH if name in unused else setting_text(value) for name, value in used.items()}


def setting_text(value: Any) -> str:
    """A setting's value; of an absolute path only the name."""
    if value is None:
        return "not given"
    if isinstance(value, str):
        return shown_path(value) or "none" if value == value.strip() else json.dumps(value)
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def shown_path(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path
