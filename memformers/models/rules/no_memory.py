"""A transformer without memory: each segment is read alone."""

from collections.abc import Sequence

from torch import Tensor

from memformers.models.config import NetworkConfig
from memformers.models.memory import LayerMemory
from memformers.models.rules.base import MemoryRule, UpdateContext
from memformers.models.sizes import MemorySizes


class NoMemory(MemoryRule):
    """Remember nothing."""

    append_only = True
    remembers = False

    @classmethod
    def sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """Nothing."""
        return [MemorySizes(slot_positions=1)] * config.n_layers

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        """Nothing of ``x [S, B, D]``; no loss."""
        return LayerMemory.nothing(x), None
