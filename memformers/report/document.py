"""Writes the report of runs: ``report.md`` with PNG figures, and one self-contained ``report.html``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.common.files import write_text
from memformers.report.arms import Arm, arms_of, base_of
from memformers.report.curves import curves_of
from memformers.report.evidence import costs_table, not_comparable, on_one_machine, results_table, verdict
from memformers.report.figures import FIGURES, save_figures
from memformers.report.markdown import fenced, pictured
from memformers.report.page import plain, render_html
from memformers.report.position_figure import TITLE, caption, save_positions
from memformers.report.probe_section import probe_section
from memformers.report.provenance import how_it_was_made
from memformers.report.recall_page import write_recall_report
from memformers.report.recall_summary import write_summary
from memformers.runs.finished import FinishedRun, read_probe, read_runs
from memformers.runs.folder import CONFIG, FACTS, PAGE, PROBE, REPORT, flatten
from memformers.runs.folder import FIGURES as FOLDER
from memformers.runs.plan import read_plan

CAPTIONS = {
    "validation_tokens": "Validation loss over {}, with memory carried from segment to segment.",
    "differences": "The same loss minus that of {} from the same seed; a value below zero is better.",
    "validation_time": "The same loss against training time, which does not include evaluations.",
    "reconstruction_loss": "The loss of the compression functions. It measures how much attention changes "
    "when memories are replaced by their slots; for an auto-encoding arm, it is the error of a decoder that "
    "restores the memories from the slots.",
    "tokens_per_second": "Training speed. Other programs on the machine can reduce it.",
}


def write_report(folder: Path) -> Path:
    """Write the report of a run's or an experiment's ``folder`` into it; returns ``report.html``.

    Raises ValueError for a folder without a run.
    """
    if (plan := read_plan(folder)) and plan.task == "recall":
        return write_recall_report(write_summary(folder, plan), folder)
    runs = read_runs(folder)
    arms = arms_of(runs)
    base = base_of(arms)
    left_out = ["validation_time"] if len(arms) > 1 and not_comparable(arms) else []
    figures = save_figures(curves_of(arms, base), folder / FOLDER, left_out)
    probe = read_probe(folder)
    parts = compose(arms, base, figures, folder)
    if probe:
        parts[-1:-1] = probe_section(arms, probe, folder)  # before the section on how it was made
    elif (folder / PROBE).exists():
        parts.insert(
            1, "> **The probe was left out**: it measured other runs or checkpoints. Probe these runs again."
        )
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    write_text(folder / PAGE, render_html(markdown, folder))
    return folder / PAGE


def compose(arms: Sequence[Arm], base: Arm, figures: dict[str, Path], folder: Path) -> list[str]:
    """The report as paragraphs of Markdown."""
    runs = [run for arm in arms for run in arm.runs]
    others = differing_settings(arms, base)
    parts = [f"# {title(runs[0].facts['corpus'])}", *warnings(arms, missing(folder), others)]
    if len({(run.facts["corpus"]["sha256"], run.config["tokens"]) for run in runs}) == 1:
        parts += verdict(arms, base)
    parts += [results_table(arms, base), *drawn(arms, base, figures, folder)]
    parts += ["## What each arm costs", costs_table(arms, base)]
    return [*parts, *samples(arms), how_it_was_made(arms, base, others, folder)]


def samples(arms: Sequence[Arm]) -> list[str]:
    """The text that each arm generated at the end, and its prompt, which older versions did not save."""
    runs = {arm.label: arm.first for arm in arms if arm.first.sample}
    if not runs:
        return []
    prompts = {label: (run.result or {}).get("prompt") for label, run in runs.items()}
    parts = [
        "## Samples",
        "Each arm wrote its text after its training, at temperature 0.8. The prompt is the beginning of the "
        "held-out text.",
    ]
    shared = len(set(prompts.values())) == 1
    if shared and (prompt := next(iter(prompts.values()))) is not None:
        parts.append(f"All arms continue the same prompt{shown(prompt)}")
    for label, run in runs.items():
        parts.append(f"### {plain(label)}")
        if not shared and (prompt := prompts[label]) is not None:
            parts.append(f"The prompt{shown(prompt)}\n\nThe text that the arm wrote:")
        parts.append(fenced(run.sample))
    return parts


def shown(prompt: str) -> str:
    """A prompt at the end of a sentence. One without letters and digits, as older versions took where the
    held-out text begins at the end of a line, has its line breaks as marks: it would look like nothing."""
    if any(character.isalnum() for character in prompt):
        return f":\n\n{fenced(prompt)}"
    marked = prompt.replace("\n", "⏎")
    return f", of {len(prompt)} characters, where ⏎ is a line break:\n\n{fenced(marked)}"


def drawn(arms: Sequence[Arm], base: Arm, figures: dict[str, Path], folder: Path) -> list[str]:
    """The figures with their captions."""
    over = {"validation_tokens": what_curves_are_over(arms), "differences": plain(base.label)}
    counts = sorted({len(arm.counted) for arm in arms})
    seeds = " or ".join(map(str, counts))
    bands = (
        f" Curves are means over {seeds} seeds, and bands are 95 % intervals by Student's t."
        if counts[-1] > 1
        else ""
    )
    captions = {name: CAPTIONS[name].format(over.get(name, "")) + bands for name in figures}
    parts = [pictured(path, FIGURES[name].title, captions[name], folder) for name, path in figures.items()]
    if path := save_positions(arms, base, folder / FOLDER):
        parts.append(pictured(path, TITLE, caption(arms, plain(base.label), bands), folder))
    return parts


def what_curves_are_over(arms: Sequence[Arm]) -> str:
    """How much of the held-out text the evaluations of the validation curves read: all of it, unless a record
    has another number of tokens than the result."""
    parts = {}
    for arm in arms:
        records = [record for run in arm.counted for record in run.metrics]
        read = {r.get("evaluated_tokens") for r in records if "loss.valid" in r} or {None}
        whole = (arm.first.result or {}).get("evaluated_tokens")
        told = [f"{int(n):,} tokens" for n in sorted(n for n in read if n is not None and n != whole)]
        parts[plain(arm.label)] = " or ".join(told + ["all"] * bool(read & {whole, None}))
    if set(parts.values()) == {"all"}:
        return "the whole held-out text"
    if len(set(parts.values())) == 1:
        return f"the same {next(iter(parts.values()))} of the held-out text (the table's losses: all of it)"
    said = ", ".join(f"{name}: {part}" for name, part in parts.items())
    return f"unequal parts of the held-out text ({said}; the table's losses: all of it)"


def title(corpus: dict[str, Any]) -> str:
    """The headline, with a warning if the corpus is a stand-in."""
    stand_in = " — NOT Tiny Shakespeare, which was not available"
    name = corpus["name"] + (stand_in if corpus["stands_in_for_tiny_shakespeare"] else "")
    return f"How much memory helps: transformers compared on {plain(name)}"


def missing(folder: Path) -> list[str]:
    """The names of a comparison's runs without results, each with the reason."""
    planned = plan.runs if (plan := read_plan(folder)) else {}
    names = dict.fromkeys([*planned, *(path.parent.name for path in folder.glob(f"*/{CONFIG}"))])
    return [
        f"{name} {'failed before its first step' if (folder / name / CONFIG).exists() else 'was not started'}"
        for name in names
        if not (folder / name / FACTS).exists()
    ]


