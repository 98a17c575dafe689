"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.intervals import mean_of, mean_of_groups
from memformers.data.streams import (
    IGNORED,
    Reading,
    Segment,
    Tokens,
    documents_reading,
    plain_reading,
    streams_and_places,
)
from memformers.evaluation.units import Units, comparable, units_of
from memformers.models.language_model import LMScores, MemoryLM
from memformers.models.lengths import ByLayer
from memformers.models.memory import Memory, some_streams
from memformers.models.stack import eval_mode
from memformers.models.vocabulary import TokenLosses

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
Control = Callable[[Memory], Memory]
"""A function from a memory to the one that the model gets instead; it may change its contents but not its
shape."""
Progress = Callable[[Tensor], object]
"""What is called after each segment with the losses of its predictions, ``[n]``."""


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text, or documents."""

    losses: Tensor
    """float32 ``[n]``: the loss of each predicted token, stream after stream, in nats."""
    correct: Tensor
    """bool ``[n]``: whether the token was the most likely prediction."""
    reconstruction_losses: tuple[float, ...]
    """The attention-reconstruction loss of each segment; 0 where nothing was compressed."""
    lengths: tuple[int, ...]
    """How many tokens of each stream were predicted."""
    of_documents: bool = False
    """Whether each stream is a document; otherwise the streams are parts of a plain text."""

    @cached_property
    def loss(self) -> float:
        """Mean over all predictions, in nats per token."""
        return self.losses.double().mean().item()

    @cached_property
    def accuracy(self) -> float:
        """Fraction of tokens that were the most likely prediction."""
        return self.correct.double().mean().item()

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        compressed = [loss for loss in self.reconstruction_losses if loss > 0]
        return sum(compressed) / len(compressed) if compressed else None

    @property
    def losses_by_text(self) -> tuple[Tensor, ...]:
        """The losses of each document, or of the plain text, without its first token: ``[n - 1]`` each."""
        return self.losses.split(list(self.lengths)) if self.of_documents else (self.losses,)

    def beginning(self, reading: Reading, steps: int) -> "Evaluation":
        """The evaluation of the first ``steps`` of the ``reading`` that it is from."""
        predicted = reading.predicted(steps)
        stream, place = streams_and_places(self.lengths)
        read = place < torch.tensor(predicted)[stream]
        return replace(
            self,
            losses=self.losses[read],
            correct=self.correct[read],
            reconstruction_losses=self.reconstruction_losses[:steps],
            lengths=predicted,
        )

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats per token, for other texts of
        this kind and length; computed from means over blocks, since neighbouring tokens are similarly
        difficult. NaN for a text of fewer than two blocks. If documents were evaluated, the interval is for
        other documents of this kind; NaN for a single one."""
        if self.of_documents:
            return self._half_width(torch.ones_like(self.correct))
        blocks = self.losses[: len(self.losses) // BLOCK * BLOCK].view(-1, BLOCK).double().mean(1)
        return mean_of(blocks.tolist()).half_width if len(blocks) else math.nan

    def by_position(self, segment_len: int) -> list[float]:
        """Mean loss at each position of a segment, in nats per token."""
        _, place = streams_and_places(self.lengths)
        position = place % segment_len
        return (position.bincount(self.losses.double()) / position.bincount()).tolist()

    def by_memory(self, segment_len: int, reach: int) -> list[tuple[int, float, float]]:
        """The loss by the amount of memory: the number of positions that a stream has read before a segment,
        at most ``reach``, which it can remember; the mean loss of the segments with this number; and half the
        width of its 95 % confidence interval, NaN for a single stream. In nats per token.

        A stream counts as one observation, since its neighbouring segments are similarly difficult.
        """
        _, place = streams_and_places(self.lengths)
        before = (place // segment_len * segment_len).clamp(max=reach)
        masks = ((length, before == length) for length in before.unique().tolist())
        return [(length, self.losses[m].double().mean().item(), self._half_width(m)) for length, m in masks]

    def _half_width(self, counted: Tensor) -> float:
        """That of the mean of the losses that are true in ``counted [n]``, over streams."""
        stream = streams_and_places(self.lengths)[0][counted]
        sums, counts = stream.bincount(self.losses[counted].double()), stream.bincount()
        if self.of_documents:  # of unequal length
            return mean_of_groups(sums.tolist(), counts.tolist()).half_width
        return mean_of((sums / counts)[counts > 0].tolist()).half_width


@torch.no_grad()
def read_segment(
    model: MemoryLM, segment: Segment, memory: Memory, controls: Mapping[str, Control] | None = None
) -> tuple[LMScores, dict[str, TokenLosses]]:
    """Read ``segment``, of ``[S, B]`` tokens, with ``memory``, and again under each of the ``controls``;
    returns the result of the first, whose memory the next segment gets, and the scores of the others by name.

    Streams that start over begin with an empty memory; of a segment of fewer streams than the memory has, the
    last ones have ended. Raises UserError for controls of a single stream, whose memories they exchange.
    """
    if controls and segment.inputs.shape[1] < 2:
        raise UserError("controls exchange memories between streams; use at least 2 streams.")
    inputs, targets = segment.inputs.to(model.device), segment.targets.to(model.device)
    memory = Memory(()) if segment.starts_over else some_streams(memory, slice(inputs.shape[1]))
    read = model(inputs, memory, targets)
    changed = {name: model(inputs, control(memory), targets) for name, control in (controls or {}).items()}
    return read, {name: found.scores for name, found in changed.items()}


def evaluate(
    model: MemoryLM,
    tokens: Tokens,
    batch_size: int,
    *,
    documents: Sequence[int] = (),
    progress: Progress = lambda losses: None,
) -> Evaluation:
    """Predict ``tokens [n]`` once, in ``batch_size`` parallel streams, with segments as long as in training;
    the mode of the model doesn't change.

    Fewer streams are stricter and slower, since each begins with an empty memory. If the text consists of
    ``documents``, given by their numbers of tokens, each is predicted from an empty memory and all but its
    first token, and the result equals that of evaluating each alone. Raises UserError where nothing can be
    predicted.
    """
    S = model.config.segment_len
    if documents:
        return evaluate_reading(model, tokens, documents_reading(documents, batch_size, S), progress)
    return evaluate_reading(model, tokens, plain_reading(len(tokens), batch_size, S), progress)


def evaluate_reading(
    model: MemoryLM,
    tokens: Tokens,
    reading: Reading,
    progress: Progress = lambda losses: None,
    steps: int | None = None,
) -> Evaluation:
    """Predict ``tokens [n]`` in the order of ``reading``. ``progress`` may raise any exception to end it;
    with ``steps``, only this number of segments is read."""
    losses: list[Tensor] = []
    correct, reconstruction, memory = [], [], Memory(())
    with eval_mode(model):
        for segment in reading.segments(tokens, steps):
            read, _ = read_segment(model, segment, memory)
            memory = read.memory
            losses.append(read.scores.losses.cpu())
            correct.append(read.scores.correct.cpu())
            reconstruction.append(float(read.auxiliary_loss))
            progress(losses[-1][segment.targets != IGNORED])
    return Evaluation(
        reading.in_order(losses),
        reading.in_order(correct),
        tuple(reconstruction),
        reading.predicted(steps),
        reading.of_documents,
    )


def summary(evaluation: Evaluation, *texts: str, of: Units | None = None) -> dict[str, float]:
    """The numbers that papers compare, for the text or the documents that were evaluated. All tokens of each
    but the first are predicted. Words are separated by white space, and a character counts if all of its
    bytes were predicted ([`memformers.evaluation.units`][]). ``of`` says what was predicted; without it, each
    token is a character or a byte of the ``texts``."""
    of = of or units_of(texts, [len(losses) + 1 for losses in evaluation.losses_by_text])
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        **comparable(evaluation.losses_by_text, of),
        "accuracy": evaluation.accuracy,
        "tokens": len(evaluation.losses),
    }


def with_lengths(
    model: MemoryLM,
    *,
    segment_len: int | None = None,
    mem_len: ByLayer | None = None,
    c_mem_len: ByLayer | None = None,
) -> MemoryLM:
    """The same model, which now reads in other segments or has longer or shorter memories than in training.

    Raises ValueError for impossible lengths, and for more positions than there are learned ones.
    """
    given: dict[str, Any] = {"segment_len": segment_len, "mem_len": mem_len, "c_mem_len": c_mem_len}
    config = replace(model.config, **{name: x for name, x in given.items() if x is not None})
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"expected attention over at most {attention.max_positions} positions, which the model learned, "
            f"got {config.longest_attention}; shorten segment or memory, or train with "
            f"positions='sinusoidal'."
        )
    model.config = config
    return model
