"""A minimal custom memory: each layer remembers its newest inputs exactly, and everything before them in one
slot, an exponential average.

    memformers train --model experiments/memories/averages.py:Averages --decay 0.95
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from memformers import CustomMemory, MemorySizes, NetworkConfig, Range


@dataclass(frozen=True)
class Settings:
    """The settings of the memory, which become options of the command."""

    decay: Annotated[float, Range(0, 1)] = 0.9
    """How much of the average is kept when an input joins it."""


class Averages(CustomMemory):
    """The newest M inputs of each layer, and one slot: a ← d · a + (1 − d) · x for each input x that leaves
    them, with the ``decay`` d."""

    Config = Settings
    keeps_keys = True  # attention alone reads the memory, so generation is faster

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """M positions, and one slot for about 1 / (1 − d) inputs: after that many more, an input's share in
        the average has fallen to 1/e."""
        reach = round(1 / max(1 - config.memory_config.decay, 0.01))
        return [MemorySizes(M, 1, reach) for M in config.per_layer("mem_len")]

    def grow(self, layer: int, slots: Tensor, evicted: Tensor, belongs: Tensor) -> Tensor:
        """The average after the inputs ``evicted [n, B, D]`` too; those of an earlier document are zeros."""
        d = self.settings.decay
        for x in evicted:
            slots = d * slots + (1 - d) * x
        return slots