def differing_settings(arms: Sequence[Arm], base: Arm) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds only if an arm has none in common with
    ``base``."""
    settings = [shared_settings(run) for arm in arms for run in arm.runs]
    names = dict.fromkeys(name for config in settings for name in config)
    found = [name for name in names if len({json.dumps(config.get(name)) for config in settings}) > 1]
    if len({run.facts["corpus"]["sha256"] for arm in arms for run in arm.runs}) > 1:
        found.append("text")
    if not all({run.seed for run in arm.runs} & {run.seed for run in base.runs} for arm in arms):
        found.append("seed")
    return found


def warnings(arms: Sequence[Arm], absent: Sequence[str], others: Sequence[str]) -> list[str]:
    """What a reader must know before trusting the numbers; ``others`` are the settings besides the memory in
    which the arms differ."""
    found = []
    runs = [run for arm in arms for run in arm.runs]
    if runs[0].facts["corpus"]["stands_in_for_tiny_shakespeare"]:
        found.append(
            "> **The text is the built-in play.** Tiny Shakespeare was neither found nor "
            "downloadable. Don't compare losses here with published ones."
        )
    for arm in arms:
        for run in arm.runs:
            if run.result is None:
                which = f", seed {run.seed}," if len(arm.runs) > 1 else ""
                left = (
                    "it is not part of any mean or curve"
                    if arm.results
                    else "its curves end where it stopped"
                )
                found.append(f"> **{plain(arm.label)}{which} did not finish**; {left}.")
    found += [f"> **{plain(name)}** and is missing here." for name in absent]
    if not on_one_machine(runs):
        found.append(
            "> **Not all runs had the same machine and package versions**: don't compare their times."
        )
    if others:
        found.append(
            f"> **These runs differ in more than their memory**: {plain(', '.join(others))}; see the "
            f"settings below."
        )
    return found


OF_THE_MEMORY = {
    f"model.{name}" for name in ("model", "mem_len", "c_mem_len", "compression_rate", "compression",
                                 "compression_start", "compression_loss", "bptt")
}  # fmt: skip


def shared_settings(run: FinishedRun) -> dict[str, Any]:
    """A run's config without the settings that a comparison may vary, the memory and the seed, and without
    the path of the text, which its checksum identifies."""
    vary = OF_THE_MEMORY | {"seed", "data"}
    return {name: value for name, value in flatten(run.config) if name not in vary}
