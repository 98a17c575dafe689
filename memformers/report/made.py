"""How runs were made: the command, the data, the machine, and the settings."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memformers.report.arms import ArmRuns
from memformers.report.claims import all_runs, unfair_settings
from memformers.report.data import Block, Code, Details, Paragraphs, Section, Table, Text, prose
from memformers.report.numbers import DASH
from memformers.runs.folder import flatten, known_card, read_plan
from memformers.runs.reader import differing_settings


def how_it_was_made(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, method: Text) -> Section:
    """The last section of the report of ``folder``; ``method`` says how its task is measured."""
    sentences: list[Text] = []
    if len(arms) > 1 and not unfair_settings(arms, base):
        sentences.append(prose("fairness"))
    level = base.first.facts["parameters"]
    more = {arm.label: arm.first.facts["parameters"] - level for arm in arms}
    more = {label: difference for label, difference in more.items() if difference}
    if more:
        sentences.append(prose("unequal_size", more=more, base=base.label, level=level))
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
    environments: list[dict[str, Any]] = []
    for run in runs:
        environments += run.facts.get("environments", [run.facts["environment"]])
    plan = read_plan(folder)
    commands = plan.commands if plan and plan.commands else [run.facts.get("command") for run in runs]
    packages = []
    for environment in environments:
        packages.append(", ".join(f"{name} {version}" for name, version in environment["packages"].items()))
    checksum = f"{corpus['characters']:,}, {corpus['sha256']}" if "sha256" in corpus else ""

    rows = {
        "command": distinct(commands, "\n"),
        "name": folder.resolve().name,
        "trained": dates_of(arms),
        "git commit": distinct(run.facts.get("commit") for run in runs),
        "corpus": f"{corpus['name']}: {shown_path(corpus['source'])}",
        "characters, sha256": checksum,
        "runs at the same time": distinct(f"{e['jobs']}" for e in environments if "jobs" in e),
        "device": distinct(f"{e['device']}, {e['threads']} threads" for e in environments),
        "system": distinct(f"{e['platform']}, Python {e['python']}" for e in environments),
        "packages": distinct(packages),
    }
    return {name: value for name, value in rows.items() if value}


def distinct(values: Iterable[str | None], separator: str = "; ") -> str:
    """The different ``values``, without empty ones."""
    return separator.join(dict.fromkeys(filter(None, values)))


def dates_of(arms: Sequence[ArmRuns]) -> str:
    """When the first training started and the last one ended, as far as it is known."""
    cards = [card for run in all_runs(arms) if (card := known_card(run.folder))]
    if not cards:
        return ""
    started = min(card.started for card in cards)
    ended = max(card.ended for card in cards)
    times = [datetime.fromtimestamp(seconds, timezone.utc) for seconds in (started, ended) if seconds]
    return " to ".join(f"{time:%Y-%m-%d %H:%M} UTC" for time in times)


def settings_tables(arms: Sequence[ArmRuns]) -> list[Block]:
    """The settings of ``arms``: those that differ, and those that all share and some arm uses."""
    by_arm = [shown_settings(arm) for arm in arms]
    differing = differing_settings(by_arm)
    blocks: list[Block] = []
    if differing:
        rows = [[name, *(settings.get(name, DASH) for settings in by_arm)] for name in differing]
        head = ["setting", *(arm.label for arm in arms)]
        blocks += [prose("settings_differ"), Table(head, rows, has_numbers=True)]
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
