"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
)
from memformers.evaluation.units import Units, word_perplexity
from memformers.models.base import eval_mode
from memformers.models.language_model import LMScores, MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory_sizes import ByLayer
from memformers.models.vocabulary import TokenLosses

LONGEST_CHARACTER = 4
"""The most bytes of a character in UTF-8."""
BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
Control = Callable[[Memory], Memory]
"""A function from a memory to the one that the model gets instead; it may change its contents but not its
shape."""
Progress = Callable[[Tensor], object]
"""What is called after each segment with the losses of its predictions, ``[n]``."""


class Evaluation:
    """How well a model predicts a text, or documents, as sums: they take a number for each block of a text or
    some for each document, and not one for each token.

    ``lengths`` says how many tokens of each stream are predicted. With ``of_documents``, each stream is a
    document; otherwise the streams are parts of a plain text. Streams are read in segments of
    ``segment_len``, and what was read before one can be remembered as far as ``reach`` positions.
    """

    def __init__(
        self, lengths: Sequence[int], *, of_documents: bool = False, segment_len: int = 1, reach: int = 0
    ):
        self.lengths, self.of_documents, self.reach = tuple(lengths), of_documents, reach
        self.tokens = sum(self.lengths)
        """How many tokens are predicted."""
        self.reconstruction_losses: list[float] = []
        """The attention-reconstruction loss of each segment in which something was compressed."""
        self.part: Evaluation | None = None
        """That of the first segments alone, where it was asked for."""
        self._right = 0
        self._lengths = torch.tensor(self.lengths)
        self._begins = self._lengths.cumsum(0) - self._lengths  # in the order of streams
        # The sum and the number of losses: of each stream, place in the segment, and stream by what was read.
        self._streams = torch.zeros(2, len(self.lengths), dtype=torch.float64)
        self._places = torch.zeros(2, segment_len, dtype=torch.float64)
        self._read_before: dict[int, Tensor] = {}
        self._blocks = torch.zeros(0 if of_documents else self.tokens // BLOCK, dtype=torch.float64)
        # The first and the last losses of each document, or of the plain text.
        self._text_lengths = self._lengths if of_documents else self._lengths.sum()[None]
        self._edges = torch.zeros(2, len(self._text_lengths), LONGEST_CHARACTER, dtype=torch.float64)

    def add(self, numbers: Sequence[int], start: int, losses: Tensor, correct: Tensor) -> None:
        """Count the ``losses [S, B]`` of a segment, in nats, and whether each token was the most likely
        prediction, of the streams of these ``numbers``, from the position ``start`` in them on; what is past
        the end of a stream doesn't count."""
        of = torch.tensor(numbers)
        place = start + torch.arange(len(losses))[:, None]
        there = place < self._lengths[of]  # [S, B]
        nats = losses.double().where(there, 0.0)
        self._right += int((correct & there).sum())
        found = torch.stack((nats, there.double()))  # [2, S, B]
        self._streams.index_add_(1, of, found.sum(1))
        self._places[:, : len(losses)] += found.sum(2)
        before = self._read_before.setdefault(min(start, self.reach), torch.zeros_like(self._streams))
        before.index_add_(1, of, found.sum(1))
        at, text = place.expand_as(there), of.expand_as(there)
        if not self.of_documents:
            at, text = at + self._begins[of], torch.zeros_like(text)
            block = at // BLOCK
            counted = there & (block < len(self._blocks))
            self._blocks.index_add_(0, block[counted], nats[counted])
        from_end = self._text_lengths[text] - at
        for edge, place_there in ((0, at), (1, LONGEST_CHARACTER - from_end)):
            near = there & (place_there >= 0) & (place_there < LONGEST_CHARACTER)
            self._edges[edge, text[near], place_there[near]] = nats[near]

    @property
    def loss(self) -> float:
        """Mean over all predictions, in nats per token."""
        return self._streams[0].sum().item() / self.tokens

    @property
    def accuracy(self) -> float:
        """Fraction of tokens that were the most likely prediction."""
        return self._right / self.tokens

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        found = self.reconstruction_losses
        return sum(found) / len(found) if found else None

    @property
    def predicted(self) -> list[int]:
        """How many tokens of each document, or of the plain text, were predicted."""
        return [int(length) for length in self._text_lengths]

    @property
    def document_losses(self) -> list[float]:
        """The mean loss of each document, in nats per token; NaN where nothing was predicted."""
        return (self._streams[0] / self._streams[1]).tolist()

    def comparable(self, of: Units) -> dict[str, float]:
        """Bits per character and per byte, and perplexity per word, over all texts; NaN for units ``of``
        which nothing was predicted."""
        in_all, in_characters = self._streams[0].sum().item(), 0.0
        sums = self._streams[0] if self.of_documents else self._streams[0].sum()[None]
        each = zip(of.edges, self.predicted, sums.tolist(), strict=True)
        for text, ((begin, end), length, nats) in enumerate(each):
            if begin + end < length:
                first, last = self._edges[:, text]
                outside = first[:begin].sum() + last[LONGEST_CHARACTER - end :].sum()
                in_characters += nats - outside.item()
        bit = math.log(2)
        return {
            "bits_per_character": in_characters / bit / of.characters if of.characters > 0 else math.nan,
            "bits_per_byte": in_all / bit / of.bytes if of.bytes > 0 else math.nan,
            "word_perplexity": word_perplexity(in_all, of.words),
        }

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
    part: int | None = None,
) -> Evaluation:
    """Predict ``tokens [n]`` in the order of ``reading``. ``progress`` may raise any exception to end it;
    with ``steps``, only this number of segments is read. The result has as its ``part`` the evaluation of the
    first ``part`` segments, if it is given."""
    reach, memory = model.config.remembered_positions, Memory(())

    def of_first(steps: int | None) -> Evaluation:
        lengths, S = reading.predicted(steps), reading.segment_len
        return Evaluation(lengths, of_documents=reading.of_documents, segment_len=S, reach=reach)

    whole = of_first(steps)
    whole.part = None if part is None else of_first(part)
    with eval_mode(model):
        order = enumerate(zip(reading.steps, reading.segments(tokens, steps), strict=False))
        for step, ((numbers, start), segment) in order:
            read, _ = read_segment(model, segment, memory)
            memory, scores, compressed = read.memory, read.scores, float(read.auxiliary_loss)
            losses, correct = scores.losses.cpu(), scores.correct.cpu()
            for each in (whole, whole.part if part is not None and step < part else None):
                if each is not None:
                    each.add(numbers, start, losses, correct)
                    each.reconstruction_losses += [compressed] * (compressed > 0)
            progress(losses[segment.targets != IGNORED])
    return whole


def summary(evaluation: Evaluation, of: Units) -> dict[str, float]:
    """The numbers that papers compare, for the text or the documents that were evaluated; ``of`` says what
    was predicted of them. All tokens of each but the first are predicted. Words are separated by white space,
    and a character counts if all of its bytes were predicted ([`memformers.evaluation.units`][])."""
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        **evaluation.comparable(of),
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
