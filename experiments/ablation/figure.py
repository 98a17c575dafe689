"""The ablation's figures: a line for each row of the table, narrow enough for a telephone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.ablation.findings import Findings, Measure
from experiments.ablation.rows import BASE_ROW
from memformers.common.files import replacing
from memformers.common.intervals import Mean
from memformers.report.plotting import DOTS, WIDTH, save

# Okabe and Ito's palette (2008), with a marker of its own for print without colour.
PAPER = {"color": "#000000", "marker": "D"}
LOOKS = {
    "bits_per_character": {"color": "#0072B2", "marker": "o"},
    "right_beyond": {"color": "#D55E00", "marker": "s"},
    "right_within": {"color": "#009E73", "marker": "^"},
}
APART = 0.24
"""The distance between the marks of one row; rows have a distance of 1."""


@dataclass(frozen=True)
class Marks:
    """One quantity: a mark for each row that has it."""

    label: str
    means: Sequence[Mean | None]
    look: dict[str, Any]
    scale: float = 1.0


def save_figures(findings: Findings, folder: Path) -> dict[str, Path]:
    """Draw the results of each row, and its differences to the base if there are any, into ``folder``, as PNG
    and as SVG; returns the paths of the PNGs by name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"ablation": values(findings)}
    if findings.compared:
        drawn["differences"] = differences(findings)
    paths = {}
    for name, figure in drawn.items():
        paths[name] = folder / f"{name}.png"
        save(figure, paths[name])
        with replacing(paths[name].with_suffix(".svg")) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
    return paths


def values(findings: Findings) -> Figure:
    """A panel for the paper's figures, and one for each task."""
    paper = [None if row.paper is None else Mean(row.paper, float("nan"), 1) for row in findings.rows]
    panels = {"the paper, enwik8: bits per character": [Marks("", paper, PAPER)]}
    for task, title in {"text": "bits per character", "recall": "right answers (%)"}.items():
        means = [
            marks(m, [findings.mean(m, row) for row in findings.rows])
            for m in findings.measures
            if m.task == task
        ]
        if means:
            panels[f"{findings.title(task)}: {title}"] = means
    return stacked(panels, [row.label for row in findings.rows])


def differences(findings: Findings) -> Figure:
    """A panel for each measure, with a line at zero."""
    panels = {
        f'{m.label}{" (points)" if m.scale > 1 else ""}, minus "{BASE_ROW.label}"': [
            marks(m, [findings.difference(m, row) for row in findings.rows])
        ]
        for m in findings.measures
    }
    figure = stacked(panels, [row.label for row in findings.rows])
    for axes in figure.axes:
        axes.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    return figure


def marks(measure: Measure, means: Sequence[Mean | None]) -> Marks:
    """The marks of ``measure``."""
    return Marks(measure.label, means, LOOKS[measure.name], measure.scale)


def stacked(panels: dict[str, list[Marks]], labels: Sequence[str]) -> Figure:
    """Panels by their titles, one below the other, each with all rows, the first on top."""
    height = 0.5 + 0.2 * len(labels)
    figure = Figure(figsize=(WIDTH, height * len(panels)), dpi=DOTS, layout="constrained")
    for axes, (title, several) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        for number, one in enumerate(several):
            draw(axes, one, APART * (number - (len(several) - 1) / 2))
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(several) > 1:
            names = axes.get_legend_handles_labels()
            figure.legend(*names, loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return figure


def draw(axes: Axes, marks: Marks, below: float) -> None:
    """A mark for each row, with its interval if there is one, at the distance ``below`` the row's middle."""
    known = [(row + below, mean) for row, mean in enumerate(marks.means) if mean is not None]
    axes.errorbar(
        x=[marks.scale * mean.mean for _, mean in known],
        y=[place for place, _ in known],
        xerr=[0.0 if mean.n == 1 else marks.scale * mean.half_width for _, mean in known],
        label=marks.label,
        linestyle="",
        markersize=4.5,
        linewidth=1.2,
        **marks.look,
    )
