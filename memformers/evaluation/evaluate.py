"""Evaluation of a whole text: contiguous, in eval mode, from an empty memory that is carried along."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED, evaluation_segments
from memformers.evaluation.intervals import half_width, mean_over_streams
from memformers.evaluation.units import bits_per_byte, bits_per_character
from memformers.models.language_model import MemoryLM
from memformers.models.lengths import ByLayer
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean over all predictions, in nats per token."""
    accuracy: float
    """Fraction of tokens that were the most likely prediction."""
    reconstruction_losses: tuple[float, ...]
    """The attention-reconstruction loss of each segment; 0 where nothing was compressed."""
    losses: Tensor
    """float32 ``[n - 1]``: the loss of token 1, 2, … of the text, in nats."""
    correct: Tensor
    """bool ``[n - 1]``: whether token 1, 2, … of the text was the most likely prediction."""
    stream_length: int
    """Tokens a stream; token t of the text is in stream ⌊(t − 1) / stream_length⌋."""
    documents: tuple[int, ...] = ()
    """If documents were evaluated, each is a stream: how many tokens of each were predicted. They follow each
    other in ``losses`` and ``correct``."""

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        compressed = [loss for loss in self.reconstruction_losses if loss > 0]
        return sum(compressed) / len(compressed) if compressed else None

    def beginning(self, segments: int, segment_len: int) -> "Evaluation":
        """The evaluation of the first ``segments`` of each stream of a plain text, as if no others had been
        read."""
        length = min(segments * segment_len, self.stream_length)
        read = torch.arange(len(self.losses)) % self.stream_length < length
        return summed_up(self.losses[read], self.correct[read], self.reconstruction_losses[:segments], length)

    def perplexity(self, words: int) -> float:
        """The perplexity per word: e to the power of the whole text's loss in nats, divided by its number of
        words."""
        nats = self.loss * len(self.losses) / words
        return math.exp(nats) if nats < 700 else math.inf

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats a token, for other texts of this
        kind and length; computed from means over blocks, since neighbouring tokens are similarly difficult.
        NaN for a text of fewer than two blocks. If documents were evaluated, the interval is for other
        documents of this kind; NaN for a single one."""
        if self.documents:
            stream, _ = self._streams_and_places()
            return self._width(torch.ones_like(stream, dtype=torch.bool), stream)
        blocks = self.losses[: len(self.losses) // BLOCK * BLOCK].view(-1, BLOCK).double().mean(1)
        return half_width(blocks)

    def by_position(self, segment_len: int) -> list[float]:
        """Mean loss at each position of a segment, in nats per token."""
        _, place = self._streams_and_places()
        return group_means(self.losses, place % segment_len).tolist()

    def by_memory(self, segment_len: int, reach: int) -> list[tuple[int, float, float]]:
        """The loss by the amount of memory: the number of positions that a stream has read before a segment,
        at most ``reach``, which it can remember; the mean loss of the segments with this number; and half the
        width of its 95 % confidence interval, NaN for a single stream. In nats per token.

        A stream counts as one observation, since its neighbouring segments are similarly difficult.
        """
        stream, place = self._streams_and_places()
        before = (place // segment_len * segment_len).clamp(max=reach)
        found = []
        for length in before.unique().tolist():
            same = before == length
            found.append((length, self.losses[same].double().mean().item(), self._width(same, stream)))
        return found

    def _width(self, counted: Tensor, stream: Tensor) -> float:
        """Half the width of the interval of the mean of the losses that are true in ``counted [n]``."""
        losses, stream = self.losses[counted], stream[counted]
        if not self.documents:
            return half_width(group_means(losses, stream))
        sums, counts = stream.bincount(losses.double()), stream.bincount()
        return mean_over_streams(sums, counts).half_width  # they are not of equal length

    def _streams_and_places(self) -> tuple[Tensor, Tensor]:
        """For each loss: the number of its stream, and its position there."""
        at = torch.arange(len(self.losses))
        if not self.documents:
            return at // self.stream_length, at % self.stream_length
        lengths = torch.tensor(self.documents)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return torch.arange(len(lengths)).repeat_interleave(lengths), at - first


def summed_up(
    losses: Tensor,
    correct: Tensor,
    reconstruction_losses: tuple[float, ...],
    stream_length: int,
    documents: tuple[int, ...] = (),
) -> Evaluation:
    """The evaluation that found ``losses [n]`` and ``correct [n]``, in the order of the text."""
    return Evaluation(
        loss=losses.double().mean().item(),
        accuracy=correct.double().mean().item(),
        reconstruction_losses=reconstruction_losses,
        losses=losses,
        correct=correct,
        stream_length=stream_length,
        documents=documents,
    )


def group_means(values: Tensor, group: Tensor) -> Tensor:
    """The mean of ``values [n]`` in each group 0, 1, …, float64."""
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, values.double())
    return sums / torch.bincount(group)


@torch.no_grad()
def evaluate(
    model: MemoryLM,
    tokens: Tensor,
    batch_size: int,
    between_segments: Callable[[], None] = lambda: None,
    segments: int | None = None,
) -> Evaluation:
    """Predict ``tokens [n]`` once, in ``batch_size`` parallel streams, with segments as long as in training;
    the mode of the model doesn't change.

    Fewer streams are stricter and slower, since each begins with an empty memory. ``between_segments`` may
    raise any exception to end it. With ``segments``, only this number of segments of each stream is read and
    evaluated.
    """
    batch_size = min(batch_size, len(tokens) - 1)
    device = model.device
    losses, hits, reconstruction, memory, predicted = [], [], [], Memory(()), 0
    with eval_mode(model):
        parts = evaluation_segments(tokens, batch_size, model.config.segment_len)
        for segment in islice(parts, segments):
            between_segments()
            targets = segment.targets.to(device)
            scores, memory, auxiliary_loss = model(segment.inputs.to(device), memory, targets)
            losses.append(scores.losses.cpu())  # [S, B]
            hits.append(scores.correct.cpu())  # [S, B]
            reconstruction.append(float(auxiliary_loss))
            predicted += int((segment.targets != IGNORED).sum())  # what is ignored ends the last streams
    correct, of_each = (torch.cat(x).T.flatten()[:predicted] for x in (hits, losses))
    return summed_up(of_each, correct, tuple(reconstruction), stream_length=sum(map(len, losses)))


def summary(evaluation: Evaluation, text: str) -> dict[str, float]:
    """The numbers that papers compare, for the ``text`` that was evaluated. All tokens but the first are
    predicted. Words are separated by white space, and a character counts if all of its bytes were predicted
    ([`memformers.evaluation.units`][])."""
    per_character, per_byte = (
        bits_per_character(evaluation.losses, text),
        bits_per_byte(evaluation.losses, text),
    )
    return numbers_of(evaluation, per_character, per_byte, len(text.split()))


def numbers_of(evaluation: Evaluation, per_character: float, per_byte: float, words: int) -> dict[str, float]:
    """The numbers of [`summary`][] for a text with this number of ``words`` and these bits."""
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        "bits_per_character": per_character,
        "bits_per_byte": per_byte,
        "word_perplexity": evaluation.perplexity(max(words, 1)),
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
    old = model.config
    config = replace(
        old,
        segment_len=old.segment_len if segment_len is None else segment_len,
        mem_len=old.mem_len if mem_len is None else mem_len,
        c_mem_len=old.c_mem_len if c_mem_len is None else c_mem_len,
    )
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"attention over {config.longest_attention} positions was asked for, but the model learned "
            f"{attention.max_positions}; shorten segment or memory, or train with positions='sinusoidal'."
        )
    model.config = config
    return model
