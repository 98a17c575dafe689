"""The figures of a report: labelled axes with units, colours that colour-blind readers can tell."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from memformers.common.files import replacing
from memformers.report.curves import Curves, draw, drawn


def validation_against_tokens(axes: Axes, arms: Sequence[Curves]) -> None:
    """What each model learned from the same text."""
    draw_curves(axes, arms, "tokens", "bits_per_character.valid", marker=True)
    axes.set(xlabel="training tokens", ylabel="validation loss (bits per character)")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def validation_against_time(axes: Axes, arms: Sequence[Curves]) -> None:
    """What each model learned in the same time."""
    draw_curves(axes, arms, "seconds", "bits_per_character.valid", marker=True)
    axes.set(xlabel="training time (seconds)", ylabel="validation loss (bits per character)")


def reconstruction_loss(axes: Axes, arms: Sequence[Curves]) -> None:
    """How well compressed memories stand in for what they replace."""
    axes.set_yscale("log")
    draw_curves(axes, arms, "tokens", "reconstruction_loss.train", alpha=0.6, label="{}, training")
    draw_curves(axes, arms, "tokens", "reconstruction_loss.valid", marker=True, label="{}, validation")
    axes.set(xlabel="training tokens", ylabel="attention-reconstruction loss\n(MSE, sum over layers)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def tokens_per_second(axes: Axes, arms: Sequence[Curves]) -> None:
    """How fast each model trained."""
    draw_curves(axes, arms, "tokens", "tokens_per_second", alpha=0.8)
    axes.set(xlabel="training tokens", ylabel="speed (training tokens per second)")
    highest = max((float(np.max(line.get_ydata())) for line in axes.lines), default=1.0)
    axes.set_ylim(0, 1.3 * highest)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(thousands))


def differences(axes: Axes, arms: Sequence[Curves]) -> None:
    """How much more each arm loses than the baseline, seed by seed; nothing from a single seed."""
    base = next(arm for arm in arms if arm.is_base)
    for arm in arms if len(base.runs) > 1 else ():
        if arm is not base:
            draw(axes, arm.less(base, "bits_per_character.valid"), arm.label, arm.look)
    if axes.lines:
        axes.axhline(0, color=base.look["color"], linestyle=base.look["linestyle"], label=drawn(base.label))
    axes.set(xlabel="training tokens", ylabel="validation loss, less the baseline's\n(bits per character)")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


FIGURES: dict[str, Callable[[Axes, Sequence[Curves]], None]] = {
    "validation_tokens": validation_against_tokens,
    "differences": differences,
    "validation_time": validation_against_time,
    "reconstruction_loss": reconstruction_loss,
    "tokens_per_second": tokens_per_second,
}


def save_figures(arms: Sequence[Curves], folder: Path) -> dict[str, Path]:
    """Draw every figure that the arms have data for into ``folder``: paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, draw_into in FIGURES.items():
        figure = Figure(figsize=(6.4, 4.0), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        draw_into(axes, arms)
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
    arms: Sequence[Curves],
    x: str,
    y: str,
    *,
    marker: bool = False,
    alpha: float = 1.0,
    label: str = "{}",
) -> None:
    """A line for each arm that has ``y``, with a band over its seeds."""
    for arm in arms:
        look = arm.look | ({} if marker else {"marker": "", "linewidth": 1.0})
        draw(axes, arm.over_seeds(x, y), label.format(arm.label), look | {"alpha": alpha})


def thousands(value: float, _: int | None = None) -> str:
    """12000 as 12k, 1500000 as 1.5M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
