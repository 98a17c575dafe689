"""The figure: the loss against the number of keys, less that of Transformer-XL with 64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memformers.common.intervals import Mean
from memformers.report.arms import Arm, arms_of, base_of, paired
from memformers.report.evidence import more_bits
from memformers.report.figures import DOTS, WIDTH, save_with_data
from memformers.report.markdown import Cell
from memformers.runs.finished import read_runs

MEMORY = {"color": "#0072B2", "marker": "o", "linestyle": "-"}
SLOTS = {"color": "#D55E00", "marker": "s", "linestyle": ""}
"""Two colours of Okabe and Ito's palette (2008), with markers that differ in print as well."""
APART = 5.0
"""The distance on the axis of keys between arms that have equally many."""


def save_figure(folder: Path, path: Path) -> None:
    """Draw the arms of the comparison in ``folder`` that have results into ``path``, as PNG, SVG and CSV."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    base = base_of(arms)
    points = {arm.name: (keys_of(arm), difference(arm, base)) for arm in arms}
    memory = [arm for arm in arms if arm.first.model != "compressive"]
    memory.sort(key=keys_of)
    slots = [arm for arm in arms if arm not in memory]
    figure = Figure(figsize=(WIDTH, 3.6), dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    mark(axes, [points[arm.name] for arm in memory], "Transformer-XL, and no memory at 0", MEMORY)
    mark(axes, spread([points[arm.name] for arm in slots]), "Compressive Transformer", SLOTS)
    axes.set(xlabel="keys a layer, beside the segment's", ylabel=f"bits per character,\nless {base.label}'s")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    head = ["arm", "keys", "bits per character, less the base's", "half width of the 95 % interval", "seeds"]
    rows: list[list[Cell]] = [[name, keys, d.mean, d.half_width, d.n] for name, (keys, d) in points.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_with_data(figure, path, head, rows)


def keys_of(arm: Arm) -> float:
    """The keys a layer of ``arm``, beside the segment's."""
    return float(arm.first.facts["keys"])


def difference(arm: Arm, base: Arm) -> Mean:
    """Bits per character of ``arm``, less those of ``base``, paired by seed; 0 for ``base``."""
    return paired(arm, base, more_bits) or Mean(float("nan"), float("nan"), 0)


def spread(points: Sequence[tuple[float, Mean]]) -> list[tuple[float, Mean]]:
    """``points``, those with equally many keys side by side."""
    placed: list[tuple[float, Mean]] = []
    for keys, mean in points:
        before = sum(other == keys for other, _ in points[: len(placed)])
        placed.append((keys + APART * (before + 1), mean))
    return placed


def mark(axes: Axes, points: Sequence[tuple[float, Mean]], label: str, look: dict[str, Any]) -> None:
    """A mark for each mean, with its interval if it has one."""
    axes.errorbar(
        [keys for keys, _ in points],
        [mean.mean for _, mean in points],
        [mean.half_width if mean.n > 1 else 0.0 for _, mean in points],
        label=label,
        markersize=4.5,
        linewidth=1.2,
        capsize=2,
        **look,
    )
