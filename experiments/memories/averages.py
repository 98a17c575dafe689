"""A memory in one file: memformers train --model experiments/memories/averages.py:Averages --decay 0.95"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from memformers import LayerMemory, MemoryRule, Range, UpdateContext


@dataclass(frozen=True)
class Settings:
    decay: Annotated[float, Range(0, 1)] = 0.9
    """How much of the average is kept when an input joins it."""


class Averages(MemoryRule):
    """The newest ``mem_len`` inputs exactly, and everything older in one slot, an exponential average:
    slot ← d · slot + (1 − d) · x for each input x that leaves the newest, with the ``decay`` d."""

    Config = Settings
    n_slots = 1

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        window = self.push(past, x, context)
        slot = window.slots  # [1, B, D]
        for evicted in window.evicted:  # [B, D]
            slot = self.settings.decay * slot + (1 - self.settings.decay) * evicted
        return LayerMemory(window.mem, slot), None
