"""Loss against seconds, by the recipe of the first version and by the default one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

DRAWN = {"first version": ("#D55E00", "s", "--"), "default": ("#0072B2", "o", "-")}
"""Recipes, each with a colour of Okabe and Ito's, a marker and a kind of line."""


def draw(
    losses: Mapping[str, Sequence[tuple[float, float]]], speeds: Mapping[str, float], path: Path
) -> None:
    """Draw the losses of each recipe against training time. ``losses`` holds pairs of a number of tokens and
    the loss in nats after them; ``speeds`` is in tokens a second."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, (colour, marker, line) in DRAWN.items():
        seconds = [tokens / speeds[name] for tokens, _ in losses[name]]
        loss = [loss for _, loss in losses[name]]
        axes.plot(seconds, loss, color=colour, marker=marker, linestyle=line, label=name)
        axes.annotate(
            f"{loss[-1]:.3f}", (seconds[-1], loss[-1]), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="training time on two cores (seconds)", ylabel="validation loss (nats a character)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
