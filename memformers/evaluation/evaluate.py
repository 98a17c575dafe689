"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.intervals import Mean, mean_of, mean_of_groups, mean_of_moments
from memformers.data.streams import (
    IGNORED,
    Reading,
    Segment,
    Tokens,
    documents_reading,
    plain_reading,
)
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.units import Units, losses_by_unit
from memformers.models.config import SETTING_MODELS, Lengths, applies_to
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode
from memformers.runs.folder import UNTOUCHED

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
Control = Callable[[Memory], Memory]
"""From a memory to one of the same shape, which the model gets instead."""
Scores = tuple[Tensor, Tensor]
"""Of each token ``[S, B]``, on the CPU: its loss in nats, and whether it was the most likely prediction."""

SegmentScores = tuple[Segment, Memory, Tensor, dict[str, Scores]]
"""What [`read_segments`][] yields."""
ReadSegments = Callable[[MemoryLM, Iterable[Segment]], Iterable[SegmentScores]]


class Evaluation:
    """How well a model predicts the streams of a ``reading``, as sums: four numbers for each document, one
    for each block of a plain text, and none for each token. ``reach`` is how many positions before a segment
    the model can remember. Parts that several processes read are merged."""

    def __init__(self, reading: Reading, reach: int = 0):
        self.of_documents = reading.of_documents
        self.reach = reach
        self.lengths = torch.tensor(reading.lengths)
        """How many tokens of each stream are predicted, ``[streams]``; a document is a stream."""
        self.tokens = sum(reading.lengths)
        self._begins = self.lengths.cumsum(0) - self.lengths
        S = reading.segment_len
        n_blocks = 0 if self.of_documents else self.tokens // BLOCK
        # Rows of two are losses, and their number.
        shapes = {
            "streams": (2, len(self.lengths)),
            "full_memory": (2, len(self.lengths)),  # segments that begin beyond the reach
            "filling_memory": (-(-reach // S), 6),  # those before them: moments over streams
            "positions": (2, S),
            "blocks": (n_blocks,),
            "reconstruction": (2,),
            "correct": (),
        }
        self._sums: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            self._sums[name] = torch.zeros(shape, dtype=torch.float64)

    def add(
        self, numbers: Sequence[int], start: int, losses: Tensor, correct: Tensor, compressed: float = 0.0
    ) -> None:
        """Count the ``losses [S, B]`` of a segment, in nats, and whether each token was the most likely
        prediction, of the streams of these ``numbers``, from the position ``start`` in them on; what is past
        the end of a stream doesn't count. ``compressed`` is the reconstruction loss, 0 if there is none."""
        # What counts: losses before the end of their stream.
        sums = self._sums
        streams = torch.tensor(numbers)
        position = start + torch.arange(len(losses))[:, None]
        is_inside = position < self.lengths[streams]  # [S, B]
        counted_losses = losses.double().where(is_inside, 0.0)
        pairs = torch.stack((counted_losses, is_inside.double()))  # [2, S, B]
        totals = pairs.sum(1)  # [2, B]

        # Over all tokens, at each position of a segment, and of each stream.
        sums["correct"] += (correct & is_inside).sum()
        sums["reconstruction"] += torch.tensor([compressed, float(compressed > 0)])
        sums["positions"][:, : len(position)] += pairs.sum(2)
        sums["streams"].index_add_(1, streams, totals)

        # By how much the memory holds.
        if start >= self.reach:
            sums["full_memory"].index_add_(1, streams, totals)
        else:  # the only segment of these streams that begins here
            nats, counts = totals
            products = (nats, counts, nats * nats, counts * counts, nats * counts)
            moments = torch.stack([(counts > 0).sum().double(), *(x.sum() for x in products)])
            sums["filling_memory"][start // sums["positions"].shape[1]] += moments

        # Of each block of a plain text, whose last tokens may be in none.
        if len(sums["blocks"]):
            block = (position + self._begins[streams]) // BLOCK
            is_in_block = is_inside & (block < len(sums["blocks"]))
            sums["blocks"].index_add_(0, block[is_in_block], counted_losses[is_in_block])

    def merge(self, part: "Evaluation") -> None:
        for name, sums in part._sums.items():
            self._sums[name] = self._sums[name] + sums

    @property
    def nats(self) -> float:
        return self._sums["streams"][0].sum().item()

    @property
    def loss(self) -> float:
        """In nats per token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        return self._sums["correct"].item() / self.tokens

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        total, count = self._sums["reconstruction"].tolist()
        return total / count if count else None

    @property
    def document_losses(self) -> list[float]:
        """The mean loss of each document, in nats per token; NaN where nothing was predicted."""
        sums, counts = self._sums["streams"]
        return (sums / counts).tolist()

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats per token, over documents or
        means of blocks, since neighbouring tokens are similarly difficult. NaN for fewer than two."""
        return self._half_width(self._sums["streams"], self._sums["blocks"])

    def minus(self, base: "Evaluation") -> Mean:
        """By how many nats per token the loss is above that of a ``base``, an evaluation of the same reading,
        with the interval of the paired differences over documents or blocks."""
        nats, counts = self._sums["streams"]
        nats_of_base, _ = base._sums["streams"]
        streams = torch.stack((nats - nats_of_base, counts))
        blocks = self._sums["blocks"] - base._sums["blocks"]
        n = int((counts > 0).sum()) if self.of_documents else len(blocks)
        return Mean(self.loss - base.loss, self._half_width(streams, blocks), n)

    def over_text(self, n_parts: int) -> list[tuple[float, float]]:
        """The middle, in tokens, and the mean loss of at most ``n_parts`` consecutive parts of a plain text,
        which consist of whole blocks; none of documents."""
        blocks = self._sums["blocks"]
        size = max(-(-len(blocks) // n_parts), 1)
        parts = blocks.split(size) if len(blocks) else ()
        return [
            ((i * size + len(part) / 2) * BLOCK, part.mean().item() / BLOCK) for i, part in enumerate(parts)
        ]

    @property
    def by_position(self) -> list[float]:
        """Mean loss at each position of a segment, in nats per token."""
        sums, counts = self._sums["positions"]
        return (sums / counts)[counts > 0].tolist()

    @property
    def by_memory(self) -> list[tuple[int, float, float]]:
        """How many positions before a segment can be remembered, at most ``reach``; the mean loss of these
        segments in nats per token; and half the width of its 95 % interval over streams, NaN for one."""
        S = self._sums["positions"].shape[1]
        means = []
        for i, moments in enumerate(self._sums["filling_memory"].tolist()):
            if moments[0]:
                means.append((i * S, mean_of_moments(*moments)))
        if self._sums["full_memory"][1].any():
            means.append((self.reach, self._mean(self._sums["full_memory"])))
        return [(n_remembered, mean.mean, mean.half_width) for n_remembered, mean in means]

    def _mean(self, of_streams: Tensor) -> Mean:
        sums, counts = of_streams
        mean = mean_of_groups(sums.tolist(), [int(n) for n in counts])
        if self.of_documents:  # of unequal length
            return mean
        return replace(mean, half_width=mean_of((sums / counts)[counts > 0].tolist()).half_width)

    def _half_width(self, streams: Tensor, blocks: Tensor) -> float:
        """Of the mean over documents ``streams [2, documents]``, sums and counts, or over ``blocks``."""
        if self.of_documents:
            return self._mean(streams).half_width
        means = (blocks / BLOCK).tolist()
        return mean_of(means).half_width if means else math.nan


@torch.no_grad()
def read_segments(
    model: MemoryLM,
    segments: Iterable[Segment],
    controls: Mapping[str, Control] | None = None,
    warm_up: int = 0,
) -> Iterator[SegmentScores]:
    """Read ``segments``, each with the memory that the one before it left. Yields each with this memory, its
    auxiliary loss and its scores, as ``untouched``; and, unless it ends within the first ``warm_up``
    positions of its streams, those with what each of the ``controls`` makes of the memory. Of a segment of
    fewer streams than the memory has, the last ones have ended. UserError for controls of a single stream.
    """
    memory = Memory(())
    for segment in segments:
        inputs = segment.inputs.to(model.device)
        targets = segment.targets.to(model.device)
        changes = controls if controls and segment.end > warm_up else {}
        if changes and inputs.shape[1] < 2:
            raise UserError("controls exchange memories between streams; use at least 2 streams.")
        memory = Memory(()) if segment.starts_over else memory.streams(slice(inputs.shape[1]))
        read = model(inputs, memory, targets)
        scores = {UNTOUCHED: read.scores}
        for name, change in changes.items():
            scores[name] = model(inputs, change(memory), targets).scores
        by_token = {}
        for name, token_losses in scores.items():
            assert token_losses.losses is not None  # a model in eval mode has them
            assert token_losses.correct is not None
            by_token[name] = (token_losses.losses.cpu(), token_losses.correct.cpu())
        yield segment, memory, read.auxiliary_loss, by_token
        memory = read.memory


def reading_of(n_tokens: int, streams: int, segment_len: int, documents: Sequence[int] = ()) -> Reading:
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
    """Predict ``tokens [n]`` once, in parallel ``streams``, each from an empty memory, so that fewer are
    stricter and slower; or ``documents``, given by their numbers of tokens, each as if it were alone.
    ``progress`` is called after each segment with the losses of its predictions, ``[n]``. The mode of the
    model doesn't change. Raises UserError where nothing can be predicted.
    """
    reading = reading_of(len(tokens), streams, model.config.segment_len, documents)
    return evaluate_reading(model, tokens, reading, progress)


def evaluate_reading(
    model: MemoryLM,
    tokens: Tokens,
    reading: Reading,
    progress: Callable[[Tensor], object],
    read: ReadSegments = read_segments,
) -> Evaluation:
    """[`evaluate`][] in the order of ``reading``, without streams that another process reads, with another
    way to ``read`` segments."""
    evaluation = Evaluation(reading, model.config.remembered_positions)
    with eval_mode(model):
        steps = zip(reading.steps, read(model, reading.segments(tokens)), strict=True)
        for (numbers, start), (segment, _, compressed, scores) in steps:
            losses, correct = scores[UNTOUCHED]
            evaluation.add(numbers, start, losses, correct, float(compressed))
            progress(losses[segment.targets != IGNORED])
    return evaluation


def summary(evaluation: Evaluation, tokenizer: Tokenizer, predicted: Units) -> dict[str, float]:
    """What [`evaluate`][memformers.evaluate] returns of an ``evaluation``."""
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        **losses_by_unit(evaluation.nats, predicted, tokenizer),
        "accuracy": evaluation.accuracy,
        "tokens": evaluation.tokens,
    }


def with_lengths(
    model: MemoryLM,
    *,
    segment_len: int | None = None,
    mem_len: Lengths | None = None,
    c_mem_len: Lengths | None = None,
) -> MemoryLM:
    """The same model, with other lengths than in training. Raises ValueError for impossible ones, for those
    of a memory that the model doesn't have, and for more positions than there are learned ones."""
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "c_mem_len": c_mem_len}
    changes: dict[str, Any] = {name: length for name, length in lengths.items() if length is not None}
    for name, length in changes.items():
        if not applies_to(name, model.config.model):
            models = " or ".join(SETTING_MODELS[name])
            raise UserError(f"{name}={length} is for {models}, but the model is a {model.config.model}.")
    config = replace(model.config, **changes)
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"expected attention over at most {attention.max_positions} positions, which the model learned, "
            f"got {config.longest_attention}; shorten segment or memory, or use positions='sinusoidal'."
        )
    model.config = config
    model.transformer.resize(config)
    return model
