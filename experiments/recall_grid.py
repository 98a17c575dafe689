"""Recall against what a slot must hold: Transformer-XL and the Compressive Transformer of the recall
experiment on streams with other keys, values and shares of tokens that set one.

Run it with ``python -m experiments.recall_grid --out FOLDER``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import ArmsCommand, Variant
from experiments.columns import correct
from memformers.common.fields import Count, Share, replace_nested
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import SETTINGS, RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.data.recall_stream import RecallStream
from memformers.report.arms import Measure, Result
from memformers.report.recall import right_between
from memformers.runs.reader import Run

STREAMS = (
    RecallStream(set_probability=1 / 16),
    RecallStream(keys=8, values=2),
    RecallStream(),
    RecallStream(keys=24, values=5),
    RecallStream(keys=32, values=8),
    RecallStream(set_probability=1 / 4),
)
"""In the order of what a slot must hold."""
MEMORIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformer-xl": ("Transformer-XL", "", {"model": "transformer-xl"}),
    "compressive": ("slots", "transformer-xl", {"compression_start": "mean"}),
    "both-losses": ("slots, both losses", "compressive", {"compression_start": "mean", "bptt": 1}),
}
"""The arms of the recall experiment with these names: their labels, their rivals and their settings."""
BANDS = ((64, 192), (192, 384))
"""Distances that one layer of both memories sees, and those that one layer with slots alone sees."""


def bits_of(stream: RecallStream, rate: int) -> float:
    """The bits that say which keys were set to which values in ``rate`` positions, on average."""
    return rate * stream.set_probability * math.log2(stream.keys * stream.values)


def beyond_chance(low: int, high: int) -> Measure:
    """The share of correct answers beyond chance: 0 for guesses, 1 if all are correct."""

    read_correct = right_between(low, high)

    def read_share(result: Result) -> float | None:
        share = read_correct(result)
        if share is None:
            return None
        chance: float = result["chance"]
        return (share - chance) / (1 - chance)

    return correct(f"set {low} to {high} tokens ago", read_share)


def list_variants_on(number: int, stream: RecallStream) -> Iterator[Variant]:
    """The memories on one of the streams, whose ``number`` is in their names."""
    model = SETTINGS["near"].base.model
    rate = model.memory_sizes[0].compression_rate
    content = (
        f"{bits_of(stream, rate):.1f} bits ({stream.keys} keys, {stream.values} values, "
        f"p = 1/{1 / stream.set_probability:g})"
    )
    for memory, (label, rival, memory_settings) in MEMORIES.items():
        settings = {**memory_settings, "stream": stream, "vocab_size": stream.vocab_size}
        # The number of positions and slots together.
        if memory == "transformer-xl":
            settings["mem_len"] = keys_of_layers(model)
        rival_name = f"{rival}-{number}" if rival else ""
        yield Variant(f"{memory}-{number}", settings, f"{content}: {label}", rival_name)


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
    default_arms: ClassVar = [
        f"{memory}-{number}" for number in range(len(STREAMS)) for memory in ("transformer-xl", "compressive")
    ]
    tokens: Count | None = None
    """Tokens of each training run; those of the recall experiment if not given."""
    growing: Share = SETTINGS["near"].base.recall.growing
    """The share of the training in which the distances of the questions grow."""

    @classmethod
    def list_variants(cls) -> Sequence[Variant]:
        variants: list[Variant] = []
        for number, stream in enumerate(STREAMS):
            variants += list_variants_on(number, stream)
        return variants

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        base = RecallConfig(tokens=self.tokens, quick=self.quick).setup.base
        base = replace_nested(base, growing=self.growing)
        return {RECALL.name: self.plan_experiment(RECALL, base)}

    def extra_results(self, run: Run) -> dict[str, Any]:
        return {"chance": 1 / run.config["recall"]["stream"]["values"]}

    def measures_of(self, task: str) -> Sequence[Measure]:
        return [beyond_chance(low, high) for low, high in BANDS]


if __name__ == "__main__":
    RecallGrid.main()
