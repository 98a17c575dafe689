"""One training step's forward and backward pass, in one part or several, on one process or several."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memformers.data.streams import IGNORED, Segment
from memformers.models.custom_memory import CustomMemory
from memformers.models.memory import valid_afterwards
from memformers.models.language_model import LMScores, MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory import compress_memory
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed, full_tensor, is_sharded


class UnrolledSegments(nn.Module):
    """Applies ``model``, a [`MemoryLM`][] or a wrapper of one, to all segments of a training step.

    Between two segments the memory keeps its graph, so that the loss of the later segment has a gradient in
    the earlier one. It is one module, since DistributedDataParallel needs all losses of a step as one output.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, parts: Sequence[Segment], memory: Memory) -> tuple[list[LMScores], Memory]:
        """The model's outputs for each of ``parts``, successive segments of the same streams that follow
        ``memory``, also if they start over with the first; and the detached memory after the last segment."""
        outputs: list[LMScores] = []
        for number, part in enumerate(parts, 1):
            past = Memory(()) if part.starts_over and outputs else memory
            output = self.model(
                part.inputs, past, part.targets, part.doc_starts, through_memory=number < len(parts)
            )
            outputs.append(output)
            memory = output.memory
        return outputs, memory.detach()


Forward = Callable[[Sequence[Segment], Memory], tuple[list[LMScores], Memory]]
"""The forward pass of a training step: from successive segments and the memory before them to the losses of
each, and the memory after them."""


def forward_of(model: MemoryLM, ranks: Distributed, *, compile: bool) -> Forward:
    """The forward pass of a training step of ``model``, whose gradients are averaged over ``ranks``."""
    forward: nn.Module = UnrolledSegments(torch.compile(model, fullgraph=True) if compile else model)  # type: ignore[arg-type]
    if compile:  # which looks whether a memory with a gradient graph has a .grad
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if ranks.parallel == "ddp":
        # A compression function has no gradient in a segment that compresses nothing, and what reads a memory
        # of one's own may have none where there is no memory.
        idle = bool(model.transformer.compressions) or isinstance(model.transformer, CustomMemory)
        forward = DistributedDataParallel(forward, find_unused_parameters=idle)
    return forward


@dataclass(frozen=True)
class StepOutput:
    """The result of a step's forward passes, over the streams of all ranks. The numbers are float64 scalars
    on the model's device, so that nothing waits for it."""

    loss: Tensor
    """The mean over tokens that are predicted, in nats per token."""
    auxiliary_loss: Tensor
    correct: Tensor
    """The number of tokens that were predicted as the likeliest ones."""
    memory: Memory
    """The memory of this rank's streams, for their next segment."""


def backward(
    forward: Forward,
    segments: Sequence[Segment],
    memory: Memory,
    config: TrainConfig,
    ranks: Distributed,
    *,
    predictions: int | None = None,
) -> StepOutput:
    """Add the gradient of the mean loss of ``segments``, which follow each other, to the gradients of the
    parameters, averaged over ``ranks``.

    ``segments``, ``[S, B]`` each, and ``memory`` are those of this rank. Their streams are processed in
    ``config.accumulate`` parts, one after the other, which needs less memory. ``predictions`` is the number
    of predicted tokens of all ranks together, by default as many as here for each: all of them have the same
    weight, in every segment and part. So has, in each segment, each stream that the reconstruction loss
    counts ([`auxiliary_weights`][]); that loss is the mean over segments.
    """
    numbers, memories, parts = [], [], config.step.accumulate
    if predictions is None:
        predictions = sum(segment.predictions for segment in segments) * ranks.size
    in_each, weights = predictions / (ranks.size * parts), auxiliary_weights(segments, memory, config, ranks)
    device, size = segments[0].inputs.device.type, segments[0].inputs.shape[1] // parts
    model: Any = getattr(forward, "model", forward)
    unsynchronized = getattr(forward, "no_sync", nullcontext)
    for i in range(parts):
        streams, is_last = slice(i * size, (i + 1) * size), i == parts - 1
        own = [segment.with_streams(itemgetter((slice(None), streams))) for segment in segments]
        losses, auxiliary_losses = [], []
        if is_sharded(model):
            model.set_requires_gradient_sync(is_last)
        with nullcontext() if is_last else unsynchronized():
            with torch.autocast(device, torch.bfloat16, enabled=config.step.precision == "bfloat16"):
                outputs, remembered = forward(own, memory.streams(streams))
            for segment, output, of_parts in zip(own, outputs, weights, strict=True):
                scores, auxiliary = output.scores, output.auxiliary_loss
                share = (segment.targets != IGNORED).sum().to(scores.loss.dtype) / in_each
                losses.append(torch.where(share > 0, scores.loss * share, 0.0))  # the mean of none is NaN
                auxiliary_losses.append(of_parts[i].to(auxiliary.dtype) * auxiliary)
            loss, auxiliary_loss = reduce(add, losses), reduce(add, auxiliary_losses) / len(segments)
            ((loss + auxiliary_loss) / parts).backward()
        correct = torch.stack([output.scores.correct.sum() for output in outputs]).sum()
        means = [x.detach().double() / parts for x in (loss, auxiliary_loss)]
        numbers.append(torch.stack([*means, correct.double()]))
        memories.append(remembered)
    loss, auxiliary_loss, share = ranks.means(reduce(add, numbers))
    return StepOutput(loss, auxiliary_loss, share * ranks.size, Memory.join(memories))


