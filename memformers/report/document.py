"""Run folders to a report: ``report.md`` with PNG figures, and one self-contained ``report.html``."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from memformers.common.files import write_text
from memformers.report import probe_figures
from memformers.report.figures import LABELS, Curves, save_figures
from memformers.report.page import plain, render_html
from memformers.runs.finished import FinishedRun, read_probe, read_runs
from memformers.runs.folder import CONFIG, FACTS, FIGURES, PAGE, PROBE, REPORT
from memformers.runs.metrics import flatten

CAPTIONS = {
    "validation_tokens": "Validation loss over the whole held-out text, memory carried, against the "
    "training tokens seen.",
    "validation_time": "The same against training time, evaluations not counted.",
    "reconstruction_loss": "How much attention changes when memories give way to their compressions.",
    "tokens_per_second": "Training speed.",
    "recall": "Accuracy on phrases said again word for word, against the distance to their first "
    "saying. Without memory of the first saying only chance is left. Vertical lines: the farthest that "
    "one layer of each model can look, from the end of its segment.",
}


def write_report(folder: Path) -> Path:
    """Write the report of a run's or a comparison's ``folder`` into it; returns ``report.html``.

    Raises ValueError for a folder without a run.
    """
    runs = read_runs(folder)
    curves = [Curves(run.model, run.metrics, run.recall, run.sees_back) for run in runs]
    figures = save_figures(curves, folder / FIGURES)
    probe = read_probe(folder)
    parts = compose(runs, figures, folder)
    if probe:
        parts[-1:-1] = probe_section(runs, probe, folder)  # before how it was made
    elif (folder / PROBE).exists():
        parts.insert(1, "> **The probe was left out**: it is of other runs or checkpoints. Probe them again.")
    markdown = "\n\n".join(parts) + "\n"
    write_text(folder / REPORT, markdown)
    write_text(folder / PAGE, render_html(markdown, folder))
    return folder / PAGE


def compose(runs: Sequence[FinishedRun], figures: dict[str, Path], folder: Path) -> list[str]:
    """The report as paragraphs of Markdown."""
    corpus = runs[0].facts["corpus"]
    fair = only_memory_differs(runs)
    parts = [f"# {title(corpus)}", *warnings(runs, never_started(folder), fair)]
    parts += [*(verdict(runs) if fair else []), results_table(runs)]
    parts += [pictured(path, CAPTIONS[name], folder) for name, path in figures.items()]
    if any(run.recall for run in runs):
        parts.append(recall_table(runs))
    parts.append("## Samples\n\nThe same prompt, from the held-out text, temperature 0.8.")
    parts += [f"### {LABELS[run.model]}\n\n{fenced(run.sample)}" for run in runs if run.sample]
    parts.append(how_it_was_made(runs, fair))
    return parts


def pictured(path: Path, caption: str, folder: Path) -> str:
    """A figure with its caption."""
    return f"![{caption}]({path.relative_to(folder).as_posix()})\n\n{caption}"


def probe_section(runs: Sequence[FinishedRun], probe: dict[str, Any], folder: Path) -> list[str]:
    """What a probe found: how much context helps each model, and where its attention falls."""
    models = {run.folder.name: run.model for run in runs}
    context = probe["effective_context"]
    rows = [
        [LABELS[models[name]], *(effective_length(context, r, name) for r in context["recl"])]
        for name in probe["attention"]
    ]
    head = ["model"] + [f"r = {r}" for r in context["recl"]]
    drawn = probe_figures.save_probe_figures(probe, models, folder / FIGURES)
    return [
        "## What context and memory are worth",
        "Relative effective context length in tokens (Dai et al. 2019, section 4.3), of the fraction r of "
        f"tokens that are the hardest to predict from a short context; contexts in steps of "
        f"{context['step']}, {context['positions']:,} tokens of the held-out text:",
        table(head, rows),
        *(pictured(path, probe_figures.CAPTIONS[name], folder) for name, path in drawn.items()),
    ]


def effective_length(context: dict[str, Any], r: str, name: str) -> str:
    """A model's RECL, or the longest that was tried."""
    length = context["recl"][r][name]
    return f"{length:,}" if length else f"over {context['step'] * len(context['gains'][r][name]):,}"


def title(corpus: dict[str, Any]) -> str:
    """The headline; loud where the corpus is a stand-in."""
    stand_in = " — NOT Tiny Shakespeare, which could not be had"
    name = corpus["name"] + (stand_in if corpus["stands_in_for_tiny_shakespeare"] else "")
    return f"What memory buys: transformers compared on {plain(name)}"


def never_started(folder: Path) -> list[str]:
    """The names of a comparison's runs that failed before their first step."""
    return [p.parent.name for p in folder.glob(f"*/{CONFIG}") if not (p.parent / FACTS).exists()]


def only_memory_differs(runs: Sequence[FinishedRun]) -> bool:
    """Whether the runs are a fair comparison: each model once, all else alike but the memory."""
    alike = {
        json.dumps([shared_settings(run), run.facts["corpus"]["sha256"]], sort_keys=True) for run in runs
    }
    return len(alike) == 1 and len({run.model for run in runs}) == len(runs)


