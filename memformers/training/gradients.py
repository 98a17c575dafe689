"""One training step's forward and backward pass, in one part or several, on one process or several."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memformers.data.streams import IGNORED
from memformers.models.boundaries import slots_left_out
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, slots_to_compress
from memformers.models.memory_streams import joined_streams, some_streams
from memformers.training.config import TrainConfig
from memformers.training.ranks import Forward, Ranks, averaging, full_tensor


@dataclass(frozen=True)
class Outcome:
    """What a step's forward passes gave, over the streams of all ranks."""

    loss: float
    """Mean, in nats a token that is predicted."""
    auxiliary_loss: float
    correct: int
    """Tokens that were the likeliest prediction."""
    memory: Memory
    """Of this rank's streams, for their next segment."""


def backward(
    forward: Forward,
    inputs: Tensor,
    targets: Tensor,
    memory: Memory,
    config: TrainConfig,
    ranks: Ranks,
    *,
    starts: Tensor | None = None,
    predictions: int | None = None,
) -> Outcome:
    """Add the gradient of a segment's mean loss to the parameters, averaged over ``ranks``.

    ``inputs``, ``targets``, ``starts`` ``[S, B]`` and ``memory`` are those of this rank. They are taken in
    ``config.accumulate`` parts of the streams, one after the other, which takes less memory. All ranks
    together have so many ``predictions``, or as many as inputs if it isn't given: each of them counts alike,
    whatever the part it is in. So does each stream that the reconstruction loss counts.
    """
    loss = auxiliary_loss = 0.0
    correct, memories, parts = 0, [], config.accumulate
    in_each = (inputs.numel() * ranks.size if predictions is None else predictions) / (ranks.size * parts)
    weights = auxiliary_weights(memory, starts, inputs, config, ranks)
    for number, (x, y, past, begins) in enumerate(in_parts(inputs, targets, memory, starts, parts), 1):
        with averaging(forward, last=number == parts):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
                scores, memory, part_auxiliary_loss = forward(x, past, y, begins)
            part_loss = weighted(scores.loss, y, in_each)
            part_auxiliary_loss = part_auxiliary_loss * weights[number - 1]
            ((part_loss + part_auxiliary_loss) / parts).backward()
        loss += part_loss.item() / parts
        auxiliary_loss += part_auxiliary_loss.item() / parts
        correct += int(scores.correct.sum())
        memories.append(memory)
    loss, auxiliary_loss, share = ranks.means(loss, auxiliary_loss, correct)
    return Outcome(loss, auxiliary_loss, round(share * ranks.size), joined_streams(memories))


def weighted(loss: Tensor, targets: Tensor, expected: float) -> Tensor:
    """A part's mean ``loss``, a scalar, in proportion to how many of its ``targets [S, B]`` there are, where
    ``expected`` weigh 1; without any, when the mean is not a number, 0."""
    weight = (targets != IGNORED).sum().to(loss.dtype) / expected
    return torch.where(weight > 0, loss * weight, 0.0)


def auxiliary_weights(
    memory: Memory, starts: Tensor | None, inputs: Tensor, config: TrainConfig, ranks: Ranks
) -> list[float]:
    """For each part of this rank's streams, how much its reconstruction loss counts in the mean over the
    parts of all ranks: in proportion to the streams that it is a mean over, so that each of those counts
    alike. ``memory``, ``starts [S, B]`` and ``inputs [S, B]`` are those of this rank."""
    lengths, parts = config.model.lengths, config.accumulate
    has_slots = config.model.model == "compressive"
    if not has_slots or parts * ranks.size == 1 or (starts is None and memory.valid is None):
        return [1.0] * parts  # each has as many
    c = lengths.compression_rate
    n = slots_to_compress(memory.mem_len + len(inputs), lengths.mem_len, c)
    left_out = slots_left_out(memory.valid, starts, memory.mem_len, n, c)  # [B]
    assert left_out is not None
    counted = (left_out < n).view(parts, -1).sum(1).tolist()  # streams, by parts
    (in_each,) = ranks.means(sum(counted) / parts)
    return [count / in_each if in_each else 0.0 for count in counted]


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
    inputs: Tensor, targets: Tensor, memory: Memory, starts: Tensor | None, parts: int
) -> Iterator[tuple[Tensor, Tensor, Memory, Tensor | None]]:
    """So many equal parts of the streams of ``inputs``, ``targets``, ``starts`` ``[S, B]`` and ``memory``."""
    size = inputs.shape[1] // parts
    for i in range(parts):
        own = slice(i * size, (i + 1) * size)
        begins = None if starts is None else starts[:, own]
        yield inputs[:, own], targets[:, own], some_streams(memory, own), begins
