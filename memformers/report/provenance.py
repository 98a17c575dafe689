"""The end of a report: everything needed to make it again, and its numbers."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memformers.common.files import csv_text, write_json, write_text
from memformers.report.arms import ArmRuns
from memformers.report.markdown import DASH, prose, table
from memformers.report.sections import all_runs, unfair_settings
from memformers.runs.folder import RESULTS, TABLE, Card, flatten, known_card, read_plan
from memformers.runs.reader import differing_settings


def how_it_was_made(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, method: str) -> list[str]:
    """The last section of the report of ``folder``; ``method`` says how its task is measured."""
    alike = [prose("fairness")] if len(arms) > 1 and not unfair_settings(arms, base) else []
    level = base.first.facts["parameters"]
    more = {arm.label: n for arm in arms if (n := arm.first.facts["parameters"] - level)}
    sizes = [prose("unequal_size", more=more, base=base.label, level=level)] if more else []
    tables = [facts_table(arms, folder), "### Settings", *settings_tables(arms)]
    return ["## How it was made", " ".join([*alike, *sizes, method, prose("costs")]), *tables]


def write_results(
    folder: Path, arms: Sequence[ArmRuns], base: ArmRuns, numbers: Callable[[ArmRuns], dict[str, Any]],
    head: Sequence[str], lines: Sequence[Sequence[Any]], **about: Any,
) -> None:  # fmt: skip
    """Write the ``numbers`` of each arm, its means over seeds with half the widths of their 95 % intervals,
    and ``about`` all, as ``results.json``, and what each training run came to as ``results.csv``."""
    found = [
        {"name": arm.name, "label": arm.label, "seeds": list(arm.results), **numbers(arm)} for arm in arms
    ]
    write_json(folder / RESULTS, {"base": base.name, **about, "arms": found})
    write_text(folder / TABLE, csv_text(head, lines))


def facts_table(arms: Sequence[ArmRuns], folder: Path) -> str:
    """[`facts_of`][] as a table."""
    return table(["", "value"], [*map(list, facts_of(arms, folder).items())])


def facts_of(arms: Sequence[ArmRuns], folder: Path) -> dict[str, str]:
    """Name, date, command, commit, data and machine."""
    runs = all_runs(arms)
    corpus = runs[0].facts["corpus"]
    environments = [run.facts["environment"] for run in runs]
    plan = read_plan(folder)
    commands = plan.commands if plan and plan.commands else (run.facts.get("command") for run in runs)
    cards = [card for run in runs if (card := known_card(run.folder))] or [Card("", "")]
    times = min(card.started for card in cards), max(card.ended for card in cards)
    dates = [f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M} UTC" for t in times if t]
    characters = f"{corpus['characters']:,}, {corpus['sha256']}" if "sha256" in corpus else ""

    def distinct(values: Iterable[str | None]) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value))

    rows = {
        "name": folder.resolve().name,
        "trained": " to ".join(dates),
        "command": distinct(commands),
        "git commit": distinct(run.facts.get("commit") for run in runs),
        "corpus": f"{corpus['name']}: {name_of(corpus['source'])}",
        "characters, sha256": characters,
        "runs at the same time": distinct(f"{e['jobs']}" for e in environments if "jobs" in e),
        "device": distinct(f"{e['device']}, {e['threads']} threads" for e in environments),
        "system": distinct(f"{e['platform']}, Python {e['python']}" for e in environments),
        "packages": distinct(", ".join(f"{n} {v}" for n, v in e["packages"].items()) for e in environments),
    }
    return {name: value for name, value in rows.items() if value}


def settings_tables(arms: Sequence[ArmRuns]) -> list[str]:
    """The settings of ``arms``, those that differ and those that all share, as paragraphs; one that no arm
    uses is left out."""
    of_arms = [shown_settings(arm) for arm in arms]
    differing = differing_settings(of_arms)
    shared = {name: value for name, value in of_arms[0].items() if name not in differing and value != DASH}
    rows = [[name, *(settings.get(name, DASH) for settings in of_arms)] for name in differing]
    head = ["setting", *(arm.label for arm in arms)]
    parts = [prose("settings_differ"), table(head, rows, numbers=True)] if rows else []
    title = "Settings of all models:" if len(arms) > 1 else "Settings:"
    return [*parts, title, table(["setting", "value"], [*shared.items()])]


def shown_settings(arm: ArmRuns) -> dict[str, str]:
    """An arm's settings by their names, as a report shows them."""
    run, config = arm.first, dict(flatten(arm.first.config))
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    used = run.settings | {"seed": seeds, "data": config["data"] or run.facts["corpus"]["name"]}
    no_use = run.facts.get("unused", ())
    return {name: DASH if name in no_use else in_words(value) for name, value in used.items()}


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
