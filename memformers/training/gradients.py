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
    """The result of a step's forward passes, over the streams of all ranks."""

    loss: float
    """The mean over tokens that are predicted, in nats a token."""
    auxiliary_loss: float
    correct: int
    """The number of tokens that were predicted as the likeliest ones."""
    memory: Memory
    """The memory of this rank's streams, for their next segment."""


def backward(
    forward: Forward,
    segments: Sequence[Part],
    memory: Memory,
    config: TrainConfig,
    ranks: Ranks,
    *,
    predictions: int | None = None,
) -> Outcome:
    """Add the gradient of the mean loss of ``segments``, which follow each other, to the gradients of the
    parameters, averaged over ``ranks``.

    ``segments``, ``[S, B]`` each, and ``memory`` are those of this rank. Their streams are processed in
    ``config.accumulate`` parts, one after the other, which needs less memory. ``predictions`` is the number
    of predicted tokens of all ranks together, by default the number of inputs: all of them have the same
    weight, in every segment and part. (The reconstruction loss is the mean over segments and parts.)
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
    """A part's mean ``loss``, a scalar, multiplied by the number of its ``targets [S, B]`` divided by
    ``expected``; 0 if there are no targets, when the mean is NaN."""
    weight = (targets != IGNORED).sum().to(loss.dtype) / expected
    return torch.where(weight > 0, loss * weight, 0.0)


def clip(model: MemoryLM, max_norm: float) -> tuple[float, float]:
    """Scale two gradients down to ``max_norm``, each alone: that of the compression functions, which learn
    from the reconstruction loss, and that of all other parameters. Returns their norms before, that of the
    other parameters first; 0 for compression functions without a gradient."""
    compressing = {id(p) for compress in model.transformer.compressions for p in compress.parameters()}
    others = [p for p in model.parameters() if id(p) not in compressing]
    of_compressions = [p for p in model.parameters() if id(p) in compressing]
    norms = (nn.utils.clip_grad_norm_(ps, max_norm) for ps in (others, of_compressions))
    norm, compression_norm = (full_tensor(norm).item() for norm in norms)
    return norm, compression_norm


def in_parts(segments: Sequence[Part], memory: Memory, parts: int) -> Iterator[tuple[list[Part], Memory]]:
    """The streams of ``segments``, ``[S, B]`` each, and of ``memory``, divided into ``parts`` equal parts."""
    size = segments[0].inputs.shape[1] // parts
    for i in range(parts):
        own = slice(i * size, (i + 1) * size)
        yield [segment.streams(own) for segment in segments], some_streams(memory, own)
