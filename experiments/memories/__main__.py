"""How much a memory from a file helps, beside the package's own: on recall and on two texts.

Run it with ``python -m experiments.memories --out FOLDER`` in the top folder of a clone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant, correct, prepared_python_source
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.comparison.text import MEMORIES, TextTask
from memformers.report.arms import BITS, Measure
from memformers.report.recall import right_between
from memformers.training.config import EvaluationConfig, TrainConfig

SHAKESPEARE, PYTHON, SUBWORDS = "tiny-shakespeare", "python-source", 2048
TEXT = TrainConfig(model=MEMORIES, max_tokens=800_000, evaluation=EvaluationConfig(evaluations=2))
FILES = "experiments/memories"


def arms_of(train: TrainConfig, **of_slots: Any) -> list[Variant]:
    """The arms with the lengths of ``train``, slots with settings ``of_slots``; all have equal keys."""
    keys = keys_of_layers(train.model)
    assert isinstance(keys, int)
    average = {"model": f"{FILES}/averages.py:Averages", "decay": 0.95, "mem_len": keys - 1}
    return [
        Variant("transformer", {"model": "transformer"}, "No memory"),
        Variant("transformer-xl", {"model": "transformer-xl", "mem_len": keys}, "Transformer-XL"),
        Variant("compressive", {"model": "compressive", **of_slots}, "Compressive Transformer"),
        Variant("averages", average, "Exponential average"),
    ]


@dataclass(frozen=True)
class Memories(ArmsCommand):
    """Train each memory on recall, Tiny Shakespeare and Python source code, from several seeds."""

    name: ClassVar = "memories"
    title: ClassVar = "A memory from a file, beside those of the package"
    method: ClassVar = (
        "No setting of the average was searched. Chance of recall is 25 %. Operations are those that read "
        "and write memories, not those that compress."
    )
    base: ClassVar = "transformer-xl"
    data: str = ""
    """The long text, as for training; the Python source code of this machine if not given. With --quick, it
    is left out."""

    @classmethod
    def listed(cls) -> Sequence[Variant]:
        return arms_of(TEXT)

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        recall = RecallConfig(quick=self.quick).setup.base
        text = replace(TEXT, max_tokens=QUICK_TOKENS) if self.quick else TEXT
        texts = {SHAKESPEARE: text}
        if not self.quick:
            data = self.data or prepared_python_source(folder, SUBWORDS)
            model = replace(MEMORIES, vocab_size=SUBWORDS)
            texts[PYTHON] = replace(text, tokenizer="bpe", data=data, model=model)
        listed = arms_of(recall, compression_start="mean")
        experiments = {RECALL.name: self.experiment_on(RECALL, recall, listed)}
        for task, train in texts.items():
            experiments[task] = self.experiment_on(TextTask(probed=False), train, arms_of(train))
        return experiments

    def measures(self, task: str) -> Sequence[Measure]:
        """One layer of Transformer-XL looks 192 positions back in recall."""
        if task != RECALL.name:
            unit = Measure("bits per byte", "bits_per_byte") if task == PYTHON else BITS
            return [replace(unit, label=f"{unit.label}, {task}")]
        return [
            correct(f"recall, set {a} to {b} tokens ago", right_between(a, b))
            for a, b in ((0, 192), (192, 384))
        ]


if __name__ == "__main__":
    Memories.main()
