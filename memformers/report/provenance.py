"""The provenance of a report: everything needed to make it again."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from memformers.report.arms import Arm
from memformers.report.markdown import table
from memformers.report.page import plain
from memformers.report.settings import name_of, settings_tables
from memformers.runs.finished import FinishedRun
from memformers.runs.folder import read_card
from memformers.runs.plan import read_plan

FAIRNESS = (
    "All arms have the same text, seeds, order of segments, number of training tokens, optimizer, width and "
    "depth. From the same seed, all arms start with the same weights in all modules that they share. "
)
METHOD = (
    "Validation reads the text in its order, in eval mode, from an empty memory that is then carried from "
    "segment to segment; the losses in the table are over the whole held-out text. Attention operations are "
    "those of one token with full memories; a multiply-add counts as two, and scores that the causal mask "
    "hides are included. The folder figures, beside this report, has each figure as PNG and as SVG, and its "
    "data as CSV."
)


def how_it_was_made(arms: Sequence[Arm], base: Arm, others: Sequence[str], folder: Path) -> str:
    """The last section of the report of ``folder``; ``others`` are the settings besides the memory in
    which the arms differ."""
    alike = FAIRNESS if not others and len(arms) > 1 else ""
    parts = ["## How it was made", alike + parameters_that_differ(arms, base) + METHOD]
    return "\n\n".join([*parts, facts_table(arms, folder), *settings_tables(arms)])


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
    """Name, date, command, commit, text and machine. Older versions did not record all of them."""
    runs = [run for arm in arms for run in arm.runs]
    corpus = arms[0].first.facts["corpus"]
    environments = [run.facts["environment"] for run in runs]
    plan = read_plan(folder)
    commands = plan.commands if plan and plan.commands else (run.facts.get("command") for run in runs)
    rows = {
        "name": folder.resolve().name,
        "trained": dates(runs),
        "command": distinct(commands),
        "git commit": distinct(run.facts.get("commit") for run in runs),
        "corpus": f"{corpus['name']}: {name_of(corpus['source'])}",
        "characters, sha256": f"{corpus['characters']:,}, {corpus['sha256']}",
        "device": distinct(f"{e['device']}, {e['threads']} threads" for e in environments),
        "system": distinct(f"{e['platform']}, Python {e['python']}" for e in environments),
        "packages": distinct(", ".join(f"{n} {v}" for n, v in e["packages"].items()) for e in environments),
    }
    return table(["", "value"], [[name, value] for name, value in rows.items() if value])


def dates(runs: Sequence[FinishedRun]) -> str:
    """The times when the training of ``runs`` began and ended."""
    cards = [read_card(run.folder) for run in runs]
    times = min(card.started for card in cards), max(card.ended for card in cards)
    return " to ".join(f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M} UTC" for t in times if t)


def distinct(values: Iterable[str | None]) -> str:
    """Each of ``values`` once, without unknown ones."""
    return "; ".join(dict.fromkeys(value for value in values if value))
