"""Loss against seconds, by the recipe of the first version and by the default one."""

from collections.abc import Mapping
from pathlib import Path

from memformers.common.intervals import mean_of
from memformers.report.plotting import BLUE, ORANGE, Series, draw_lines, legend, panels, save, style
from memformers.runs.finished import FinishedRun

DRAWN = {"first version": ORANGE | {"linestyle": "--"}, "default": BLUE | {"linestyle": "-"}}
"""Recipes, each with its look."""


def draw(runs: Mapping[str, FinishedRun], speeds: Mapping[str, float], path: Path) -> None:
    """Draw the losses of a run by each recipe against training time; ``speeds`` is in tokens a second."""
    figure, [axes] = panels([2.9])
    for name, look in DRAWN.items():
        records = [record for record in runs[name].metrics if "loss.valid" in record]
        points = [(r["tokens"] / speeds[name], mean_of([r["loss.valid"]])) for r in records]
        draw_lines(axes, [Series(name, points, look)])
        end = (points[-1][0], points[-1][1].mean)
        axes.annotate(f"{end[1]:.3f}", end, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    style(axes, "training time on two cores (seconds)", "validation loss (nats a character)")
    axes.set_xlim(left=0)
    legend(figure, [axes])
    save(figure, path)
