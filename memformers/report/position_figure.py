"""The figure of the loss by position in the segment: the first tokens of a segment depend mostly on
memory."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from memformers.common.intervals import Mean, mean_of
from memformers.report.arms import Arm, Result, seeds_in_common
from memformers.report.curves import Series, draw, looks_of
from memformers.report.figures import DOTS, WIDTH, finish, legend, save_with_data, thousands
from memformers.report.markdown import Cell

MEASURED = "loss_by_position"
TITLE = "Validation loss by position in the segment"
Octave = tuple[int, int]
"""The first and the last position of a range, counted from 1."""


def save_positions(arms: Sequence[Arm], base: Arm, folder: Path) -> Path | None:
    """Draw the loss by position into ``folder``: above, that of each arm; below, if there are several seeds,
    the difference to that of ``base`` from the same seed. None if it was not measured, as in older
    versions."""
    measured = [arm for arm in arms if any(MEASURED in result for result in arm.results.values())]
    if not measured:
        return None
    looks = looks_of([arm.name for arm in arms])
    panels = {"loss (nats per token)": [(arm, losses(arm)) for arm in measured]}
    if less := [(arm, losses_less(arm, base)) for arm in measured if arm is not base]:
        panels[f"loss minus that of\n{base.label}"] = [(arm, found) for arm, found in less if found]
    panels = {name: found for name, found in panels.items() if found}
    figure = Figure(figsize=(WIDTH, 0.7 + 2.6 * len(panels)), dpi=DOTS, layout="constrained")
    places = list(figure.subplots(len(panels), 1, squeeze=False)[:, 0])
    rows: list[list[Cell]] = []
    for axes, (name, found) in zip(places, panels.items(), strict=True):
        for arm, of_octaves in found:
            points = [((first * last) ** 0.5, mean) for (first, last), mean in of_octaves]
            draw(axes, Series(arm.label, points, looks[arm.name]))
            rows += [
                [arm.label, " ".join(name.split()), *octave, m.mean, m.half_width, m.n]
                for octave, m in of_octaves
            ]
        finish(axes, "position in the segment (tokens)", name)
        octaves = [octave for octave, _ in found[0][1]]
        axes.set_xscale("log", base=2)
        axes.set_xticks([first for first, _ in octaves])
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.xaxis.set_minor_locator(NullLocator())
    if len(panels) > 1:
        places[-1].axhline(0, color="#888888", linewidth=0.8, zorder=0)
    legend(figure, places)
    path = folder / f"{MEASURED}.png"
    head = ["arm", "quantity", "first position", "last position", "mean",
            "half width of the 95 % interval", "runs"]  # fmt: skip
    save_with_data(figure, path, head, rows)
    return path


def caption(arms: Sequence[Arm], base_label: str, bands: str) -> str:
    """The caption of the figure of ``arms``, whose base has this label; ``bands`` explains the bands."""
    several = len(arms) > 1 and bool(bands)
    return (
        "Loss over the whole held-out text, by position in the segment, in octaves. The first tokens of a "
        "segment have only a few of its tokens before them, so they depend mostly on memory."
        + (
            f" The lower panel has the loss minus that of {base_label} from the same seed; a value below "
            f"zero is better."
            if several
            else ""
        )
        + bands
    )


def losses(arm: Arm) -> list[tuple[Octave, Mean]]:
    """The mean loss of each octave of positions, over an arm's seeds."""
    found = [octave_means(result) for result in arm.results.values() if MEASURED in result]
    return [(octave, mean_of([of[octave] for of in found])) for octave in found[0]]


def losses_less(arm: Arm, base: Arm) -> list[tuple[Octave, Mean]]:
    """The difference of the loss of ``arm`` to that of ``base`` from the same seed, in each octave; nothing
    for a single seed, and nothing if the segments have different lengths."""
    pairs = [(arm.results[seed], base.results[seed]) for seed in seeds_in_common(arm, base)]
    found = [tuple(map(octave_means, pair)) for pair in pairs if all(MEASURED in result for result in pair)]
    if len(found) < 2 or any(ours.keys() != theirs.keys() for ours, theirs in found):
        return []
    return [(octave, mean_of([a[octave] - b[octave] for a, b in found])) for octave in found[0][0]]


def octave_means(result: Result) -> dict[Octave, float]:
    """The mean loss at the positions 1, 2, 3 – 4, 5 – 8 and so on of a segment."""
    by_position, found, first = result[MEASURED], {}, 1
    while first <= len(by_position):
        last = min(max(2 * (first - 1), 1), len(by_position))
        found[first, last] = fmean(by_position[first - 1 : last])
        first = last + 1
    return found
