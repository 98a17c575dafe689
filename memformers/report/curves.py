"""The figures of a comparison: curves, and the loss by position, as Markdown with their captions."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from memformers.common.intervals import Mean
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Quantity, Result
from memformers.report.markdown import prose
from memformers.report.plotting import Series, line_styles
from memformers.report.sections import not_comparable, stages_of
from memformers.runs.folder import SECONDS, TOKENS

VALID, RECONSTRUCTION, SPEED = "bits_per_character.valid", "reconstruction_loss", "tokens_per_second"
LOSS = "held-out loss (bits per character)"


def figures(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, read: str) -> list[str]:
    """Every figure that ``arms`` have data for; ``read`` says which part of the held-out text the validation
    read."""
    counts = sorted({len(arm.counted) for arm in arms})
    bands = prose("bands", seeds=" or ".join(map(str, counts))) if counts[-1] > 1 else ""
    lines, stages = line_styles([arm.name for arm in arms]), stages_of(arms)

    def curves(
        metric: str,
        over: str = TOKENS,
        label: str = "{}",
        *,
        marked: bool = True,
        against: ArmRuns | None = None,
    ) -> list[Series]:
        thin = {} if marked else {"marker": "", "linewidth": 1.0}
        found = [(arm, arm.curve(metric, over, against)) for arm in arms]
        return [Series(label.format(arm.label), of, lines[arm.name] | thin) for arm, of in found if of]

    is_timed = len(arms) == 1 or not not_comparable(arms)
    has_differences = len(arms) > 1 and len(base.counted) > 1
    every: dict[str, tuple[str, str, list[Series], dict[str, Any]]] = {
        "validation_tokens": (
            "Held-out loss against training tokens", LOSS, curves(VALID), {"read": read},
        ),
        "differences": (
            "Held-out loss minus the baseline's, against training tokens",
            "held-out loss minus the baseline's\n(bits per character)",
            curves(VALID, against=base) if has_differences else [], {"base": base.label},
        ),
        "validation_time": (
            "Held-out loss against training time", LOSS, curves(VALID, SECONDS) if is_timed else [], {},
        ),
        RECONSTRUCTION: (
            "Loss of the compression functions against training tokens",
            "reconstruction loss\n(MSE, sum over layers)",
            curves(f"{RECONSTRUCTION}.train", label="{}, training", marked=False)
            + curves(f"{RECONSTRUCTION}.valid", label="{}, validation"), {},
        ),
        SPEED: (
            "Training speed against training tokens", "training tokens per second",
            curves(SPEED, marked=False), {"grows": bool(stages)},
        ),
    }  # fmt: skip
    parts = []
    for name, (title, y, many, about) in every.items():
        if many:
            figure, [axes] = plotting.panels([2.7])
            axes.set_yscale("log" if name == RECONSTRUCTION else "linear")
            plotting.draw_lines(axes, many)
            if name == SPEED:
                axes.set_ylim(bottom=0)
            over_tokens = name != "validation_time"
            plotting.style(axes, "training tokens" if over_tokens else "training time (seconds)", y)
            plotting.mark(axes, stages if over_tokens else [])
            grows = prose("growth") if stages and over_tokens else ""
            caption = " ".join(filter(None, [prose(name, **about), grows, bands]))
            parts.append(plotting.save_figure(figure, folder, name, title, caption))
    return [*parts, *position_figure(arms, base, folder, bands)]


def position_figure(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path, bands: str) -> list[str]:
    """The loss by position in the segment: above, that of each arm; below, if there are several seeds, the
    difference to that of ``base`` from the same seed. Nothing if no run has finished."""
    lines = line_styles([arm.name for arm in arms])
    above = [(arm, by_octave(arm)) for arm in arms]
    below = [(arm, by_octave(arm, base)) for arm in arms if arm is not base]
    found = {"loss (bits per character)": above, f"minus that of\n{base.label}": below}
    found = {name: [(arm, of) for arm, of in pairs if of] for name, pairs in found.items()}
    found = {name: pairs for name, pairs in found.items() if pairs}
    if not found:
        return []
    figure, places = plotting.panels([2.6] * len(found))
    for axes, (name, pairs) in zip(places, found.items(), strict=True):
        for arm, of in pairs:
            points = [((first * last) ** 0.5, mean) for (first, last), mean in of.items()]
            plotting.draw_lines(axes, [Series(arm.label, points, lines[arm.name])])
        plotting.style(axes, "position in the segment (tokens)", name)
        plotting.octave_axis(axes, [first for first, _ in pairs[0][1]])
    if len(places) > 1:
        places[-1].axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    caption = f"{prose('loss_by_position', base=base.label if len(places) > 1 else '')} {bands}".strip()
    title = "Held-out loss by position in the segment"
    return [plotting.save_figure(figure, folder, "loss_by_position", title, caption)]


def by_octave(arm: ArmRuns, base: ArmRuns | None = None) -> dict[tuple[int, int], Mean]:
    """The mean loss over seeds at the positions 1, 2, 3 – 4, 5 – 8 and so on of a segment, by the first and
    the last, or the difference to that of ``base`` from the same seed; no difference for a single seed, and
    none if the segments have different lengths."""
    results = [*arm.results.values(), *(base or arm).results.values()]
    lengths = {len(result["loss_by_position"]) for result in results}
    if len(lengths) != 1:
        return {}

    def between(first: int, last: int) -> Quantity:
        return lambda result: bits(result, fmean(result["loss_by_position"][first - 1 : last]))

    [length], found = lengths, {}
    firsts = [1, 2, *(2**i + 1 for i in range(1, length.bit_length()))]
    for first in (first for first in firsts if first <= length):
        last = min(max(2 * (first - 1), 1), length)
        mean = arm.minus(base, between(first, last)) if base else arm.mean(between(first, last))
        if mean and (mean.n > 1 or not base):
            found[first, last] = mean
    return found


def bits(result: Result, nats: float = 1.0) -> float:
    """Nats per token as bits per character of the text of ``result``."""
    return float(nats * result["bits_per_character"] / result["loss"])


def save_loss_by_position(
    in_segment: Sequence[float], by_memory: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw the mean loss against the position in a segment, and against the length of the memory before it
    (positions, loss, uncertainty), into ``path``."""
    figure, [left, right] = plotting.panels([3.3], width=9.0, columns=2)
    left.plot(range(1, len(in_segment) + 1), in_segment, color=plotting.BLUE["color"])
    plotting.style(left, "position in the segment (tokens)", "loss (nats per token)")
    points = [(positions, Mean(loss, half, 2)) for positions, loss, half in by_memory]
    plotting.draw_marks(right, [Series("", points, plotting.ORANGE | {"marker": "o"})])
    plotting.style(right, "remembered before the segment (tokens)", "loss (nats per token, ± 95 %)")
    plotting.save(figure, path)
