"""Recall against what a slot must hold: Transformer-XL and the Compressive Transformer of the recall
experiment on streams with other keys, values and shares of tokens that set one.

Run it with ``python -m experiments.recall_grid --out FOLDER``. Finished training runs are kept, so it can be
stopped and continued with ``--resume``, which also adds seeds. The report has a row for each stream, and a
figure of both memories by the bits that a slot must hold.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from experiments.columns import Measured
from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range, Share
from memformers.common.intervals import Mean
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.recall import SETTINGS, USUAL_JOBS, RecallConfig
from memformers.comparison.recall_training import RECALL
from memformers.data.recall_stream import RecallStream
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Measure, Result, arms_of
from memformers.report.markdown import table
from memformers.report.page import write_page
from memformers.report.provenance import facts_table
from memformers.report.recall import right_between
from memformers.runs.reader import read_runs

STREAMS = (
    RecallStream(set_probability=1 / 16),
    RecallStream(keys=8, values=2),
    RecallStream(),
    RecallStream(keys=24, values=5),
    RecallStream(keys=32, values=8),
    RecallStream(set_probability=1 / 4),
)
"""In the order of what a slot must hold; the third is that of the recall experiment."""
Memory = Literal["transformer-xl", "compressive", "both-losses"]
MEMORIES: tuple[str, ...] = get_args(Memory)
"""Arms of the recall experiment; in the last one, f_c learns from the answers in the next segment too."""
BANDS = ((64, 192), (192, 384))
"""Distances that one layer of both memories sees, and that one layer of slots alone sees."""
Streams = Mapping[RecallStream, Mapping[str, ArmRuns]]
"""The memories that have results on each stream, by their names."""
METHOD = (
    "A slot must hold which keys were set to which values in the positions that it stands for: of c "
    "positions, c · p · log₂(keys · values) bits on average, if a token sets a key with probability p. The "
    "shares are of correct answers beyond chance: 0 % for guesses, 100 % if all are correct. The settings "
    "are those of the recall experiment, which were chosen with 16 keys, 4 values and p = 1/8, on streams "
    "with other seeds; nothing was chosen on the other streams. ± and bands are 95 % intervals over seeds, "
    "by Student's t; differences are paired by seed."
)


def bits_of(stream: RecallStream, rate: int) -> float:
    """The bits that say which keys were set to which values in ``rate`` positions, on average."""
    return rate * stream.set_probability * math.log2(stream.keys * stream.values)


def name_of(stream: RecallStream) -> str:
    """The stream in a table."""
    return f"{stream.keys} keys, {stream.values} values, p = 1/{1 / stream.set_probability:g}"


@dataclass(frozen=True)
class RecallGrid(ExperimentCommand):
    """Train the memories of the recall experiment on streams that ask less and more of a slot."""

    name: ClassVar = "recall-grid"
    memories: tuple[Memory, ...] = ("transformer-xl", "compressive")
    """Which memories; with both-losses, f_c of the Compressive Transformer learns from the answers too."""
    streams: tuple[Annotated[int, Range(1, len(STREAMS))], ...] = tuple(range(1, len(STREAMS) + 1))
    """Which of the streams, in the order of the report."""
    tokens: Count = SETTINGS["near"].train.tokens
    """Tokens of each training run."""
    growing: Share = SETTINGS["near"].recall.growing
    """The share of the training in which the distances of the questions grow."""
    seeds: Count = 3
    """How many times each memory is trained on each stream."""
    jobs: Count = USUAL_JOBS
    """Training runs at a time, each with one thread."""

    def experiment(self, folder: Path) -> Path:
        """Train what the folder doesn't have, and write the report."""
        setting = RecallConfig(tokens=self.tokens).setting
        setting = replace(setting, recall=replace(setting.recall, growing=self.growing))
        arms = [
            replace(arm, name=f"{arm.name}-{i - 1}", settings=arm.settings | settings_of(STREAMS[i - 1]))
            for i in self.streams
            for arm in map(setting.arm, self.memories)
        ]
        experiment = Experiment(RECALL, setting.train, setting.more, tuple(arms), self.seeds, self.jobs, 1)
        run_experiment(experiment, folder, self.dashboard, resume=self.resume)
        return write_grid(folder)


