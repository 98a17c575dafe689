"""The segments of one training step, read one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memformers.data.streams import Segment
from memformers.models.language_model import LMScores
from memformers.models.memory import Memory


@dataclass(frozen=True)
class Batch:
    """Some streams of a segment, on the device of the model."""

    inputs: Tensor
    """``[S, B]``, int64."""
    targets: Tensor
    """``[S, B]``: each input's next token, or −100."""
    doc_starts: Tensor | None = None
    """``[S, B]``, boolean: where a stream's new document begins; None for a plain text."""
    starts_over: bool = False
    """Whether the streams begin here, with an empty memory."""

    @classmethod
    def of(cls, segment: Segment, own: Callable[[Tensor], Tensor], device: torch.device) -> "Batch":
        """The streams of ``segment`` that ``own`` chooses from ``[S, B]``, on ``device``."""
        inputs, targets = (own(x).to(device) for x in (segment.inputs, segment.targets))
        doc_starts = None if segment.doc_starts is None else own(segment.doc_starts).to(device)
        return cls(inputs, targets, doc_starts, segment.starts_over)

    def streams(self, chosen: slice) -> "Batch":
        """The ``chosen`` streams, as views."""
        doc_starts = None if self.doc_starts is None else self.doc_starts[:, chosen]
        return Batch(self.inputs[:, chosen], self.targets[:, chosen], doc_starts, self.starts_over)


class InTurn(nn.Module):
    """Applies ``model``, a [`MemoryLM`][] or a wrapper of one, to all segments of a training step.

    Between two segments the memory keeps its graph, so that the loss of the later segment has a gradient in
    the earlier one. It is one module, since DistributedDataParallel needs all losses of a step as one output.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, parts: Sequence[Batch], memory: Memory) -> tuple[list[LMScores], Memory]:
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
