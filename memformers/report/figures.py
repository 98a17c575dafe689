"""The figures of a report: labelled axes with units, colours that colour-blind readers can distinguish, and
the data of each figure in a file beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from memformers.common.files import replacing
from memformers.report.curves import Curves, Series, draw
from memformers.report.markdown import Cell, csv_text

WIDTH, DOTS = 4.4, 200
"""Inches, and dots an inch: text of 9 points is 10 pixels high on a screen of 390."""
LONG_NAME = 26
"""The number of characters from which two names don't fit beside each other."""


@dataclass(frozen=True)
class Plot:
    """A figure of curves."""

    title: str
    """Its description for those who can't see it."""
    x: str
    y: str
    series: Callable[[Sequence[Curves]], list[Series]]
    log: bool = False
    from_zero: bool = False


def validation_against(x: str) -> Callable[[Sequence[Curves]], list[Series]]:
    """The validation loss of each model against ``x``, tokens or seconds."""
    return lambda arms: [arm.series(x, "bits_per_character.valid", marked=True) for arm in arms]


def differences(arms: Sequence[Curves]) -> list[Series]:
    """The difference of each arm's loss to the baseline's, paired by seed; nothing for a single seed."""
    base = next(arm for arm in arms if arm.is_base)
    if len(base.runs) < 2 or len(arms) < 2:
        return []
    return [Series(arm.label, arm.less(base, "bits_per_character.valid"), arm.look) for arm in arms]


def reconstruction_loss(arms: Sequence[Curves]) -> list[Series]:
    """How well compressed memories replace the memories that they were made from."""
    train = [arm.series("tokens", "reconstruction_loss.train", "{}, training") for arm in arms]
    valid = [arm.series("tokens", "reconstruction_loss.valid", "{}, validation", marked=True) for arm in arms]
    return train + valid


def tokens_per_second(arms: Sequence[Curves]) -> list[Series]:
    """How fast each model trained."""
    return [arm.series("tokens", "tokens_per_second") for arm in arms]


FIGURES = {
    "validation_tokens": Plot(
        "Validation loss against training tokens",
        "training tokens",
        "validation loss (bits per character)",
        validation_against("tokens"),
    ),
    "differences": Plot(
        "Validation loss minus the baseline's, against training tokens",
        "training tokens",
        "validation loss minus the baseline's\n(bits per character)",
        differences,
    ),
    "validation_time": Plot(
        "Validation loss against training time",
        "training time (seconds)",
        "validation loss (bits per character)",
        validation_against("seconds"),
    ),
    "reconstruction_loss": Plot(
        "Loss of the compression functions against training tokens",
        "training tokens",
        "reconstruction loss\n(MSE, sum over layers)",
        reconstruction_loss,
        log=True,
    ),
    "tokens_per_second": Plot(
        "Training speed against training tokens",
        "training tokens",
        "training tokens per second",
        tokens_per_second,
        from_zero=True,
    ),
}


def save_figures(arms: Sequence[Curves], folder: Path, left_out: Sequence[str] = ()) -> dict[str, Path]:
    """Draw every figure that the arms have data for into ``folder``, except those in ``left_out``; returns
    the paths of the PNGs by name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, plot in FIGURES.items():
        series = [one for one in plot.series(arms) if one.points]
        if not series or name in left_out:
            continue
        figure = Figure(figsize=(WIDTH, 3.3), dpi=DOTS, layout="constrained")
        axes = figure.add_subplot()
        if plot.log:
            axes.set_yscale("log")
        for one in series:
            draw(axes, one)
        if plot.from_zero:
            axes.set_ylim(bottom=0)
        finish(axes, plot.x, plot.y)
        legend(figure, [axes])
        paths[name] = folder / f"{name}.png"
        save_with_data(figure, paths[name], *series_data(series, plot))
    return paths


def series_data(series: Sequence[Series], plot: Plot) -> tuple[list[str], list[list[Cell]]]:
    """The data of a figure as the head and the rows of a table."""
    head = ["curve", plot.x, " ".join(plot.y.split()), "half width of the 95 % interval", "runs"]
    return head, [[one.label, x, y.mean, y.half_width, y.n] for one in series for x, y in one.points]


def save_loss_by_position(
    in_segment: Sequence[float], by_memory: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw the mean loss against the position in a segment, and against the length of the memory before it
    (positions, loss, uncertainty), into ``path``."""
    figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(in_segment) + 1), in_segment, color="#0072B2")
    left.set(xlabel="position in the segment (tokens)", ylabel="loss (nats per token)")
    positions, losses, uncertainties = zip(*by_memory, strict=True)
    right.errorbar(positions, losses, uncertainties, color="#D55E00", marker="o", capsize=3)
    right.set(xlabel="remembered before the segment (tokens)", ylabel="loss (nats per token, ± 95 %)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically as PNG or SVG, by the ending of ``path``."""
    kind = path.suffix[1:]
    metadata = {"Date": None} if kind == "svg" else None  # the same data give the same file
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "memformers"}):
        figure.savefig(temporary, format=kind, metadata=metadata)


def save_with_data(figure: Figure, path: Path, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Write a figure as PNG to ``path``, and beside it as SVG, with its data as CSV."""
    save(figure, path)
    save(figure, path.with_suffix(".svg"))
    with replacing(path.with_suffix(".csv")) as temporary:
        temporary.write_text(csv_text(head, rows), encoding="utf-8", newline="")


def finish(axes: Axes, x: str, y: str) -> None:
    """Set the axes' names and numbers, legible on a telephone, and the style that all figures share."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(thousands))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(FuncFormatter(thousands))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """The legend of all panels below them, each name once; long names are below each other."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = 1 if max(map(len, handles)) > LONG_NAME else 2
    look = {"frameon": False, "fontsize": 8, "ncols": columns}
    figure.legend(handles.values(), handles, loc="outside lower center", **look)


def thousands(value: float, _: int | None = None) -> str:
    """12000 as 12k, 1500000 as 1.5M."""
    if abs(value) >= 1e6:
        text = f"{value / 1e6:g}M"
    else:
        text = f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
    return text.replace("-", "−")
