"""Run folders to a report: ``report.md`` with PNG figures, and one self-contained ``report.html``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.common.files import write_text
from memformers.report.arms import Arm, arms_of, base_of
from memformers.report.curves import curves_of
from memformers.report.evidence import costs_table, on_one_machine, results_table, verdict
from memformers.report.figures import save_figures
from memformers.report.markdown import fenced, pictured, table
from memformers.report.page import plain, render_html
from memformers.report.probe_section import probe_section
from memformers.runs.finished import FinishedRun, read_probe, read_runs
from memformers.runs.folder import CONFIG, FACTS, FIGURES, PAGE, PROBE, REPORT
from memformers.runs.metrics import flatten
from memformers.runs.plan import read_plan

CAPTIONS = {
    "validation_tokens": "Validation loss over {}, memory carried, against the training tokens seen.",
    "differences": "The same validation loss, less that of {} from the same seed: below zero is better.",
    "validation_time": "Validation loss against training time, evaluations not counted.",
    "reconstruction_loss": "How much attention changes when memories give way to their compressions.",
    "tokens_per_second": "Training speed.",
}


def write_report(folder: Path) -> Path:
    """Write the report of a run's or a comparison's ``folder`` into it; returns ``report.html``.

    Raises ValueError for a folder without a run.
    """
    runs = read_runs(folder)
    arms = arms_of(runs)
    base = base_of(arms)
    figures = save_figures(curves_of(arms, base), folder / FIGURES)
    probe = read_probe(folder)
    parts = compose(arms, base, figures, folder)
    if probe:
        parts[-1:-1] = probe_section(arms, probe, folder)  # before how it was made
    elif (folder / PROBE).exists():
        parts.insert(1, "> **The probe was left out**: it is of other runs or checkpoints. Probe them again.")
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
    parts.append("## Samples\n\nThe same prompt, from the held-out text, temperature 0.8.")
    parts += [f"### {plain(arm.label)}\n\n{fenced(arm.first.sample)}" for arm in arms if arm.first.sample]
    parts.append(how_it_was_made(arms, others))
    return parts


def drawn(arms: Sequence[Arm], base: Arm, figures: dict[str, Path], folder: Path) -> list[str]:
    """The figures with their captions."""
    over = {"validation_tokens": what_curves_are_over(arms), "differences": plain(base.label)}
    counts = sorted({len(arm.counted) for arm in arms})
    seeds = " or ".join(map(str, counts))
    bands = f" Means over {seeds} seeds; bands: 95 % intervals, by Student's t." if counts[-1] > 1 else ""
    captions = {name: CAPTIONS[name].format(over.get(name, "")) + bands for name in figures}
    return [pictured(path, captions[name], folder) for name, path in figures.items()]


def what_curves_are_over(arms: Sequence[Arm]) -> str:
    """How much of the held-out text the evaluations read that validation curves are drawn from; all of it,
    unless a record says its number of tokens and the result another."""
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
        return f"the same {next(iter(parts.values()))} of the held-out text (the table: all of it)"
    said = ", ".join(f"{name}: {part}" for name, part in parts.items())
    return f"unequal parts of the held-out text ({said}; the table: all of it)"


def title(corpus: dict[str, Any]) -> str:
    """The headline; loud where the corpus is a stand-in."""
    stand_in = " — NOT Tiny Shakespeare, which could not be had"
    name = corpus["name"] + (stand_in if corpus["stands_in_for_tiny_shakespeare"] else "")
    return f"What memory buys: transformers compared on {plain(name)}"


def missing(folder: Path) -> list[str]:
    """The names of a comparison's runs that have nothing to show, each with the reason."""
    planned = plan.runs if (plan := read_plan(folder)) else {}
    names = dict.fromkeys([*planned, *(path.parent.name for path in folder.glob(f"*/{CONFIG}"))])
    return [
        f"{name} {'failed before its first step' if (folder / name / CONFIG).exists() else 'was not begun'}"
        for name in names
        if not (folder / name / FACTS).exists()
    ]


