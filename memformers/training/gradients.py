"""One training step's forward and backward pass, in one part or several, on one process or several."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.training.config import TrainConfig
from memformers.training.ranks import Forward, Ranks, averaging, full_tensor


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
                scores, memory, part_auxiliary_loss = forward(x, past, y)
            ((scores.loss + part_auxiliary_loss) / parts).backward()
        loss += scores.loss.item() / parts
        auxiliary_loss += part_auxiliary_loss.item() / parts
        correct += int(scores.correct.sum())
        memories.append(memory)
    loss, auxiliary_loss, share = ranks.means(loss, auxiliary_loss, correct)
    return Outcome(loss, auxiliary_loss, round(share * ranks.size), joined_streams(memories))


def clip(model: MemoryLM, max_norm: float) -> tuple[float, float]:
    """Shorten the gradients of the two losses, each by itself, to ``max_norm``: that of the compression
    functions, which learn from the reconstruction loss, and that of all else. Returns the norms that they
    had, of all else first; 0 for compression functions without a gradient."""
    compressing = {id(p) for compress in model.transformer.compressions for p in compress.parameters()}
    others = [p for p in model.parameters() if id(p) not in compressing]
    of_compressions = [p for p in model.parameters() if id(p) in compressing]
    norms = (nn.utils.clip_grad_norm_(ps, max_norm) for ps in (others, of_compressions))
    norm, compression_norm = (full_tensor(norm).item() for norm in norms)
    return norm, compression_norm


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
