"""How much a memory from a file helps, beside the package's own: on recall and on two texts.

Run it with ``python -m experiments.memories --out FOLDER`` in the top folder of a clone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant, prepared_python_source
from experiments.columns import correct
from experiments.memories import FOLDER
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.comparison.text import MEMORIES, TextTask
from memformers.report.arms import BITS, Measure
from memformers.report.recall import right_between
from memformers.training.config import EvaluationConfig, TrainConfig

SHAKESPEARE = "tiny-shakespeare"
PYTHON = "python-source"
SUBWORDS = 2048
"""The vocabulary of the Python source code."""
BANDS = ((0, 192), (192, 384))
"""Distances of recall that one layer of Transformer-XL sees, and those that only slots see."""
TEXT = TrainConfig(model=MEMORIES, max_tokens=800_000, evaluation=EvaluationConfig(evaluations=2))


def list_memories(train: TrainConfig, **slot_settings: Any) -> list[Variant]:
    """The arms with the lengths of ``train``, and slots with ``slot_settings``; all have equal keys."""
    n_keys = keys_of_layers(train.model)
    assert isinstance(n_keys, int)
    # The average is one more key.
    average = {"model": f"{FOLDER}/averages.py:Averages", "decay": 0.95, "mem_len": n_keys - 1}
    return [
        Variant("transformer", {"model": "transformer"}, "No memory"),
        Variant("transformer-xl", {"model": "transformer-xl", "mem_len": n_keys}, "Transformer-XL"),
        Variant("compressive", {"model": "compressive", **slot_settings}, "Compressive Transformer"),
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
    def list_variants(cls) -> Sequence[Variant]:
        return list_memories(TEXT)

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        recall = RecallConfig(quick=self.quick).setup.base
        recall_variants = list_memories(recall, compression_start="mean")
        experiments = {RECALL.name: self.plan_experiment(RECALL, recall, recall_variants)}

        characters = replace(TEXT, max_tokens=QUICK_TOKENS) if self.quick else TEXT
        texts = {SHAKESPEARE: characters}
        if not self.quick:
            data = self.data or prepared_python_source(folder, SUBWORDS)
            model = replace(MEMORIES, vocab_size=SUBWORDS)
            texts[PYTHON] = replace(characters, tokenizer="bpe", data=data, model=model)
        for name, train in texts.items():
            task = TextTask(probed=False)
            experiments[name] = self.plan_experiment(task, train, list_memories(train))
        return experiments

    def measures_of(self, task: str) -> Sequence[Measure]:
        if task == RECALL.name:
            return [correct(f"recall, set {a} to {b} tokens ago", right_between(a, b)) for a, b in BANDS]
        unit = Measure("bits per byte", "bits_per_byte") if task == PYTHON else BITS
        return [replace(unit, label=f"{unit.label}, {task}")]


if __name__ == "__main__":
    Memories.main()
