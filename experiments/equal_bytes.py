"""All memories on one text at equal keys and, but for the differences that the report shows, equal bytes.

Run it with ``python -m experiments.equal_bytes --data input.txt --out FOLDER``; ``--resume`` continues.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant
from experiments.memories import ALL_MEMORIES, ListedMemory
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


def list_memories(keys: int, d_head: int) -> Iterator[tuple[ListedMemory, dict[str, Any]]]:
    """Each memory with the settings that give it the bytes of ``keys`` positions in each layer, or for
    Infini-attention, whose state has the size of its heads, no others. Memory tokens are left out: with equal
    bytes, their first layer alone would have the keys of all layers."""
    lengths_by_formula: Mapping[str, dict[str, Any]] = {
        "M": {"mem_len": keys},
        "M + C": {"mem_len": keys // 2, "c_mem_len": keys // 2},
        "M + 1": {"mem_len": keys - 1},
        "0": {},
    }
    # A head's state is a matrix with d_head columns, each of the size of a position: it counts as d_head
    # keys.
    lengths_by_name = {"Gated DeltaNet": {"mem_len": keys - d_head}}
    for memory in ALL_MEMORIES:
        lengths = lengths_by_name.get(memory.name, lengths_by_formula.get(memory.keys))
        if lengths is not None:
            yield memory, {"model": memory.import_path, **lengths}


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
    variants: ClassVar = tuple(
        Variant(memory.arm, settings, memory.name) for memory, settings in list_memories(KEYS, D_HEAD)
    )
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
