"""Older positions kept at random: what any rule that chooses positions has to be better than.

    memformers train --model experiments/memories/random_positions.py:RandomPositions

Position number i of a document has a priority once and for all, p(i), pseudorandom between 0 and 1:

    keep the C of the older positions with the highest p

Kept positions expire as in ``model="selective"``: for c positions that leave the newest M, the oldest one.
So C of about the c·C positions before the newest M are kept, each as likely as any other, and a comparison
with selective is one of the choice alone. p is a hash of i, the layer's number and ``hash_seed``, which makes
runs repeatable and streams independent of their batch; all documents of a layer keep the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from memformers import LayerMemory, MemoryRule, MemorySizes, NetworkConfig, Range, UpdateContext

GOLDEN = 0x1E3779B97F4A7C15
MIX = 0x3F58476D1CE4E5B9
"""Odd multipliers of SplitMix64 (Steele et al. 2014), cut to 62 bits so that they fit into int64."""
N_BITS = 31
"""How many of a product's upper bits are used; the lower ones are less random."""


@dataclass(frozen=True)
class Settings:
    hash_seed: Annotated[int, Range(0, 2**20)] = 0
    """Another one keeps other positions."""


class RandomPositions(MemoryRule):
    """The newest ``mem_len`` inputs, and ``c_mem_len`` older ones at random. ``state`` has the number of the
    newest position in its document, ``newest [1, B]``, and of each kept one, ``kept [C, B]``, both int32."""

    Config = Settings

    def __init__(self, size: MemorySizes, settings: Any, layer: int = 0):
        super().__init__(size, settings)
        self.layer_number = layer

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """A kept position stands for itself; each adds c positions to those that a layer covers."""
        lengths = (config.per_layer(name) for name in ("mem_len", "c_mem_len", "compression_rate"))
        by_layer = zip(*lengths, strict=True)
        return [MemorySizes(M, C, c, slot_positions=1, extra_state=C + 1) for M, C, c in by_layer]

    @classmethod
    def build(cls, config: NetworkConfig) -> Sequence[MemoryRule]:
        """The rule of each layer, which keeps other positions than the others."""
        sizes = enumerate(config.memory_sizes)
        return [cls(size, config.memory_config, number) for number, size in sizes]

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        candidates = self.candidates(past, x, context, self.size.compression_rate)
        S, B, _ = x.shape
        zero = torch.zeros(1, B, dtype=torch.int32, device=x.device)
        # The segment goes on with the document's numbers, or a document has started within it.
        newest = past.state.get("newest", zero) + S  # [1, B]
        if context.n_valid is not None:
            newest = newest.where(context.n_valid > S, context.n_valid).int()
        # Numbers of the candidates: those kept so far have theirs, and those that leave follow each other.
        n_evicted = past.mem_len + S - len(candidates.mem)
        n_kept = len(candidates.older) - n_evicted
        kept = past.state.get("kept", zero.expand(past.n_slots, B))[past.n_slots - n_kept :]
        age = len(candidates.mem) + torch.arange(n_evicted, 0, -1, dtype=torch.int32, device=x.device)
        number = torch.cat((kept, newest - age[:, None] + 1))  # [n, B]
        # The highest priorities stay.
        chosen = candidates.chosen(self.priority(number), self.c_mem_len)  # [C, B]
        state = {"newest": newest, "kept": number.gather(0, chosen)}
        return LayerMemory(candidates.mem, candidates.take(chosen), state=state), None

    def priority(self, number: Tensor) -> Tensor:
        """p of the positions with a ``number [n, B]``: the same shape."""
        # A number is less than 2³², and a layer's less than 2¹⁰.
        key = number.long() + (self.layer_number + 1) * 2**32 + self.settings.hash_seed * 2**42
        mixed = key * GOLDEN  # int64 wraps around
        mixed = (mixed ^ (mixed >> N_BITS)) * MIX
        return ((mixed >> N_BITS) & (2**N_BITS - 1)) / 2**N_BITS
