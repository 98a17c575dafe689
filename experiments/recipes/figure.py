"""Loss against seconds, by the recipe of the first version and by the default one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.intervals import mean_of
from memformers.report.plotting import BLUE, ORANGE, Series, draw_lines, legend, panels, save, style

DRAWN = {"first version": ORANGE | {"linestyle": "--"}, "default": BLUE | {"linestyle": "-"}}
"""Recipes, each with its look."""


def draw(
    losses: Mapping[str, Sequence[tuple[float, float]]], speeds: Mapping[str, float], path: Path
) -> None:
    """Draw the losses of each recipe against training time. ``losses`` holds pairs of a number of tokens and
    the loss in nats after them; ``speeds`` is in tokens a second."""
    figure, [axes] = panels([2.9])
    for name, look in DRAWN.items():
        points = [(tokens / speeds[name], mean_of([loss])) for tokens, loss in losses[name]]
        draw_lines(axes, [Series(name, points, look)])
        seconds, last = points[-1]
        above: dict[str, Any] = {
            "xytext": (0, 8),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 8,
        }
        axes.annotate(f"{last.mean:.3f}", (seconds, last.mean), **above)
    style(axes, "training time on two cores (seconds)", "validation loss (nats a character)")
    axes.set_xlim(left=0)
    legend(figure, [axes])
    save(figure, path)
