"""The memory of some of the streams of a batch, and of parts of a batch together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memformers.models.memory import Memory


def with_streams(memory: Memory, change: Callable[[Tensor], Tensor]) -> Memory:
    """The memory of the streams that ``change`` chooses from, or adds to, a tensor ``[·, B, …]``."""
    kinds = memory.mem, memory.c_mem, memory.slot_inputs
    mem, c_mem, slot_inputs = (tuple(map(change, tensors)) for tensors in kinds)
    return Memory(mem, c_mem, None if memory.valid is None else change(memory.valid[None])[0], slot_inputs)


def some_streams(memory: Memory, streams: slice) -> Memory:
    """The memory of these ``streams``, as views."""
    return with_streams(memory, lambda tensor: tensor[:, streams])


def joined_streams(memories: Sequence[Memory]) -> Memory:
    """The memory of the streams of all ``memories``, one after the other."""
    if len(memories) == 1:
        return memories[0]
    kinds = zip(*((memory.mem, memory.c_mem, memory.slot_inputs) for memory in memories), strict=True)
    mem, c_mem, slot_inputs = (
        tuple(torch.cat(t, dim=1) for t in zip(*parts, strict=True)) for parts in kinds
    )
    valid = [memory.valid for memory in memories if memory.valid is not None]
    return Memory(mem, c_mem, torch.cat(valid) if valid else None, slot_inputs)
