"""The figures of a comparison: curves, and the loss by position, as Markdown with their captions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from memformers.common.intervals import Mean, mean_of
from memformers.report import plotting
from memformers.report.arms import Arm, Result
from memformers.report.markdown import plain
from memformers.report.sections import stages_of

VALID, TOKENS = "bits_per_character.valid", "training tokens"


def curve_figures(
    arms: Sequence[Arm], base: Arm, folder: Path, bands: str, read: str, *, timed: bool
) -> list[str]:
    """Every figure of curves that ``arms`` have data for: those against time if they are ``timed``. ``bands``
    explains the bands, and ``read`` says which part of the held-out text the validation read."""
    looks = plotting.looks_of([arm.name for arm in arms])
    stages = stages_of(arms)
    growth = " The memory becomes longer at the vertical grey lines." * bool(stages)

    def curves(x: str, y: str, label: str = "{}", *, marked: bool = False) -> list[plotting.Series]:
        look = {} if marked else {"marker": "", "linewidth": 1.0}
        return [
            plotting.Series(label.format(arm.label), curve(arm, x, y), looks[arm.name] | look) for arm in arms
        ]

    def drawn(
        name: str,
        title: str,
        caption: str,
        y: str,
        many: Sequence[plotting.Series],
        x: str = TOKENS,
        *,
        log: bool = False,
    ) -> list[str]:
        many = [series for series in many if series.points]
        if not many:
            return []
        figure, [axes] = plotting.panels([2.7])
        if log:
            axes.set_yscale("log")
        plotting.draw_lines(axes, many)
        if name == "tokens_per_second":
            axes.set_ylim(bottom=0)
        plotting.style(axes, x, y)
        if x == TOKENS:
            plotting.mark(axes, stages)
            caption += growth
        return [plotting.save_series(figure, folder, name, title, caption + bands, {f"{y} by {x}": many})]

    loss = "validation loss (bits per character)"
    minus = curve_minus if len(arms) > 1 and len(base.counted) > 1 else lambda *_: []
    return [
        *drawn(
            "validation_tokens",
            "Validation loss against training tokens",
            f"Validation loss over {read}, with memory carried from segment to segment.",
            loss,
            curves("tokens", VALID, marked=True),
        ),
        *drawn(
            "differences",
            "Validation loss minus the baseline's, against training tokens",
            f"The same loss minus that of {plain(base.label)} from the same seed; a value below zero is "
            f"better.",
            "validation loss minus the baseline's\n(bits per character)",
            [plotting.Series(arm.label, minus(arm, base, VALID), looks[arm.name]) for arm in arms],
        ),
        *drawn(
            "validation_time",
            "Validation loss against training time",
            "The same loss against training time, which does not include evaluations.",
            loss,
            curves("seconds", VALID, marked=True) if timed else [],
            "training time (seconds)",
        ),
        *drawn(
            "reconstruction_loss",
            "Loss of the compression functions against training tokens",
            "The loss of the compression functions. It measures how much attention changes when memories are "
            "replaced by their slots; for an auto-encoding arm, it is the error of a decoder that restores "
            "the memories from the slots. The loss can rise while the compression functions improve: an "
            "untrained model attends to all positions nearly alike, which is easy to reconstruct, and the "
            "attention of a trained one differs from token to token.",
            "reconstruction loss\n(MSE, sum over layers)",
            curves("tokens", "reconstruction_loss.train", "{}, training")
            + curves("tokens", "reconstruction_loss.valid", "{}, validation", marked=True),
            log=True,
        ),
        *drawn(
            "tokens_per_second",
            "Training speed against training tokens",
            "Training speed. "
            + "A step takes longer when its memory is longer, since it attends to more keys. " * bool(stages)
            + "Other programs on the machine can reduce the speed too.",
            "training tokens per second",
            curves("tokens", "tokens_per_second"),
        ),
    ]


def records_with(arm: Arm, name: str) -> dict[int, dict[float, Mapping[str, float]]]:
    """The records of an arm's runs that have ``name``, by seed and by their tokens."""
    return {run.seed: {r["tokens"]: r for r in run.metrics if name in r} for run in arm.counted}


def curve(arm: Arm, x: str, y: str) -> list[tuple[float, Mean]]:
    """The mean of ``x``, and that of ``y``, at each number of tokens for which all runs have both."""
    found = list(records_with(arm, y).values())
    return [
        (fmean(run[at][x] for run in found), mean_of([run[at][y] for run in found]))
        for at in found[0]
        if all(at in run and x in run[at] for run in found)
    ]


def curve_minus(arm: Arm, base: Arm, y: str) -> list[tuple[float, Mean]]:
    """The tokens at which both have ``y``, and the mean over their common seeds of the difference."""
    ours, theirs = records_with(arm, y), records_with(base, y)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return [
        (at, mean_of([a[at][y] - b[at][y] for a, b in pairs]))
        for at in (pairs[0][0] if pairs else ())
        if all(at in run for pair in pairs for run in pair)
    ]


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
    drawn = {}
    for axes, (name, pairs) in zip(places, found.items(), strict=True):
        drawn[name] = [
            plotting.Series(
                arm.label,
                [((first * last) ** 0.5, mean) for (first, last), mean in octaves.items()],
                looks[arm.name],
                names=[f"{first} – {last}" for first, last in octaves],
            )
            for arm, octaves in pairs
        ]
        plotting.draw_lines(axes, drawn[name])
        plotting.style(axes, "position in the segment (tokens)", name)
        plotting.octave_axis(axes, [first for first, _ in pairs[0][1]])
    caption = (
        "Loss over the whole held-out text, by position in the segment, in octaves. The first tokens of a "
        "segment have only a few of its tokens before them, so they depend mostly on memory."
    )
    if len(places) > 1:
        places[-1].axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
        caption += (
            f" The lower panel has the loss minus that of {plain(base.label)} from the same seed; a value "
            f"below zero is better."
        )
    title = "Validation loss by position in the segment"
    return [plotting.save_series(figure, folder, "loss_by_position", title, caption + bands, drawn)]


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
    plotting.draw_marks(right, [plotting.Series("", points, plotting.ORANGE | {"marker": "o"})])
    plotting.style(right, "remembered before the segment (tokens)", "loss (nats per token, ± 95 %)")
    plotting.save(figure, path)
