"""The figure: the loss against the number of keys, minus that of Transformer-XL with 64."""

from collections import Counter
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

LOOKS: dict[tuple[bool, bool], dict[str, Any]] = {
    (False, False): {
        "label": "Transformer-XL, and no memory at 0",
        "color": "#0072B2",
        "marker": "o",
        "linestyle": "-",
    },
    (False, True): {
        "label": "Transformer-XL, memory grows",
        "color": "#56B4E9",
        "marker": "D",
        "linestyle": "--",
    },
    (True, False): {"label": "Compressive Transformer", "color": "#D55E00", "marker": "s", "linestyle": ""},
    (True, True): {
        "label": "Compressive Transformer, memory grows",
        "color": "#E69F00",
        "marker": "^",
        "linestyle": "",
    },
}
"""By whether an arm has slots, and whether its memory grows: colours of Okabe and Ito's palette (2008), with
markers that differ in print as well."""
APART = 2.5
"""The distance on the axis of keys between arms of two kinds that have equally many."""


def save_figure(folder: Path, path: Path) -> None:
    """Draw the arms of the comparison in ``folder`` that have results into ``path``, as PNG, SVG and CSV."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    base = base_of(arms)
    points = {arm.name: (keys_of(arm), difference(arm, base)) for arm in arms}
    kinds: dict[tuple[bool, bool], list[tuple[float, Mean]]] = {kind: [] for kind in LOOKS}
    for arm in sorted(arms, key=keys_of):
        kinds[arm.first.model == "compressive", grows(arm)].append(points[arm.name])
    figure = Figure(figsize=(WIDTH, 3.8), dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    for number, (kind, found) in enumerate(kinds.items()):
        mark(axes, spread(found, APART * number), LOOKS[kind])
    axes.set(
        xlabel="keys per layer, without the segment's", ylabel=f"bits per character,\nminus {base.label}'s"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    head = ["arm", "keys", "bits per character, minus the base's", "half width of the 95 % interval", "seeds"]
    rows: list[list[Cell]] = [[name, keys, d.mean, d.half_width, d.n] for name, (keys, d) in points.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_with_data(figure, path, head, rows)


def keys_of(arm: Arm) -> float:
    """The keys per layer of ``arm``, without the segment's."""
    return float(arm.first.facts["keys"])


def difference(arm: Arm, base: Arm) -> Mean:
    """Bits per character of ``arm``, minus those of ``base``, paired by seed; 0 for ``base``."""
    return paired(arm, base, more_bits) or Mean(float("nan"), float("nan"), 0)


def grows(arm: Arm) -> bool:
    """Whether the memory of ``arm`` grows during the training."""
    return bool(arm.first.config.get("memory_warmup")) and arm.first.model != "transformer"


def spread(points: Sequence[tuple[float, Mean]], right: float) -> list[tuple[float, Mean]]:
    """``points`` by their keys, moved to the ``right``, those with equally many keys side by side."""
    seen: Counter[float] = Counter()
    placed = []
    for keys, mean in points:
        placed.append((keys + right + len(LOOKS) * APART * seen[keys], mean))
        seen[keys] += 1
    return placed


def mark(axes: Axes, points: Sequence[tuple[float, Mean]], look: dict[str, Any]) -> None:
    """A mark for each mean, with its interval if it has one; nothing without means."""
    if not points:
        return
    axes.errorbar(
        [keys for keys, _ in points],
        [mean.mean for _, mean in points],
        [mean.half_width if mean.n > 1 else 0.0 for _, mean in points],
        markersize=4.5,
        linewidth=1.2,
        capsize=2,
        **look,
    )
