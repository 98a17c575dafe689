"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.intervals import mean_of, mean_of_groups
from memformers.data.streams import IGNORED, Reading, Segment, Tokens, documents_reading, plain_reading
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.bits_per_byte import Units, comparable
from memformers.models.base import eval_mode
from memformers.models.config import SETTING_MODELS, Lengths, applies_to
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.vocabulary import TokenLosses

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
BASELINE = "untouched"
"""The name of the unchanged memory beside those of controls."""
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
        blocks = 0 if self.of_documents else self.tokens // BLOCK
        shapes = {"streams": (2, len(self.lengths)), "places": (2, reading.segment_len), "blocks": (blocks,)}
        shapes |= {"compressed": (2,), "right": ()}
        # Where there are two rows, losses and their number. By a number: of streams that had read so much.
        self._sums: dict[str | int, Tensor] = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
        }

    def add(
        self, numbers: Sequence[int], start: int, losses: Tensor, correct: Tensor, compressed: float = 0.0
    ) -> None:
        """Count the ``losses [S, B]`` of a segment, in nats, and whether each token was the most likely
        prediction, of the streams of these ``numbers``, from the position ``start`` in them on; what is past
        the end of a stream doesn't count. ``compressed`` is the reconstruction loss, 0 if there is none."""
        of, sums = torch.tensor(numbers), self._sums
        place = start + torch.arange(len(losses))[:, None]
        there = place < self.lengths[of]  # [S, B]
        nats = losses.double().where(there, 0.0)
        found = torch.stack((nats, there.double()))  # [2, S, B]
        sums["right"] += (correct & there).sum()
        sums["compressed"] += torch.tensor([compressed, float(compressed > 0)])
        sums["places"][:, : len(nats)] += found.sum(2)
        if (before := min(start, self.reach)) not in sums:
            sums[before] = torch.zeros_like(sums["streams"])
        for name in ("streams", before):
            sums[name].index_add_(1, of, found.sum(1))
        if len(sums["blocks"]):
            block = (place + self._begins[of]) // BLOCK
            counted = there & (block < len(sums["blocks"]))
            sums["blocks"].index_add_(0, block[counted], nats[counted])

    def merge(self, other: "Evaluation") -> None:
        """Add what another process read of the same reading."""
        for name, sums in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + sums

    @property
    def nats(self) -> float:
        """The sum over all predictions."""
        return self._sums["streams"][0].sum().item()

    @property
    def loss(self) -> float:
        """Mean over all predictions, in nats per token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        """Fraction of tokens that were the most likely prediction."""
        return self._sums["right"].item() / self.tokens

    @property
    def reconstruction_loss(self) -> float | None:
        """Mean attention-reconstruction loss of the segments in which something was compressed."""
        total, count = self._sums["compressed"].tolist()
        return total / count if count else None

    @property
    def document_losses(self) -> list[float]:
        """The mean loss of each document, in nats per token; NaN where nothing was predicted."""
        sums, counts = self._sums["streams"]
        return (sums / counts).tolist()

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats per token, for other texts of
        this kind and length; computed from means over blocks, since neighbouring tokens are similarly
        difficult. NaN for a text of fewer than two blocks. If documents were evaluated, the interval is for
        other documents of this kind; NaN for a single one."""
        if self.of_documents:
            return self._half_width(self._sums["streams"])
        blocks = (self._sums["blocks"] / BLOCK).tolist()
        return mean_of(blocks).half_width if blocks else math.nan

    @property
    def by_position(self) -> list[float]:
        """Mean loss at each position of a segment, in nats per token."""
        sums, counts = self._sums["places"]
        return (sums / counts)[counts > 0].tolist()

    @property
    def by_memory(self) -> list[tuple[int, float, float]]:
        """The loss by the amount of memory: the number of positions that a stream has read before a segment,
        at most ``reach``, which it can remember; the mean loss of the segments with this number; and half the
        width of its 95 % confidence interval, NaN for a single stream. In nats per token.

        A stream counts as one observation, since its neighbouring segments are similarly difficult.
        """
        found = []
        for before in sorted(name for name in self._sums if isinstance(name, int)):
            total, count = self._sums[before].sum(1).tolist()
            found.append((before, total / count, self._half_width(self._sums[before])))
        return found

    def _half_width(self, of_streams: Tensor) -> float:
        sums, counts = of_streams
        if self.of_documents:  # of unequal length
            return mean_of_groups(sums.tolist(), [int(n) for n in counts]).half_width
        return mean_of((sums / counts)[counts > 0].tolist()).half_width


@torch.no_grad()
def read_segments(
    model: MemoryLM,
    segments: Iterable[Segment],
    controls: Mapping[str, Control] | None = None,
    warm_up: int = 0,
) -> Iterator[tuple[Segment, Memory, Tensor, dict[str, TokenLosses]]]:
    """Read ``segments``, of ``[S, B]`` tokens, each with the memory that the one before it left. Yields each
    with this memory, its auxiliary loss and its scores, as [`BASELINE`][]; and, unless it ends within the
    first ``warm_up`` positions of its streams, those with what each of the ``controls`` makes of the memory.

    Streams that start over begin with an empty memory; of a segment of fewer streams than the memory has, the
    last ones have ended. Raises UserError for controls of a single stream, whose memories they exchange.
    """
    memory = Memory(())
    for segment in segments:
        inputs, targets = segment.inputs.to(model.device), segment.targets.to(model.device)
        changes = controls if controls and segment.end > warm_up else {}
        if changes and inputs.shape[1] < 2:
            raise UserError("controls exchange memories between streams; use at least 2 streams.")
        memory = Memory(()) if segment.starts_over else memory.streams(slice(inputs.shape[1]))
        read = model(inputs, memory, targets)
        changed = {name: model(inputs, change(memory), targets).scores for name, change in changes.items()}
        yield segment, memory, read.auxiliary_loss, {BASELINE: read.scores, **changed}
        memory = read.memory


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
    found = Evaluation(reading, model.config.remembered_positions)
    with eval_mode(model):
        read = zip(reading.steps, read_segments(model, reading.segments(tokens)), strict=True)
        for (numbers, start), (segment, _, compressed, scores) in read:
            losses, correct = scores[BASELINE].losses.cpu(), scores[BASELINE].correct.cpu()
            found.add(numbers, start, losses, correct, float(compressed))
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
    mem_len: Lengths | None = None,
    c_mem_len: Lengths | None = None,
) -> MemoryLM:
    """The same model, which now reads in other segments or has longer or shorter memories than in training.

    Raises ValueError for impossible lengths, for those of a memory that the model doesn't have, and for more
    positions than there are learned ones.
    """
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "c_mem_len": c_mem_len}
    given: dict[str, Any] = {name: length for name, length in lengths.items() if length is not None}
    for name, length in given.items():
        if not applies_to(name, model.config.model):
            whose, got = " or ".join(SETTING_MODELS[name]), model.config.model
            raise UserError(f"{name}={length} is for {whose}, got a {got} model; leave it out.")
    config = replace(model.config, **given)
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"expected attention over at most {attention.max_positions} positions, which the model learned, "
            f"got {config.longest_attention}; shorten segment or memory, or use positions='sinusoidal'."
        )
    model.config = config
    model.transformer.resize(config.memory_sizes)
    return model
