"""What makes a slot hold more, and a memory: the Compressive Transformer of the recall experiment with one
setting changed at a time, and Transformer-XL in the same way.

Run it with ``python -m experiments.slots --out FOLDER``, and with ``--memory transformer-xl``. It measures on
streams on which nothing is claimed later.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from experiments.arms import ArmsCommand, correct
from memformers.common.fields import Count
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall import RECALL, RecallConfig
from memformers.report.arms import MEASURES, Measure
from memformers.runs.folder import Arm

SLOW, FAST = ({"optim.learning_rate": x * 3e-3, "optim.muon_learning_rate": x * 0.02} for x in (0.5, 2))
ARMS = (
    Arm("usual", {}, "as in the experiment"),
    Arm("c2", {"model.compression_rate": 2}, "c = 2"),
    Arm("c8", {"model.compression_rate": 8}, "c = 8"),
    Arm("heads-1", {"model.n_heads": 1}, "1 head"),
    Arm("heads-2", {"model.n_heads": 2}, "2 heads"),
    Arm("width-96", {"model.d_model": 96, "model.n_heads": 3, "model.d_ff": 384}, "width 96, 3 heads"),
    Arm("layers-3", {"model.n_layers": 3}, "3 layers"),
    Arm("streams-16", {"batch_size": 16}, "16 streams"),
    Arm("slow", SLOW, "half the learning rates"),
    Arm("fast", FAST, "twice the learning rates"),
    Arm("beta2", {"optim.beta2": 0.999}, "β₂ 0.999"),
    Arm("bptt", {"model.bptt": 1}, "f_c learns from the task too"),
    Arm("bptt-4", {"model.bptt": 4}, "f_c learns from the task too, for longer"),
    Arm("grow-quarter", {"recall.growing": 0.25}, "distances grow in a quarter"),
    Arm("grow-longer", {"recall.growing": 0.75}, "distances grow in three quarters"),
)
OF_SLOTS = {"model.compression_rate", "model.bptt"}  # which Transformer-XL doesn't have


def at(place: str) -> Measure:
    return correct(f"correct in {place}", lambda result: result["recall"]["by_place"][place])


@dataclass(frozen=True)
class Slots(ArmsCommand):
    """Train a model of the recall experiment with one setting changed at a time."""

    name: ClassVar = "slots"
    title: ClassVar = "What makes a slot hold more"
    method: ClassVar = "The streams are others than those on which something is claimed. Chance is 25 %."
    base: ClassVar = "usual"
    known: ClassVar = ARMS
    seeds: Count = 1
    memory: Literal["compressive", "transformer-xl"] = "compressive"
    """The arm of the recall experiment whose settings change."""

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        setting = RecallConfig(quick=self.quick).setting
        setting = replace(setting, recall=replace(setting.recall, measured_for="choosing"))
        usual = setting.arm(self.memory).settings
        arms = tuple(
            replace(arm, settings=usual | arm.settings)
            for arm in self.chosen(asdict(setting.train) | setting.more)
            if self.memory == "compressive" or not OF_SLOTS & arm.settings.keys()
        )
        return {RECALL.name: Experiment(RECALL, setting.train, setting.more, arms, *self.how)}

    def measures(self, task: str) -> Sequence[Measure]:
        return [*map(at, ("memory", "slots", "beyond")), MEASURES["recall"]]


if __name__ == "__main__":
    Slots.main()
