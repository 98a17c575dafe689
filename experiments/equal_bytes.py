"""All memories on one text at equal keys and, but for the differences that the report shows, equal bytes.

Run it with ``python -m experiments.equal_bytes --data input.txt --out FOLDER``; ``--resume`` continues.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant
from experiments.memories import ALL_MEMORIES
from memformers.common.fields import Count
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import TextTask
from memformers.models.config import ModelConfig
from memformers.report.arms import BITS, Measure
from memformers.training.config import EvaluationConfig, TrainConfig

BASE = TrainConfig(
    # Some memories attend in their own way, which a token shift can't change; so none has one.
    model=ModelConfig(model="transformer-xl", token_shift=False),
    max_tokens=1_000_000,
    evaluation=EvaluationConfig(evaluations=1),
)
KEYS = 64
"""In each layer, besides the segment's; half of them slots or kept positions where there are any."""
D_HEAD = BASE.model.d_model // BASE.model.n_heads
LENGTHS_BY_KEYS: Mapping[str, dict[str, Any]] = {
    "M": {"mem_len": KEYS},
    "M + C": {"mem_len": KEYS // 2, "c_mem_len": KEYS // 2},
    "M + 1": {"mem_len": KEYS - 1},
    "0": {},
}
"""The lengths with which each formula of a memory's keys is KEYS, if it can be."""
LENGTHS_BY_NAME = {"Gated DeltaNet": {"mem_len": KEYS - D_HEAD}}
"""The state of a head is a matrix with D_HEAD columns, each of the size of a position: it counts as D_HEAD of
the keys."""


def list_memories() -> Iterator[Variant]:
    """All memories but memory tokens: with equal bytes, their first layer alone would have 512 keys."""
    for memory in ALL_MEMORIES:
        if memory.keys in LENGTHS_BY_KEYS:
            lengths = LENGTHS_BY_NAME.get(memory.name, LENGTHS_BY_KEYS[memory.keys])
            yield Variant(memory.arm, {"model": memory.import_path, **lengths}, memory.name)


@dataclass(frozen=True)
class EqualBytes(ArmsCommand):
    """Train every memory on a text in characters, with equal keys or bytes and from several seeds."""

    name: ClassVar = "equal-bytes"
    title: ClassVar = "All memories at equal bytes"
    method: ClassVar = (
        "Bits are those of the held-out text. No memory has a token shift, and all are trained with the same "
        "recipe, which was chosen for none of them."
    )
    base: ClassVar = "transformer-xl"
    variants: ClassVar = tuple(list_memories())
    data: str = ""
    """The text, as for training; Tiny Shakespeare if not given."""
    tokens: Count = BASE.max_tokens
    """Tokens of each training run."""

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        tokens = QUICK_TOKENS if self.quick else self.tokens
        train = replace(BASE, data=self.data, max_tokens=tokens)
        return {"characters": self.plan_experiment(TextTask(probed=False), train)}

    def measures_of(self, task: str) -> Sequence[Measure]:
        return [BITS]


if __name__ == "__main__":
    EqualBytes.main()
