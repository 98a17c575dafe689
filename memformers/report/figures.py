"""The figures of a report: labelled axes with units, colours that colour-blind readers can tell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from memformers.common.files import replacing

# Okabe and Ito's palette (2008), with a line and a marker of its own for print without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "transformer": {"color": "#0072B2", "linestyle": ":", "marker": "o"},
    "transformer-xl": {"color": "#D55E00", "linestyle": "-", "marker": "s"},
    "compressive": {"color": "#009E73", "linestyle": "--", "marker": "^"},
}
LABELS = {
    "transformer": "Transformer, no memory",
    "transformer-xl": "Transformer-XL",
    "compressive": "Compressive Transformer",
}


@dataclass(frozen=True)
class Curves:
    """What the figures draw of one run."""

    model: str
    metrics: list[dict[str, float]]
    recall: dict[str, Any] | None = None
    sees_back: int = 0
    """The farthest position that one layer can attend to: its segment and all it remembers."""

    def series(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """The points of all records that have both."""
        points = [(r[x], r[y]) for r in self.metrics if x in r and y in r]
        return [p[0] for p in points], [p[1] for p in points]


def validation_against_tokens(axes: Axes, runs: Sequence[Curves]) -> None:
    """What each model learned from the same text."""
    draw_curves(axes, runs, "tokens", "bits_per_character.valid", marker=True)
    axes.set(xlabel="training tokens", ylabel="validation loss (bits per character)")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def validation_against_time(axes: Axes, runs: Sequence[Curves]) -> None:
    """What each model learned in the same time."""
    draw_curves(axes, runs, "seconds", "bits_per_character.valid", marker=True)
    axes.set(xlabel="training time (seconds)", ylabel="validation loss (bits per character)")


def reconstruction_loss(axes: Axes, runs: Sequence[Curves]) -> None:
    """How well compressed memories stand in for what they replace."""
    draw_curves(axes, runs, "tokens", "reconstruction_loss.train", alpha=0.6, label="{}, training")
    draw_curves(axes, runs, "tokens", "reconstruction_loss.valid", marker=True, label="{}, validation")
    axes.set(xlabel="training tokens", ylabel="attention-reconstruction loss\n(MSE, sum over layers)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def tokens_per_second(axes: Axes, runs: Sequence[Curves]) -> None:
    """How fast each model trained."""
    draw_curves(axes, runs, "tokens", "tokens_per_second", alpha=0.8)
    axes.set(xlabel="training tokens", ylabel="speed (training tokens per second)")
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(thousands))


def recall(axes: Axes, runs: Sequence[Curves]) -> None:
    """Accuracy on phrases said again, against how far back they were said first."""
    for run in runs:
        if run.recall is None:
            continue
        points = [
            (2**0.5 * near, 100 * accuracy)
            for near, accuracy in zip(run.recall["nearest"], run.recall["accuracy"], strict=True)
            if accuracy is not None
        ]
        axes.plot(*zip(*points, strict=True), label=LABELS[run.model], clip_on=False, **LOOKS[run.model])
        thin = {"color": LOOKS[run.model]["color"], "alpha": 0.6, "linewidth": 0.8}
        if run.recall["chance"] is not None:
            axes.axhline(100 * run.recall["chance"], **thin)
        axes.axvline(run.sees_back, linestyle=LOOKS[run.model]["linestyle"], **thin)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({edge for run in runs if run.recall for edge in run.recall["nearest"]}))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(
        xlabel="distance to the first saying (characters)",
        ylabel="characters right on the second saying (%)\n(horizontal lines: on the first, by chance)",
    )
    axes.set_ylim(0, 100)


FIGURES: dict[str, Callable[[Axes, Sequence[Curves]], None]] = {
    "validation_tokens": validation_against_tokens,
    "validation_time": validation_against_time,
    "reconstruction_loss": reconstruction_loss,
    "tokens_per_second": tokens_per_second,
    "recall": recall,
}


def save_figures(runs: Sequence[Curves], folder: Path) -> dict[str, Path]:
    """Draw every figure that the runs have data for into ``folder``: paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, draw in FIGURES.items():
        figure = Figure(figsize=(6.4, 4.0), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        draw(axes, runs)
        if not axes.lines:
            continue
        finish(axes)
        paths[name] = folder / f"{name}.png"
        save(figure, paths[name])
    return paths


def save_loss_by_position(
    in_segment: Sequence[float], by_memory: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw the mean loss against the position in a segment, and against what is remembered before it
    (positions, loss, uncertainty), into ``path``."""
    figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(in_segment) + 1), in_segment, color="#0072B2")
    left.set(xlabel="position in the segment (tokens)", ylabel="loss (nats a token)")
    positions, losses, uncertainties = zip(*by_memory, strict=True)
    right.errorbar(positions, losses, uncertainties, color="#D55E00", marker="o", capsize=3)
    right.set(xlabel="remembered before the segment (tokens)", ylabel="loss (nats a token, ± 95 %)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def finish(axes: Axes) -> None:
    """What all figures share."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def draw_curves(
    axes: Axes,
    runs: Sequence[Curves],
    x: str,
    y: str,
    *,
    marker: bool = False,
    alpha: float = 1.0,
    label: str = "{}",
) -> None:
    """A line for each run that has ``y``."""
    for run in runs:
        xs, ys = run.series(x, y)
        if xs:
            look = LOOKS[run.model] | ({} if marker else {"marker": "", "linewidth": 1.0})
            axes.plot(xs, ys, label=label.format(LABELS[run.model]), alpha=alpha, **look)


def thousands(value: float, _: int | None = None) -> str:
    """12000 as 12k, 1500000 as 1.5M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