def differing_settings(arms: Sequence[Arm], base: Arm) -> list[str]:
    """What the arms differ in beside their memory; seeds only where an arm shares none with ``base``."""
    settings = [shared_settings(run) for arm in arms for run in arm.runs]
    names = dict.fromkeys(name for config in settings for name in config)
    found = [name for name in names if len({json.dumps(config.get(name)) for config in settings}) > 1]
    if len({run.facts["corpus"]["sha256"] for arm in arms for run in arm.runs}) > 1:
        found.append("text")
    if not all({run.seed for run in arm.runs} & {run.seed for run in base.runs} for arm in arms):
        found.append("seed")
    return found


def warnings(arms: Sequence[Arm], absent: Sequence[str], others: Sequence[str]) -> list[str]:
    """What a reader must know before trusting the numbers; ``others`` are the settings beside the memory in
    which the arms differ."""
    found = []
    runs = [run for arm in arms for run in arm.runs]
    if runs[0].facts["corpus"]["stands_in_for_tiny_shakespeare"]:
        found.append(
            "> **The text is the built-in play.** Tiny Shakespeare was neither found nor "
            "downloadable. Losses here can't be set beside published ones."
        )
    for arm in arms:
        for run in arm.runs:
            if run.result is None:
                which = f", seed {run.seed}," if len(arm.runs) > 1 else ""
                left = (
                    "it counts in no mean and no curve" if arm.results else "its curves end where it stopped"
                )
                found.append(f"> **{plain(arm.label)}{which} did not finish**; {left}.")
    found += [f"> **{plain(name)}** and is missing here." for name in absent]
    if not on_one_machine(runs):
        found.append("> **Not all runs were made on the same machine and versions**: don't compare times.")
    if others:
        found.append(
            f"> **These runs differ in more than their memory**: {plain(', '.join(others))}; see the "
            f"settings below."
        )
    return found


def how_it_was_made(arms: Sequence[Arm], others: Sequence[str]) -> str:
    """Everything needed to make the report again."""
    runs = [arm.first for arm in arms]
    corpus, environment = runs[0].facts["corpus"], runs[0].facts["environment"]
    packages = ", ".join(f"{name} {v}" for name, v in environment["packages"].items())
    facts = [
        ["corpus", f"{corpus['name']}: {corpus['source']}"],
        ["characters, sha256", f"{corpus['characters']:,}, {corpus['sha256']}"],
        ["device", f"{environment['device']}, {environment['threads']} threads"],
        ["system", f"{environment['platform']}, Python {environment['python']}"],
        ["packages", packages],
    ]
    configs = [dict(flatten(run.config)) for run in runs]
    for arm, config in zip(arms, configs, strict=True):
        config["seed"] = ", ".join(str(run.seed) for run in arm.runs)
    names = list(dict.fromkeys(name for config in configs for name in config))
    settings = [[name, *(str(config.get(name, "–")) for config in configs)] for name in names]
    return "\n\n".join(
        [
            "## How it was made",
            (FAIRNESS if not others and len(arms) > 1 else "")
            + "Validation is contiguous, in eval mode, from an empty memory that is then carried; the "
            "table's is over the whole held-out text. Attention operations are of one token with full "
            "memories, a multiply-add counted as two, scores that the causal mask hides among them.",
            table(["", "value"], facts),
            table(["setting", *(arm.label for arm in arms)], settings),
        ]
    )


FAIRNESS = (
    "Same text, seeds, order of segments, token budget, optimizer, width and depth; from the same seed "
    "all arms start with the same weights in everything they share. "
)
OF_THE_MEMORY = {
    f"model.{name}" for name in ("model", "mem_len", "c_mem_len", "compression_rate", "compression",
                                 "compression_start", "compression_loss")
}  # fmt: skip


def shared_settings(run: FinishedRun) -> dict[str, Any]:
    """A run's config without what a comparison may vary, the memory and the seed, and without where the text
    lay, which is known by its checksum."""
    vary = OF_THE_MEMORY | {"seed", "data"}
    return {name: value for name, value in flatten(run.config) if name not in vary}
