"""Recall against what a slot must hold: Transformer-XL and the Compressive Transformer of the recall
experiment on streams with other keys, values and shares of tokens that set one.

Run it with ``python -m experiments.recall_grid --out FOLDER``.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import ArmsCommand, correct
from memformers.common.fields import Count, Share
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall import RECALL, SETTINGS, RecallConfig
from memformers.data.recall_stream import RecallStream
from memformers.report.arms import Measure
from memformers.report.recall import right_between
from memformers.runs.folder import Arm
from memformers.runs.reader import Run

STREAMS = (  # in the order of what a slot must hold
    RecallStream(set_probability=1 / 16),
    RecallStream(keys=8, values=2),
    RecallStream(),
    RecallStream(keys=24, values=5),
    RecallStream(keys=32, values=8),
    RecallStream(set_probability=1 / 4),
)
MEMORIES = {  # arms of the recall experiment, their labels and their rivals
    "transformer-xl": ("Transformer-XL", ""),
    "compressive": ("slots", "transformer-xl"),
    "both-losses": ("slots, both losses", "compressive"),
}
BANDS = ((64, 192), (192, 384))  # what one layer of both memories sees, and of slots alone


def bits_of(stream: RecallStream, rate: int) -> float:
    """The bits that say which keys were set to which values in ``rate`` positions, on average."""
    return rate * stream.set_probability * math.log2(stream.keys * stream.values)


def beyond_chance(low: int, high: int) -> Measure:
    """The share of correct answers beyond chance: 0 for guesses, 1 if all are correct."""

    def share(result: dict[str, Any]) -> float | None:
        right, chance = right_between(low, high)(result), result["chance"]
        return None if right is None else (right - chance) / (1 - chance)

    return correct(f"set {low} to {high} tokens ago", share)


@dataclass(frozen=True)
class RecallGrid(ArmsCommand):
    """Train the memories of the recall experiment on streams that ask less and more of a slot."""

    name: ClassVar = "recall-grid"
    title: ClassVar = "Recall against what a slot must hold"
    method: ClassVar = (
        "A slot must hold which keys were set to which values in the positions that it stands for: of c "
        "positions, c · p · log₂(keys · values) bits on average, if a token sets a key with probability p. "
        "The shares are of correct answers beyond chance: 0 % for guesses, 100 % if all are correct. The "
        "settings are those of the recall experiment, which were chosen with 16 keys, 4 values and p = 1/8, "
        "on streams with other seeds; nothing was chosen on the other streams."
    )
    base: ClassVar = ""
    usual: ClassVar = [f"{m}-{i}" for i in range(len(STREAMS)) for m in ("transformer-xl", "compressive")]
    tokens: Count | None = None
    """Tokens of each training run; those of the recall experiment if not given."""
    growing: Share = SETTINGS["near"].recall.growing
    """The share of the training in which the distances of the questions grow."""

    @classmethod
    def listed(cls) -> Sequence[Arm]:
        setting = SETTINGS["near"]
        rate, arms = setting.train.model.memory_sizes[0].compression_rate, []
        for i, stream in enumerate(STREAMS):
            stream_settings = {f"recall.stream.{name}": value for name, value in asdict(stream).items()}
            stream_settings["model.vocab_size"] = stream.vocab_size
            what = (
                f"{bits_of(stream, rate):.1f} bits ({stream.keys} keys, {stream.values} values, "
                f"p = 1/{1 / stream.set_probability:g})"
            )
            for memory, (label, rival) in MEMORIES.items():
                settings = setting.arm(memory).settings | stream_settings
                arms.append(Arm(f"{memory}-{i}", settings, f"{what}: {label}", rival and f"{rival}-{i}"))
        return arms

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        setting = RecallConfig(tokens=self.tokens, quick=self.quick).setting
        more = replace(setting, recall=replace(setting.recall, growing=self.growing)).more
        arms = self.chosen(asdict(setting.train) | more)
        return {RECALL.name: Experiment(RECALL, setting.train, more, arms, *self.how)}

    def result_of(self, run: Run) -> dict[str, Any]:
        return {"chance": 1 / run.config["recall"]["stream"]["values"]}

    def measures(self, task: str) -> Sequence[Measure]:
        return [beyond_chance(*band) for band in BANDS]


if __name__ == "__main__":
    RecallGrid.main()
