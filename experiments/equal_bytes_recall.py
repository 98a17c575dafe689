"""All memories on the recall stream, with the bytes of the Compressive Transformer's positions and slots.

Run it with ``python -m experiments.equal_bytes_recall --out FOLDER``; ``--resume`` continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from experiments.arms import ArmsCommand, Variant
from experiments.columns import correct
from experiments.equal_bytes import list_memories
from memformers.common.fields import Count, replace_nested
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import Reach, RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.report.arms import Measure
from memformers.report.recall import right_between

BANDS: dict[Reach, Sequence[tuple[int, int]]] = {
    "near": ((0, 192), (192, 384)),
    "far": ((0, 256), (256, 512), (512, 2048)),
}
"""By reach, distances that one layer of Transformer-XL sees, and farther ones; the last of far are beyond all
of its layers."""


@dataclass(frozen=True)
class EqualBytesRecall(ArmsCommand):
    """Train every memory on the recall stream, with equal keys or bytes and from several seeds."""

    name: ClassVar = "equal-bytes-recall"
    title: ClassVar = "Recall by all memories at equal bytes"
    method: ClassVar = (
        "Chance is 25 %. No memory has a token shift, and all are trained with the same recipe, which was "
        "chosen for none of them but the Compressive Transformer, whose compression starts as the mean."
    )
    base: ClassVar = "transformer-xl"
    reach: Reach = "near"
    """How many tokens before the segment the slots reach: 320 (near) or 2,048 (far)."""
    tokens: Count | None = None
    """The number of tokens of each training run, instead of 3,000,000."""

    @property
    def recall(self) -> RecallConfig:
        return RecallConfig(self.reach, quick=self.quick, tokens=self.tokens)

    @classmethod
    def list_variants(cls) -> Sequence[Variant]:
        # Names and labels, which are those of each reach.
        return variants_of(RecallConfig("near"))

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        base = replace_nested(self.recall.setup.base, token_shift=False)
        return {RECALL.name: self.plan_experiment(RECALL, base, variants_of(self.recall))}

    def measures_of(self, task: str) -> Sequence[Measure]:
        return [
            correct(f"set {near} to {far} tokens ago", right_between(near, far))
            for near, far in BANDS[self.reach]
        ]


def variants_of(config: RecallConfig) -> list[Variant]:
    """Every memory with the keys that the Compressive Transformer has in ``config``, or with their bytes."""
    model = config.setup.base.model
    n_keys = keys_of_layers(model)
    assert isinstance(n_keys, int)
    variants = []
    for memory, lengths in list_memories(n_keys, model.d_model // model.n_heads):
        settings = dict(lengths)
        # Slots have the lengths with which they reach as far as the questions.
        if "c_mem_len" in settings:
            settings |= {"mem_len": model.mem_len, "c_mem_len": model.c_mem_len}
        if memory.arm == "compressive-transformer":
            settings["compression_start"] = "mean"
        variants.append(Variant(memory.arm, settings, memory.name))
    return variants


if __name__ == "__main__":
    EqualBytesRecall.main()
