"""Changes of a memory before a trained model reads it, which show what each part is worth to the model."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import Segment
from memformers.models.language_model import LMScores, MemoryLM
from memformers.models.lengths import MemoryLengths, most
from memformers.models.memory import Memory
from memformers.models.scores import TokenLosses

Control = Callable[[Memory], Memory]
"""A function from a memory to the one that the model gets instead; it may change its contents but not its
shape."""


def slots_zeroed(memory: Memory) -> Memory:
    """A compressed memory of zeros, ``[C, B, D]`` a layer as before."""
    return replace(memory, c_mem=zeroed(memory.c_mem))


def slots_swapped(memory: Memory) -> Memory:
    """Each stream has the compressed memory of the stream before it."""
    return replace(memory, c_mem=swapped(memory.c_mem))


def memory_zeroed(memory: Memory) -> Memory:
    """A memory of zeros, ``[M, B, D]`` a layer as before."""
    return replace(memory, mem=zeroed(memory.mem))


def memory_swapped(memory: Memory) -> Memory:
    """Each stream has the memory of the stream before it."""
    return replace(memory, mem=swapped(memory.mem))


def zeroed(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Zeros of the same shapes, ``[·, B, D]``."""
    return tuple(map(torch.zeros_like, tensors))


def swapped(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``[·, B, D]`` each, with the streams rotated by one: the first stream gets that of the last."""
    return tuple(tensor.roll(1, dims=1) for tensor in tensors)


def controls_of(lengths: MemoryLengths) -> dict[str, Control]:
    """The controls that can change a memory of these lengths, by name."""
    controls: dict[str, Control] = {}
    if most(lengths.c_mem_len):
        controls |= {"slots zeroed": slots_zeroed, "slots swapped": slots_swapped}
    if most(lengths.mem_len):
        controls |= {"memory zeroed": memory_zeroed, "memory swapped": memory_swapped}
    return controls


def scores_under(
    model: MemoryLM, segment: Segment, memory: Memory, controls: Mapping[str, Control]
) -> tuple[LMScores, dict[str, TokenLosses]]:
    """Read ``segment``, of ``[S, B]`` tokens, with the unchanged memory and again under each of the
    ``controls``; returns the result of the first, and the scores of the others by name.

    The next segment gets the unchanged memory. Raises ValueError for a single stream, since controls exchange
    the memories of streams.
    """
    if controls and segment.inputs.shape[1] < 2:
        raise UserError("controls exchange memories between streams; use at least 2 streams.")
    inputs, targets = segment.inputs.to(model.device), segment.targets.to(model.device)
    read = model(inputs, memory, targets)
    changed = {name: model(inputs, control(memory), targets).scores for name, control in controls.items()}
    return read, changed
