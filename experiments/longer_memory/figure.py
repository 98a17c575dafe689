"""The figure: the loss against the number of keys, minus that of Transformer-XL with 64."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from memformers.common.intervals import Mean
from memformers.report.arms import BITS, Arm, arms_of, base_of
from memformers.report.plotting import (
    AMBER,
    BLUE,
    GREY,
    ORANGE,
    SKY,
    Series,
    draw_marks,
    legend,
    panels,
    save_with_data,
    style,
)
from memformers.runs.finished import read_runs

KINDS = {
    (False, False): ("Transformer-XL, and no memory at 0", BLUE | {"linestyle": "-"}),
    (False, True): ("Transformer-XL, memory grows", SKY | {"linestyle": "--"}),
    (True, False): ("Compressive Transformer", ORANGE | {"linestyle": ""}),
    (True, True): ("Compressive Transformer, memory grows", AMBER | {"linestyle": ""}),
}
"""By whether an arm has slots, and whether its memory grows: a label and a look."""
APART = 2.5
"""The distance on the axis of keys between arms of two kinds that have the same number."""


def save_figure(folder: Path, path: Path) -> None:
    """Draw the arms of the comparison in ``folder`` that have results into ``path``, as PNG, SVG and CSV."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    base = base_of(arms)
    found = {arm.name: arm.minus(base, BITS.of) for arm in arms}
    points = {name: mean for name, mean in found.items() if mean}
    many = []
    for number, (kind, (label, look)) in enumerate(KINDS.items()):
        of_kind = [arm for arm in arms if arm.name in points and kind_of(arm) == kind]
        pairs = sorted(((keys_of(arm), points[arm.name]) for arm in of_kind), key=lambda pair: pair[0])
        many.append(Series(label, spread(pairs, APART * number), look))
    figure, [axes] = panels([2.9], below=0.9)
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    draw_marks(axes, [series for series in many if series.points])
    style(axes, "keys per layer, without the segment's", f"bits per character,\nminus {base.label}'s")
    legend(figure, [axes])
    head = ["arm", "keys", "bits per character, minus the base's", "half width of the 95 % interval", "seeds"]
    rows = [
        [arm.name, keys_of(arm), m.mean, m.half_width, m.n] for arm in arms if (m := points.get(arm.name))
    ]
    save_with_data(figure, path, head, rows)


def keys_of(arm: Arm) -> float:
    """The keys per layer of ``arm``, without the segment's."""
    return float(arm.first.facts["keys"])


def kind_of(arm: Arm) -> tuple[bool, bool]:
    """Whether ``arm`` has slots, and whether its memory grows during the training."""
    model = arm.first.model
    return model == "compressive", bool(arm.first.config["memory_warmup"]) and model != "transformer"


def spread(points: Sequence[tuple[float, Mean]], right: float) -> list[tuple[float, Mean]]:
    """``points`` by their keys, moved to the ``right``, those with the same number of keys side by side."""
    seen: Counter[float] = Counter()
    placed = []
    for keys, mean in points:
        placed.append((keys + right + len(KINDS) * APART * seen[keys], mean))
        seen[keys] += 1
    return placed
