"""The figures of a comparison: curves, and the loss by position, as Markdown with their captions."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from memformers.common.intervals import Mean, mean_of
from memformers.report import plotting
from memformers.report.arms import Arm, Result
from memformers.report.markdown import prose
from memformers.report.plotting import Look, Series
from memformers.report.sections import stages_of
from memformers.runs.folder import SECONDS, TOKENS

VALID = "bits_per_character.valid"
LOSS = "validation loss (bits per character)"


def curve_figures(
    arms: Sequence[Arm], base: Arm, folder: Path, bands: str, read: str, *, timed: bool
) -> list[str]:
    """Every figure of curves that ``arms`` have data for: those against time if they are ``timed``. ``bands``
    explains the bands, and ``read`` says which part of the held-out text the validation read."""
    looks = plotting.looks_of([arm.name for arm in arms])
    stages = stages_of(arms)

    def curves(y: str, over: str = TOKENS, label: str = "{}", *, marked: bool = False) -> list[Series]:
        look: Look = {} if marked else {"marker": "", "linewidth": 1.0}
        return [Series(label.format(arm.label), arm.curve(y, over), looks[arm.name] | look) for arm in arms]

    def drawn(
        name: str, title: str, caption: str, y: str, many: Sequence[Series], x: str = "training tokens"
    ) -> list[str]:
        many = [series for series in many if series.points]
        if not many:
            return []
        figure, [axes] = plotting.panels([2.7])
        if name == "reconstruction_loss":
            axes.set_yscale("log")
        plotting.draw_lines(axes, many)
        if name == "tokens_per_second":
            axes.set_ylim(bottom=0)
        plotting.style(axes, x, y)
        if x == "training tokens":
            plotting.mark(axes, stages)
            caption = " ".join([caption, *[prose("growth")] * bool(stages)])
        return [plotting.save_figure(figure, folder, name, title, f"{caption} {bands}".strip())]

    compared = arms if len(arms) > 1 and len(base.counted) > 1 else ()
    reconstruction = "reconstruction_loss"
    return [
        *drawn("validation_tokens", "Validation loss against training tokens",
               prose("validation_tokens", read=read), LOSS, curves(VALID, marked=True)),
        *drawn("differences", "Validation loss minus the baseline's, against training tokens",
               prose("differences", base=base.label),
               "validation loss minus the baseline's\n(bits per character)",
               [Series(arm.label, arm.curve_minus(base, VALID), looks[arm.name]) for arm in compared]),
        *drawn("validation_time", "Validation loss against training time", prose("validation_time"), LOSS,
               curves(VALID, SECONDS, marked=True) if timed else [], "training time (seconds)"),
        *drawn(reconstruction, "Loss of the compression functions against training tokens",
               prose(reconstruction), "reconstruction loss\n(MSE, sum over layers)",
               curves(f"{reconstruction}.train", label="{}, training")
               + curves(f"{reconstruction}.valid", label="{}, validation", marked=True)),
        *drawn("tokens_per_second", "Training speed against training tokens",
               prose("tokens_per_second", grows=bool(stages)), "training tokens per second",
               curves("tokens_per_second")),
    ]  # fmt: skip


def position_figure(arms: Sequence[Arm], base: Arm, folder: Path, bands: str) -> list[str]:
    """The loss by position in the segment: above, that of each arm; below, if there are several seeds, the
    difference to that of ``base`` from the same seed. Nothing if no run has finished."""
    looks = plotting.looks_of([arm.name for arm in arms])
    found = {
        "loss (bits per character)": [(arm, by_octave(arm)) for arm in arms],
        f"minus that of\n{base.label}": [(arm, by_octave(arm, base)) for arm in arms if arm is not base],
    }
    found = {name: [(arm, of) for arm, of in pairs if of] for name, pairs in found.items()}
    found = {name: pairs for name, pairs in found.items() if pairs}
    if not found:
        return []
    figure, places = plotting.panels([2.6] * len(found))
    for axes, (name, pairs) in zip(places, found.items(), strict=True):
        many = [
            Series(arm.label, [((a * z) ** 0.5, mean) for (a, z), mean in octaves.items()], looks[arm.name])
            for arm, octaves in pairs
        ]
        plotting.draw_lines(axes, many)
        plotting.style(axes, "position in the segment (tokens)", name)
        plotting.octave_axis(axes, [first for first, _ in pairs[0][1]])
    if len(places) > 1:
        places[-1].axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    caption = f"{prose('loss_by_position', base=base.label if len(places) > 1 else '')} {bands}".strip()
    title = "Validation loss by position in the segment"
    return [plotting.save_figure(figure, folder, "loss_by_position", title, caption)]


def by_octave(arm: Arm, base: Arm | None = None) -> dict[tuple[int, int], Mean]:
    """The mean loss in each octave of positions over seeds, or the difference to that of ``base`` from the
    same seed; no difference for a single seed, and none if the segments have different lengths."""
    results = {seed: octave_means(result) for seed, result in arm.results.items()}
    if base is None:
        pairs = [(octaves, dict.fromkeys(octaves, 0.0)) for octaves in results.values()]
    else:
        theirs = {seed: octave_means(result) for seed, result in base.results.items()}
        pairs = [(octaves, theirs[seed]) for seed, octaves in results.items() if seed in theirs]
        if len(pairs) < 2 or any(a.keys() != b.keys() for a, b in pairs):
            return {}
    octaves = pairs[0][0] if pairs else ()
    return {octave: mean_of([a[octave] - b[octave] for a, b in pairs]) for octave in octaves}


def bits(result: Result, nats: float = 1.0) -> float:
    """Nats per token as bits per character of the text of ``result``."""
    return float(nats * result["bits_per_character"] / result["loss"])


def octave_means(result: Result) -> dict[tuple[int, int], float]:
    """The mean loss at the positions 1, 2, 3 – 4, 5 – 8 and so on of a segment, by the first and the last."""
    by_position, found, first = result["loss_by_position"], {}, 1
    while first <= len(by_position):
        last = min(max(2 * (first - 1), 1), len(by_position))
        found[first, last] = bits(result, fmean(by_position[first - 1 : last]))
        first = last + 1
    return found


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