def settings_of(stream: RecallStream) -> dict[str, float]:
    """The settings of a run that reads ``stream``."""
    own = {f"recall.stream.{name}": value for name, value in asdict(stream).items()}
    return {**own, "model.vocab_size": stream.vocab_size}


def beyond_chance(low: int, high: int, stream: RecallStream) -> Measure:
    """The share of correct answers about values that were set from ``low`` to before ``high`` positions ago,
    beyond chance: 0 for guesses, 1 if all are correct."""
    right: Callable[[Result], float | None] = right_between(low, high)

    def share(result: Result) -> float | None:
        found = right(result)
        return None if found is None else (found - stream.chance) / (1 - stream.chance)

    return Measure(title_of((low, high)), share, ".1f", " %", " points", 100, 1)


def write_grid(folder: Path) -> Path:
    """Write the report of the training runs in ``folder``; returns its page.

    Raises UserError if nothing has a result.
    """
    arms = {arm.name: arm for arm in arms_of(read_runs(folder, "recall")) if arm.results}
    found = {
        stream: {memory: arms[f"{memory}-{i}"] for memory in MEMORIES if f"{memory}-{i}" in arms}
        for i, stream in enumerate(STREAMS)
    }
    streams = {stream: memories for stream, memories in found.items() if memories}
    if not streams:
        raise UserError(f"{folder} has no training run that has finished; go on with --resume.")
    rate = next(iter(arms.values())).first.config["model"]["compression_rate"]
    parts = ["# Recall against what a slot must hold", grid_figure(streams, rate, folder)]
    for band in BANDS:
        parts += [f"## {title_of(band).capitalize()}", band_table(streams, rate, band)]
    parts += ["## How it was made", METHOD, facts_table([*arms.values()], folder)]
    return write_page(parts, folder)


def labels_of(streams: Streams) -> dict[str, str]:
    """The label of each memory, by its name."""
    labels = {memory: arm.label for memories in streams.values() for memory, arm in memories.items()}
    return {memory: labels[memory] for memory in MEMORIES if memory in labels}


def title_of(band: tuple[int, int]) -> str:
    """The distances of a band."""
    return f"set {band[0]} to {band[1]} positions ago"


def band_table(streams: Streams, rate: int, band: tuple[int, int]) -> str:
    """A row for each stream: the bits of a slot, each memory's answers, and its difference to the first
    memory's."""
    rows, labels = [], labels_of(streams)
    first, *others = labels
    for stream, memories in streams.items():
        measure = beyond_chance(*band, stream)
        column = Measured(title_of(band), measure, memories)
        means = [measure.shown(column.mean(memory)) for memory in labels]
        more = [measure.shown_difference(column.difference(memory, first)) for memory in others]
        rows.append([name_of(stream), f"{bits_of(stream, rate):.1f}", *means, *more])
    heads = [f"{labels[memory]}, minus {labels[first]}" for memory in others]
    return table(["stream", "bits a slot must hold", *labels.values(), *heads], rows)


def grid_figure(streams: Streams, rate: int, folder: Path) -> str:
    """A panel for each band of distances, with a line for each memory."""
    figure, panels = plotting.panels([2.2] * len(BANDS), sharex=True, sharey=True)
    looks, labels = plotting.line_styles([*MEMORIES]), labels_of(streams)
    for band, axes in zip(BANDS, panels, strict=True):
        title = title_of(band)
        points: dict[str, list[tuple[float, Mean]]] = {memory: [] for memory in labels}
        for stream, memories in streams.items():
            for memory, arm in memories.items():
                if mean := arm.mean(beyond_chance(*band, stream).of):
                    points[memory].append((bits_of(stream, rate), mean))
        many = [
            plotting.Series(label, points[memory], looks[memory], scale=100)
            for memory, label in labels.items()
        ]
        plotting.draw_lines(axes, many)
        plotting.style(axes, "bits that a slot must hold", "correct beyond chance (%)", title)
        axes.label_outer()
    caption = "Correct answers beyond chance, by the bits that a slot must hold; each point is a stream."
    return plotting.save_figure(figure, folder, "grid", "Recall by the bits of a slot", caption)


if __name__ == "__main__":
    RecallGrid.main()
