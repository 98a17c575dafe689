"""The ablation's report: ``report.md`` with its figures, and a self-contained ``report.html``."""

import math
from pathlib import Path

from experiments.ablation.figure import save_figures
from experiments.ablation.findings import Findings, Measure, band
from experiments.ablation.rows import BASE_ROW, Row
from memformers.common.intervals import Mean
from memformers.report.arms import Arm
from memformers.report.markdown import number, plain, table, write_page
from memformers.runs.folder import FIGURES, REPORT

FEWEST_TOKENS = {"text": 500_000, "recall": 500_000}
"""Shorter trainings show that everything works, and not what a compression is worth."""
BASE_NAME = f'"{BASE_ROW.label}"'
"""Its label in quotation marks, since labels contain commas."""
TITLES = {"ablation": "Results of each row", "differences": f"Differences to {BASE_NAME}"}
CAPTIONS = {
    "ablation": "The rows of the table, in the paper's order. The first panel has the paper's results on "
    "enwik8. Fewer bits are better. Lines are 95 % intervals over seeds, by Student's t.",
    "differences": f"The value of each row minus that of {BASE_NAME} from the same seed. Lines are 95 % "
    f"intervals by Student's t; a row is claimed to differ only if its interval leaves out zero.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write the report of ``findings`` into ``folder``; returns its page."""
    figures = save_figures(findings, folder / FIGURES)
    parts = ["# The ablation: compression functions and what they learn from", *warnings(findings)]
    parts += ["## What it shows", *(claims(findings, measure) for measure in findings.measures)]
    parts += [limits(findings), "## Results beside the paper's", MEANING.format(*band()), results(findings)]
    parts += [
        f"![{TITLES[name]}]({FIGURES}/{path.name})\n\n{CAPTIONS[name]}" for name, path in figures.items()
    ]
    if findings.compared:
        parts += [f"## Differences to {BASE_NAME}", differences(findings)]
    parts += ["## What each row costs", costs(findings), "## How it was made", how_it_was_made(findings)]
    return write_page(parts, folder)


MEANING = (
    "The paper's results are bits per character on enwik8 (Rae et al. 2020, arXiv 1911.05507). Ours are bits "
    "per character of the held-out text, and the share of right answers on a recall stream, where chance is "
    '25 %. "Right, beyond" counts the questions about values that were set {} to {} positions ago, which one '
    'layer sees only in its slots. "Right, within" counts those about values that were set later, which one '
    "layer of a Transformer-XL with as many keys sees too."
)


def warnings(findings: Findings) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    if missing := "; ".join(findings.missing):
        found.append(f"> **Some trainings are missing**, since they failed or did not finish: {missing}.")
    for task in findings.arms:
        first = findings.first(task)
        if (tokens := first.config["tokens"]) < FEWEST_TOKENS[task]:
            found.append(
                f"> **Each training on {plain(findings.title(task))} has only {tokens:,} tokens**: too few "
                f"to learn much. This report only shows that the ablation runs."
            )
        if first.facts["corpus"].get("stands_in_for_tiny_shakespeare"):
            found.append(
                "> **The text is the built-in play.** Tiny Shakespeare was neither found nor downloadable."
            )
    return found


def claims(findings: Findings, measure: Measure) -> str:
    """The claims about one measure that the seeds support, in a paragraph: a difference to the base only if
    its interval does not contain zero."""
    about = f"**{findings.title(measure.task)}: {measure.label}**, compared with {BASE_NAME}"
    found = [(row, findings.difference(measure, row)) for row in findings.rows]
    known = [(row, d) for row, d in found if d is not None]
    if not known:
        return f"{about}: nothing is compared, since no seed has results of {BASE_NAME} and of another row."
    several = [(row, d) for row, d in known if d.n > 1]
    if not several:
        return f"{about}: there is only one seed, so nothing is claimed; --seeds 3 --resume gives intervals."
    said = []
    for word, sign in (("Better", 1), ("Worse", -1)):
        sure = [(row, d) for row, d in several if d.leaves_out_zero and d.mean * measure.better * sign > 0]
        if sure:
            said.append(f"{word}: " + "; ".join(f"{quoted(row)} by {amount(measure, d)}" for row, d in sure))
    if unsure := [(row, d) for row, d in several if not d.leaves_out_zero]:
        hidden = max(abs(d.mean) + d.half_width for _, d in unsure)
        said.append(
            f"No difference was seen: {'; '.join(quoted(row) for row, _ in unsure)}. For these rows, "
            f"differences of up to {amount(measure, Mean(hidden, math.nan, 1))} are not excluded"
        )
    seeds = sorted({d.n for _, d in several})
    return f"{about} from the same seed, over {' or '.join(map(str, seeds))} seeds. {'. '.join(said)}."


def quoted(row: Row) -> str:
    """The label of ``row`` in quotation marks, since some labels contain commas."""
    return f'"{row.label}"'


def limits(findings: Findings) -> str:
    """The limits of the results, in a paragraph."""
    n = sum(findings.difference(m, row) is not None for m in findings.measures for row in findings.rows)
    chance = (
        f"By chance, one interval in twenty leaves out zero, and this report has {n} of them; so a single "
        f"interval that leaves out zero is weak evidence. "
    )
    return (
        f"The ablation doesn't show which compression is best on other texts, or at the paper's size. Our "
        f"networks are small and were trained for minutes; the paper's networks are large, and the paper "
        f"gives no intervals. {chance if n else ''}In our BPTT, the gradient reaches back through one "
        f"compression (bptt=1), and our most-used chooses among the positions of each slot; the paper may "
        f"do this in another way. The row with slots only in the upper layers has half as many slots; all "
        f"other rows have the same number of keys."
    )


def results(findings: Findings) -> str:
    """The table beside the paper's figures."""
    head = [
        "row",
        "paper: enwik8",
        *(f"{findings.title(m.task)}: {m.label}" for m in findings.measures),
        "seeds",
    ]
    return table(
        head,
        [
            [
                row.label,
                number(row.paper, ".3f"),
                *(shown(m, findings.mean(m, row)) for m in findings.measures),
                " / ".join(str(len(findings.by_seed(m, row))) for m in findings.measures),
            ]
            for row in findings.rows
        ],
    )


def differences(findings: Findings) -> str:
    """Each row's paired differences to the base."""
    measures = findings.measures
    head = ["row", *(f"{m.label}{' (points)' if m.scale > 1 else ''}" for m in measures)]
    rows = [row for row in findings.rows if row != BASE_ROW]
    return table(head, [[r.label, *(signed(m, findings.difference(m, r)) for m in measures)] for r in rows])


def costs(findings: Findings) -> str:
    """The sizes and the costs of each row's network on each task."""
    head, columns = ["row"], []
    for task in findings.arms:
        name = findings.title(task)
        head += [f"{name}: keys of all layers, without the segment's", "parameters", "training time"]
        columns.append([cost(findings.arms[task].get(row.name)) for row in findings.rows])
    rows = [
        [row.label, *(cell for part in parts for cell in part)]
        for row, *parts in zip(findings.rows, *columns, strict=True)
    ]
    return table(head, rows) + (
        "\n\nTraining times are not a benchmark, since other programs ran on the machine at the same time."
    )


def cost(arm: Arm | None) -> list[str]:
    """The cells of one row for one task."""
    if arm is None:
        return ["–"] * 3
    config = arm.first.config["model"]
    lengths = [config["mem_len"], config["c_mem_len"] if config["model"] == "compressive" else 0]
    keys = sum(sum(x) if isinstance(x, list) else config["n_layers"] * x for x in lengths)
    return [f"{keys:,}", f"{arm.first.facts['parameters']:,}", number(arm.mean("seconds"), ",.0f", " s")]


def how_it_was_made(findings: Findings) -> str:
    """The information that is needed to repeat the ablation."""
    rows = []
    for task in findings.arms:
        run, environment = findings.first(task), findings.first(task).facts["environment"]
        model = run.config["model"]
        network = f"D {model['d_model']}, {model['n_layers']} layers, S {model['segment_len']}"
        packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
        rows.append(
            [
                findings.title(task),
                f"{run.config['tokens']:,}",
                network,
                f"{environment['device']}, threads: {environment['threads']}",
                f"{environment['platform']}, Python {environment['python']}, {packages}",
            ]
        )
    where = " and ".join(f"`{task}/{REPORT}`" for task in findings.arms)
    return table(["task", "tokens per training", "network", "device", "system"], rows) + (
        f"\n\n± is half the width of a 95 % interval over seeds, by Student's t. Every setting, curve and "
        f"sample is in {where}; every value is in `results.json` and `results.csv`."
    )


def shown(measure: Measure, value: Mean | None) -> str:
    """A mean with its interval, in the measure's unit."""
    if value is None or measure.scale == 1:
        return number(value, ".4f")
    return number(Mean(measure.scale * value.mean, measure.scale * value.half_width, value.n), ".1f", " %")


def amount(measure: Measure, difference: Mean) -> str:
    """The absolute value of a difference, with its interval."""
    return shown(measure, Mean(abs(difference.mean), difference.half_width, difference.n)).replace(
        "%", "points"
    )


def signed(measure: Measure, difference: Mean | None) -> str:
    """A difference with its sign, as a cell of the table."""
    if difference is None:
        return "–"
    sign = "−" if difference.mean < 0 else "+"
    return sign + shown(measure, Mean(abs(difference.mean), difference.half_width, difference.n)).replace(
        " %", ""
    )
