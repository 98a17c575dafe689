"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.intervals import mean_of, mean_of_groups
from memformers.data.streams import IGNORED, Reading, Segment, Tokens, documents_reading, plain_reading
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.bits_per_byte import Units, comparable
from memformers.models.base import eval_mode
from memformers.models.config import OF_MODELS, is_used
from memformers.models.language_model import LMScores, MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory_sizes import ByLayer
from memformers.models.vocabulary import TokenLosses

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
Control = Callable[[Memory], Memory]
"""A function from a memory to the one that the model gets instead; it may change its contents but not its
shape."""


class Evaluation:
    """How well a model predicts the streams of a ``reading``, as sums: they take a number for each block of a
    text or some for each document, and not one for each token. What was read before a segment can be
    remembered as far as ``reach`` positions. Parts that several processes read are merged."""

    def __init__(self, reading: Reading, reach: int = 0):
        self.of_documents, self.reach = reading.of_documents, reach
        self.lengths = torch.tensor(reading.lengths)
        """How many tokens of each stream are predicted, ``[streams]``; a document is a stream."""
        self.tokens = sum(reading.lengths)
        """How many tokens are predicted."""
        self._begins = self.lengths.cumsum(0) - self.lengths
        # The sum and the number of losses: of each stream, place in the segment, and stream by what was read.
        self._streams = torch.zeros(2, len(self.lengths), dtype=torch.float64)
        self._places = torch.zeros(2, reading.segment_len, dtype=torch.float64)
        self._read_before: dict[int, Tensor] = {}
        self._blocks = torch.zeros(0 if self.of_documents else self.tokens // BLOCK, dtype=torch.float64)
        self._compressed = torch.zeros(2, dtype=torch.float64)
        self._right = 0

    def add(
        self, numbers: Sequence[int], start: int, losses: Tensor, correct: Tensor, compressed: float = 0.0
    ) -> None:
        """Count the ``losses [S, B]`` of a segment, in nats, and whether each token was the most likely
        prediction, of the streams of these ``numbers``, from the position ``start`` in them on; what is past
        the end of a stream doesn't count. ``compressed`` is the reconstruction loss, 0 if there is none."""
        of = torch.tensor(numbers)
        place = start + torch.arange(len(losses))[:, None]
        there = place < self.lengths[of]  # [S, B]
        nats = losses.double().where(there, 0.0)
        self._right += int((correct & there).sum())
        self._compressed += torch.tensor([compressed, float(compressed > 0)])
        found = torch.stack((nats, there.double()))  # [2, S, B]
        self._streams.index_add_(1, of, found.sum(1))
        self._places[:, : len(nats)] += found.sum(2)
        if (before := min(start, self.reach)) not in self._read_before:
            self._read_before[before] = torch.zeros_like(self._streams)
        self._read_before[before].index_add_(1, of, found.sum(1))
        if len(self._blocks):
            block = (place + self._begins[of]) // BLOCK
            counted = there & (block < len(self._blocks))
            self._blocks.index_add_(0, block[counted], nats[counted])

    def merge(self, other: "Evaluation") -> None:
        """Add what another process read of the same reading."""
        self._right += other._right
        for name in ("_streams", "_places", "_blocks", "_compressed"):
            getattr(self, name).add_(getattr(other, name))
        for before, sums in other._read_before.items():
            self._read_before[before] = sums + self._read_before.get(before, 0.0)

    @property
    def nats(self) -> float:
        """The sum over all predictions."""
        return self._streams[0].sum().item()

    @property
    def loss(self) -> float:
        """Mean over all predictions, in nats per token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        """Fraction of tokens that were the most likely prediction."""
        return self._right / self.tokens

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        total, count = self._compressed.tolist()
        return total / count if count else None

    @property
    def document_losses(self) -> list[float]:
        """The mean loss of each document, in nats per token; NaN where nothing was predicted."""
        return (self._streams[0] / self._streams[1]).tolist()

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats per token, for other texts of
        this kind and length; computed from means over blocks, since neighbouring tokens are similarly
        difficult. NaN for a text of fewer than two blocks. If documents were evaluated, the interval is for
        other documents of this kind; NaN for a single one."""
        if self.of_documents:
            return self._half_width(self._streams)
        return mean_of((self._blocks / BLOCK).tolist()).half_width if len(self._blocks) else math.nan

    @property
    def by_position(self) -> list[float]:
        """Mean loss at each position of a segment, in nats per token."""
        sums, counts = self._places[:, self._places[1] > 0]
        return (sums / counts).tolist()

    @property
    def by_memory(self) -> list[tuple[int, float, float]]:
        """The loss by the amount of memory: the number of positions that a stream has read before a segment,
        at most ``reach``, which it can remember; the mean loss of the segments with this number; and half the
        width of its 95 % confidence interval, NaN for a single stream. In nats per token.

        A stream counts as one observation, since its neighbouring segments are similarly difficult.
        """
        found = []
        for before, of_streams in sorted(self._read_before.items()):
            total, count = of_streams.sum(1).tolist()
            found.append((before, total / count, self._half_width(of_streams)))
        return found

    def _half_width(self, of_streams: Tensor) -> float:
        """That of the mean of losses of which each stream has a sum and a number, ``[2, streams]``."""
        sums, counts = of_streams
        if self.of_documents:  # of unequal length
            return mean_of_groups(sums.tolist(), [int(n) for n in counts]).half_width
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
    memory = Memory(()) if segment.starts_over else memory.streams(slice(inputs.shape[1]))
    read = model(inputs, memory, targets)
    changed = {name: model(inputs, control(memory), targets) for name, control in (controls or {}).items()}
    return read, {name: found.scores for name, found in changed.items()}


def reading_of(n_tokens: int, streams: int, segment_len: int, documents: Sequence[int] = ()) -> Reading:
    """How a text of ``n_tokens`` is read in parallel ``streams``, or ``documents``, the lengths in tokens of
    those that it consists of, as many at once. Raises UserError where nothing can be predicted."""
    if len(documents):
        return documents_reading(documents, streams, segment_len)
    return plain_reading(n_tokens, streams, segment_len)


def evaluate(
    model: MemoryLM,
    tokens: Tokens,
    streams: int,
    *,
    documents: Sequence[int] = (),
    progress: Callable[[Tensor], object] = lambda losses: None,
) -> Evaluation:
    """Predict ``tokens [n]`` once, in parallel ``streams``, with segments as long as in training; the mode of
    the model doesn't change.

    Fewer streams are stricter and slower, since each begins with an empty memory. If the text consists of
    ``documents``, given by their numbers of tokens, each is predicted from an empty memory and all but its
    first token, and the result equals that of evaluating each alone. ``progress`` is called after each
    segment with the losses of its predictions, ``[n]``. Raises UserError where nothing can be predicted.
    """
    reading = reading_of(len(tokens), streams, model.config.segment_len, documents)
    return evaluate_reading(model, tokens, reading, progress)


def evaluate_reading(
    model: MemoryLM, tokens: Tokens, reading: Reading, progress: Callable[[Tensor], object]
) -> Evaluation:
    """Predict ``tokens [n]`` in the order of ``reading``, whose groups may leave out streams that another
    process reads. ``progress`` may raise any exception to end it."""
    found, memory = Evaluation(reading, model.config.remembered_positions), Memory(())
    with eval_mode(model):
        for (numbers, start), segment in zip(reading.steps, reading.segments(tokens), strict=True):
            read, _ = read_segment(model, segment, memory)
            memory, losses, correct = read.memory, read.scores.losses.cpu(), read.scores.correct.cpu()
            found.add(numbers, start, losses, correct, float(read.auxiliary_loss))
            progress(losses[segment.targets != IGNORED])
    return found


def summary(evaluation: Evaluation, tokenizer: Tokenizer, of: Units) -> dict[str, float]:
    """The numbers that papers compare, for the text or the documents that were evaluated; ``of`` says what
    was predicted of them ([`memformers.evaluation.bits_per_byte`][])."""
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        **comparable(evaluation.nats, of, tokenizer),
        "accuracy": evaluation.accuracy,
        "tokens": evaluation.tokens,
    }


def with_lengths(
    model: MemoryLM,
    *,
    segment_len: int | None = None,
    mem_len: ByLayer | None = None,
    c_mem_len: ByLayer | None = None,
) -> MemoryLM:
    """The same model, which now reads in other segments or has longer or shorter memories than in training.

    Raises ValueError for impossible lengths, for those of a memory that the model doesn't have, and for more
    positions than there are learned ones.
    """
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "c_mem_len": c_mem_len}
    given = {name: length for name, length in lengths.items() if length is not None}
    for name, length in given.items():
        if not is_used(name, model.config.model):
            whose = " or ".join(OF_MODELS[name])
            raise UserError(
                f"{name}={length} is for {whose}, got a {model.config.model} model; leave it out."
            )
    config = replace(model.config, **given)  # type: ignore[arg-type]
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"expected attention over at most {attention.max_positions} positions, which the model learned, "
            f"got {config.longest_attention}; shorten segment or memory, or train with "
            f"positions='sinusoidal'."
        )
    model.config = config
    return model