def warnings(runs: Sequence[FinishedRun], absent: Sequence[str], fair: bool) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if runs[0].facts["corpus"]["stands_in_for_tiny_shakespeare"]:
        found.append(
            "> **The text is the built-in play.** Tiny Shakespeare was neither found nor "
            "downloadable. Losses here can't be set beside published ones."
        )
    for run in runs:
        if run.result is None:
            found.append(f"> **{LABELS[run.model]} did not finish**; its curves end where it stopped.")
    found += [f"> **{plain(name)} failed before its first step** and is missing here." for name in absent]
    environments = [e for run in runs for e in run.facts.get("environments", [run.facts["environment"]])]
    if len({json.dumps(environment, sort_keys=True) for environment in environments}) > 1:
        found.append("> **Not all runs were made on the same machine and versions**: don't compare times.")
    if not fair:
        found.append("> **These runs differ in more than their memory**; see the settings below.")
    return found


def verdict(runs: Sequence[FinishedRun]) -> list[str]:
    """What the memory was worth, in a sentence for each memory model."""
    results = {run.model: run.result for run in runs if run.result}
    base = results.get("transformer")
    if base is None or len(results) < 2:
        return []
    lines = [
        f"After {base['tokens']:,} tokens each, the transformer without memory predicts the held-out "
        f"text at {base['bits_per_character']:.4f} bits per character."
    ]
    for model, result in results.items():
        if model != "transformer":
            gain = base["bits_per_character"] - result["bits_per_character"]
            lines.append(
                f"{LABELS[model]} is at {result['bits_per_character']:.4f}: its memory "
                f"{'saves' if gain >= 0 else 'costs'} {abs(gain):.4f} bits per character "
                f"({abs(gain) / base['bits_per_character']:.1%}), and takes "
                f"{result['seconds'] / base['seconds']:.2f} times the training time."
            )
    return [" ".join(lines)]


def results_table(runs: Sequence[FinishedRun]) -> str:
    """One row a model."""
    rows = []
    for run in runs:
        result = run.result or {}
        speeds = [r["tokens_per_second"] for r in run.metrics if "tokens_per_second" in r]
        one, all_layers = run.facts["memory"]["one_layer"], run.facts["memory"]["all_layers"]
        rows.append(
            [
                LABELS[run.model],
                f"{run.facts['parameters']:,}",
                f"{one:,} / {all_layers:,}",
                number(result.get("loss"), ".4f"),
                number(result.get("bits_per_character"), ".4f"),
                number(result.get("accuracy"), ".1%"),
                f"{median(speeds):,.0f}" if speeds else "–",
                number(result.get("seconds"), ",.0f", " s"),
                number((result.get("peak_memory_bytes") or 0) / 2**20 or None, ",.0f", " MiB"),
            ]
        )
    head = [
        "model",
        "parameters",
        "memory reach, one layer / all layers (positions)",
        "validation loss (nats)",
        "bits per character",
        "accuracy",
        "tokens/s (median)",
        "training time",
        "peak memory",
    ]
    return table(head, rows)


def recall_table(runs: Sequence[FinishedRun]) -> str:
    """Recall by distance, a column a model."""
    measured = [(run, run.recall) for run in runs if run.recall]
    rows = []
    for i, near in enumerate(measured[0][1]["nearest"]):
        row = [f"{near:,} – {2 * near - 1:,}"]
        rows.append(row + [number(recall["accuracy"][i], ".1%") for _, recall in measured])
    rows.append(["first saying (chance)"] + [number(r["chance"], ".1%") for _, r in measured])
    head = ["distance (characters)"] + [LABELS[run.model] for run, _ in measured]
    return "Characters right on the second saying:\n\n" + table(head, rows)


def how_it_was_made(runs: Sequence[FinishedRun], fair: bool) -> str:
    """Everything needed to make the report again."""
    first = runs[0]
    corpus, environment = first.facts["corpus"], first.facts["environment"]
    packages = ", ".join(f"{name} {v}" for name, v in environment["packages"].items())
    facts = [
        ["corpus", f"{corpus['name']}: {corpus['source']}"],
        ["characters, sha256", f"{corpus['characters']:,}, {corpus['sha256']}"],
        ["device", f"{environment['device']}, {environment['threads']} threads"],
        ["system", f"{environment['platform']}, Python {environment['python']}"],
        ["packages", packages],
    ]
    names = list(dict.fromkeys(key for run in runs for key, _ in flatten(run.config)))
    configs = [dict(flatten(run.config)) for run in runs]
    settings = [[name, *(str(config.get(name, "–")) for config in configs)] for name in names]
    return "\n\n".join(
        [
            "## How it was made",
            (FAIRNESS if fair and len(runs) > 1 else "")
            + "Validation is contiguous, in eval mode, over the whole held-out text, from an empty memory "
            "that is then carried.",
            table(["", "value"], facts),
            table(["setting", *(LABELS[run.model] for run in runs)], settings),
        ]
    )


FAIRNESS = (
    "Same text, seed, order of segments, token budget, optimizer, width and depth; from the same seed "
    "all models start with the same weights in everything they share. "
)


def shared_settings(run: FinishedRun) -> dict[str, Any]:
    """A run's config without what a comparison may vary: the memory."""
    memory = {"model.model", "model.mem_len", "model.c_mem_len", "model.compression_rate"}
    return {name: value for name, value in flatten(run.config) if name not in memory}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that shows the cells as they are."""
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A value in a table, or a dash."""
    return "–" if value is None else f"{value:{form}}{unit}"


def fenced(text: str) -> str:
    """A code block that no text inside can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
