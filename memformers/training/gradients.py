"""One training step's forward and backward pass, in one part or several, on one process or several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from memformers.data.streams import IGNORED
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory_streams import joined_streams, some_streams
from memformers.training.config import TrainConfig
from memformers.training.ranks import Forward, Ranks, averaging, full_tensor
from memformers.training.segments import Part


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
    segments: Sequence[Part],
    memory: Memory,
    config: TrainConfig,
    ranks: Ranks,
    *,
    predictions: int | None = None,
) -> Outcome:
    """Add the gradient of the mean loss of ``segments``, which follow each other, to the parameters, averaged
    over ``ranks``.

    ``segments``, ``[S, B]`` each, and ``memory`` are those of this rank. They are taken in
    ``config.accumulate`` parts of the streams, one after the other, which takes less memory. All ranks
    together have so many ``predictions``, or as many as inputs if it isn't given: each of them counts alike,
    whatever the segment and part it is in. (The reconstruction loss is the mean over segments and parts.)
    """
    loss = auxiliary_loss = 0.0
    correct, memories, parts = 0, [], config.accumulate
    if predictions is None:
        predictions = sum(segment.inputs.numel() for segment in segments) * ranks.size
    in_each, device = predictions / (ranks.size * parts), segments[0].inputs.device.type
    for number, (own, past) in enumerate(in_parts(segments, memory, parts), 1):
        with averaging(forward, last=number == parts):
            with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bfloat16"):
                outputs, remembered = forward(own, past)
            losses = [weighted(x.scores.loss, s.targets, in_each) for x, s in zip(outputs, own, strict=True)]
            part_loss = reduce(add, losses)
            part_auxiliary_loss = reduce(add, [x.auxiliary_loss for x in outputs]) / len(outputs)
            ((part_loss + part_auxiliary_loss) / parts).backward()
        loss += part_loss.item() / parts
        auxiliary_loss += part_auxiliary_loss.item() / parts
        correct += sum(int(x.scores.correct.sum()) for x in outputs)
        memories.append(remembered)
    loss, auxiliary_loss, share = ranks.means(loss, auxiliary_loss, correct)
    return Outcome(loss, auxiliary_loss, round(share * ranks.size), joined_streams(memories))


def weighted(loss: Tensor, targets: Tensor, expected: float) -> Tensor:
    """A part's mean ``loss``, a scalar, in proportion to how many of its ``targets [S, B]`` there are, where
    ``expected`` weigh 1; without any, when the mean is not a number, 0."""
    weight = (targets != IGNORED).sum().to(loss.dtype) / expected
    return torch.where(weight > 0, loss * weight, 0.0)


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


def in_parts(segments: Sequence[Part], memory: Memory, parts: int) -> Iterator[tuple[list[Part], Memory]]:
    """So many equal parts of the streams of ``segments``, ``[S, B]`` each, and of ``memory``."""
    size = segments[0].inputs.shape[1] // parts
    for i in range(parts):
        own = slice(i * size, (i + 1) * size)
        yield [segment.streams(own) for segment in segments], some_streams(memory, own)
