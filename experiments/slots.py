"""What makes a slot hold more, and a memory: the Compressive Transformer of the recall experiment with one
setting changed at a time, and Transformer-XL in the same way.

Run it with ``python -m experiments.slots --out FOLDER``, and with ``--memory transformer-xl``. It measures on
streams that no later claim uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.arms import ArmsCommand, Variant
from experiments.columns import correct
from memformers.common.fields import Count, replace_nested
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.report.arms import MEASURES, Measure

# Multiples of the experiment's learning rates.
SLOW = {"learning_rate": 0.5 * 3e-3, "muon_learning_rate": 0.5 * 0.02}
FAST = {"learning_rate": 2 * 3e-3, "muon_learning_rate": 2 * 0.02}
VARIANTS = (
    Variant("usual", {}, "as in the experiment"),
    Variant("c2", {"compression_rate": 2}, "c = 2"),
    Variant("c8", {"compression_rate": 8}, "c = 8"),
    Variant("heads-1", {"n_heads": 1}, "1 head"),
    Variant("heads-2", {"n_heads": 2}, "2 heads"),
    Variant("width-96", {"d_model": 96, "n_heads": 3, "d_ff": 384}, "width 96, 3 heads"),
    Variant("layers-3", {"n_layers": 3}, "3 layers"),
    Variant("streams-16", {"batch_size": 16}, "16 streams"),
    Variant("slow", SLOW, "half the learning rates"),
    Variant("fast", FAST, "twice the learning rates"),
    Variant("beta2", {"beta2": 0.999}, "β₂ 0.999"),
    Variant("bptt", {"bptt": 1}, "f_c learns from the task too"),
    Variant("bptt-4", {"bptt": 4}, "f_c learns from the task too, for longer"),
    Variant("grow-quarter", {"growing": 0.25}, "distances grow in a quarter"),
    Variant("grow-longer", {"growing": 0.75}, "distances grow in three quarters"),
)
SETTINGS_OF_SLOTS = {"compression_rate", "bptt"}
"""Transformer-XL doesn't have them."""


def correct_in(part: str) -> Measure:
    """The correct answers about values that are in a ``part`` of the memory, or beyond it."""
    return correct(f"correct in {part}", lambda result: result["recall"]["by_place"][part])


@dataclass(frozen=True)
class Slots(ArmsCommand):
    """Train a model of the recall experiment with one setting changed at a time."""

    name: ClassVar = "slots"
    title: ClassVar = "What makes a slot hold more"
    method: ClassVar = "Selection and reporting use disjoint streams. Chance is 25 %."
    base: ClassVar = "usual"
    variants: ClassVar = VARIANTS
    seeds: Count = 1
    memory: Literal["compressive", "transformer-xl"] = "compressive"
    """The arm of the recall experiment whose settings change."""

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        setup = RecallConfig(quick=self.quick).setup
        # The streams on which settings are chosen are not those of a claim.
        base = replace_nested(setup.base, measured_for="choosing")
        is_xl = self.memory == "transformer-xl"
        shared: dict[str, Any] = {"compression_start": "mean"}
        if is_xl:
            shared = {"model": self.memory, "mem_len": keys_of_layers(base.model)}
        variants = []
        for variant in self.list_variants():
            if is_xl and SETTINGS_OF_SLOTS & variant.settings.keys():
                continue
            variants.append(replace(variant, settings={**shared, **variant.settings}))
        return {RECALL.name: self.plan_experiment(RECALL, base, variants)}

    def measures_of(self, task: str) -> Sequence[Measure]:
        in_parts = [correct_in(part) for part in ("memory", "slots", "beyond")]
        return [*in_parts, MEASURES["recall"]]


if __name__ == "__main__":
    Slots.main()
