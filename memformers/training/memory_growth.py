"""A memory that grows while a model is trained, as ``memory_warmup`` asks for."""

from collections.abc import Sequence

from torch import Tensor

from memformers.models.memory import Memory
from memformers.models.config import MemorySizes
from memformers.models.memory import cut
from memformers.training.config import TrainConfig

STAGES = 8
"""The number of lengths that a growing memory has, one after the other; few, since each is another shape to
compile and to choose a kernel for."""


def share_of_memory(tokens: int, config: TrainConfig) -> float:
    """The fraction of a whole memory's keys that a segment may use after a training on this number of
    ``tokens``: 0 at the beginning, 1 from ``memory_growth`` of the training on."""
    grown = config.memory_growth * config.tokens
    return 1.0 if tokens >= grown else int(STAGES * tokens / grown) / STAGES


def shortened(memory: Memory, share: float, layers: Sequence[MemorySizes]) -> Memory:
    """``memory`` with the newest keys of each of ``layers`` only: at most the fraction ``share`` of as many
    as the head that reads the most has. Slots come after a whole memory of positions, which are newer."""
    if share == 1.0 or not memory.mem:
        return memory

    def newest(tensors: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, ...]:
        kept = zip(tensors, lengths, strict=bool(tensors))
        return tuple(cut([x], max(len(x) - length, 0)) for x, length in kept)

    keys = [(own, int(share * own.most_keys)) for own in layers]
    mem = [own.positions_of(n) for own, n in keys]
    slots = [max(n - own.mem_len, 0) for own, n in keys]
    inputs = [n * own.compression_rate for own, n in zip(layers, slots, strict=True)]
    slot_inputs = newest(memory.slot_inputs, inputs)
    return Memory(newest(memory.mem, mem), newest(memory.c_mem, slots), memory.valid, slot_inputs)