def auxiliary_weights(
    segments: Sequence[Segment], memory: Memory, config: TrainConfig, ranks: Distributed
) -> Tensor:
    """For each of ``segments`` and each part of this rank's streams, how much its reconstruction loss counts
    in the mean over the parts of all ranks, float64 ``[segments, parts]``: in proportion to the streams that
    it is a mean over, so that each of those counts alike. Where layers have memories or rates of their own,
    other streams may count in each, and all parts count alike. ``segments`` and ``memory`` are those of this
    rank."""
    model, parts, sizes = config.model, config.step.accumulate, config.model.memory_sizes[:1]
    plain = memory.valid is None and all(segment.doc_starts is None for segment in segments)
    layers = {(own.mem_len, own.compression_rate) for own in model.memory_sizes}
    if model.model != "compressive" or parts * ranks.size == 1 or plain or len(layers) > 1:
        return segments[0].inputs.new_ones(len(segments), parts, dtype=torch.float64)
    # The streams that have new slots are counted on a memory of one layer and of no width.
    mem, c_mem = (tuple(x[..., :0] for x in tensors[:1]) for tensors in (memory.mem, memory.c_mem))
    memory, counts = Memory(mem, c_mem, memory.valid), []
    for number, segment in enumerate(segments):
        if segment.starts_over and number:
            memory = Memory(())
        inputs = [torch.zeros(*segment.inputs.shape, 0, device=segment.inputs.device)]
        every = [lambda old: old[:: sizes[0].compression_rate]]
        after, made = compress_memory(memory, inputs, every, sizes, segment.doc_starts)
        positions = [each.positions(sizes) for each in (memory, after)]
        valid = valid_afterwards(memory.valid, segment.doc_starts, len(segment.inputs), *positions)
        memory, counted = replace(after, valid=valid), torch.full_like(segment.inputs[0], made is not None)
        if made and made.n_masked is not None:
            counted = (made.n_masked[0] < len(made.new[0])).to(counted)
        counts.append(counted.view(parts, -1).sum(1).double())
    in_each = ranks.means((total := torch.stack(counts)).sum(1, keepdim=True) / parts)
    return torch.where(in_each > 0, total / in_each, 0.0)


def clip(model: MemoryLM, max_norm: float) -> tuple[Tensor, Tensor]:
    """Scale two gradients down to ``max_norm``, each alone: that of the compression functions, which learn
    from the reconstruction loss, and that of all other parameters. Returns their norms before, float64
    scalars on their device, that of the other parameters first; 0 for compression functions without a
    gradient."""
    f_c = dict.fromkeys(p for compress in model.transformer.compressions for p in compress.parameters())
    others = [p for p in model.parameters() if p not in f_c]
    norms = (nn.utils.clip_grad_norm_(ps, max_norm) for ps in (others, f_c))
    norm, compression_norm = (full_tensor(norm).double() for norm in norms)
    learned = any(p.grad is not None for p in f_c)
    return norm, compression_norm if learned else torch.zeros_like(norm)  # PyTorch's is on the CPU
