"""One training step's forward and backward pass, in one part or several, on one process or several."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.models.memory import Memory
from memformers.training.config import TrainConfig
from memformers.training.ranks import Forward, Ranks, averaging


@dataclass(frozen=True)
class Outcome:
    """What a step's forward passes gave, over the streams of all ranks."""

    loss: float
    """Mean, in nats a token."""
    auxiliary_loss: float
    correct: int
    """Tokens that were the likeliest prediction."""
    memory: Memory
    """Of this rank's streams, for their next segment."""


def backward(
    forward: Forward, inputs: Tensor, targets: Tensor, memory: Memory, config: TrainConfig, ranks: Ranks
) -> Outcome:
    """Add the gradient of a segment's mean loss to the parameters, averaged over ``ranks``.

    ``inputs``, ``targets`` ``[S, B]`` and ``memory`` are those of this rank. They are taken in
    ``config.accumulate`` parts of the streams, one after the other, which takes less memory.
    """
    loss = auxiliary_loss = 0.0
    correct, memories, parts = 0, [], config.accumulate
    for number, (x, y, past) in enumerate(in_parts(inputs, targets, memory, parts), 1):
        with averaging(forward, last=number == parts):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
                output = forward(x, past)
                part_loss = F.cross_entropy(output.logits.flatten(0, 1), y.flatten())
            ((part_loss + output.auxiliary_loss) / parts).backward()
        loss += part_loss.item() / parts
        auxiliary_loss += output.auxiliary_loss.item() / parts
        correct += int((output.logits.detach().argmax(-1) == y).sum())
        memories.append(output.memory)
    loss, auxiliary_loss, share = ranks.means(loss, auxiliary_loss, correct)
    return Outcome(loss, auxiliary_loss, round(share * ranks.size), joined_streams(memories))


def in_parts(
    inputs: Tensor, targets: Tensor, memory: Memory, parts: int
) -> Iterator[tuple[Tensor, Tensor, Memory]]:
    """So many equal parts of the streams of ``inputs``, ``targets`` ``[S, B]`` and ``memory``."""
    pieces = [[t.chunk(parts, dim=1) for t in tensors] for tensors in (memory.mem, memory.c_mem)]
    for i, (x, y) in enumerate(zip(inputs.chunk(parts, dim=1), targets.chunk(parts, dim=1), strict=True)):
        yield x, y, Memory(*(tuple(chunks[i] for chunks in tensors) for tensors in pieces))


def joined_streams(memories: list[Memory]) -> Memory:
    """The memory of all parts' streams."""
    if len(memories) == 1:
        return memories[0]
    kinds = zip(*((memory.mem, memory.c_mem) for memory in memories), strict=True)
    return Memory(*(tuple(torch.cat(t, dim=1) for t in zip(*parts, strict=True)) for parts in kinds))
