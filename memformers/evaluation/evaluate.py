"""Evaluation of a whole text, or of documents: contiguous, in eval mode, each stream from an empty memory;
and losses in units in which models with different tokens can be compared."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.intervals import Mean, mean_of, mean_of_groups, mean_of_moments
from memformers.data.dataset import Counts
from memformers.data.streams import (
    IGNORED,
    Reading,
    Segment,
    Tokens,
    documents_reading,
    plain_reading,
    read_tokens,
)
from memformers.data.tokenizer import Tokenizer
from memformers.models.config import SETTING_MODELS, Lengths, applies_to
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode
from memformers.runs.folder import UNTOUCHED

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""
DECODED_TOKENS = 1 << 16
"""Tokens that are decoded at once."""
MIN_WORDS = 0.75
"""The share of words that must consist of letters for a perplexity per word: it is 0.99 in Shakespeare, and
0.68 in Python's standard library."""
NO_PUNCTUATION = str.maketrans("", "", ".,;:!?\"'`()-–—*_‘’“”«»…")
LOSES_TEXT = (
    "the tokenizer loses a part of the text, such as unknown words, white space or the case of letters. Bits "
    "per byte and per character are of the bytes and characters of the text itself"
)
"""What is said of a tokenizer whose tokens don't stand for the text."""
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
            "full": (2, len(self.lengths)),  # segments that begin beyond the reach
            "filling": (-(-reach // S), 6),  # those before them: moments over streams
            "places": (2, S),
            "blocks": (n_blocks,),
            "compressed": (2,),
            "right": (),
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
        sums["right"] += (correct & is_inside).sum()
        sums["compressed"] += torch.tensor([compressed, float(compressed > 0)])
        sums["places"][:, : len(position)] += pairs.sum(2)
        sums["streams"].index_add_(1, streams, totals)

        # By how much the memory holds.
        if start >= self.reach:
            sums["full"].index_add_(1, streams, totals)
        else:  # the only segment of these streams that begins here
            nats, counts = totals
            products = (nats, counts, nats * nats, counts * counts, nats * counts)
            moments = torch.stack([(counts > 0).sum().double(), *(x.sum() for x in products)])
            sums["filling"][start // sums["places"].shape[1]] += moments

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
        sums, counts = self._sums["places"]
        return (sums / counts)[counts > 0].tolist()

    @property
    def by_memory(self) -> list[tuple[int, float, float]]:
        """How many positions before a segment can be remembered, at most ``reach``; the mean loss of these
        segments in nats per token; and half the width of its 95 % interval over streams, NaN for one."""
        S = self._sums["places"].shape[1]
        means = []
        for i, moments in enumerate(self._sums["filling"].tolist()):
            if moments[0]:
                means.append((i * S, mean_of_moments(*moments)))
        if self._sums["full"][1].any():
            means.append((self.reach, self._mean(self._sums["full"])))
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


@dataclass(frozen=True)
class Units:
    """What the predicted tokens are: all of a text, or of each document, but the first."""

    tokens: int
    bytes: int
    """In UTF-8, of the text itself; 0 for ids that stand for none, and where this is not known."""
    characters: int
    """Each counts where its first byte is predicted; of ids, each token."""
    words: int
    """Separated by white space; each counts where it begins. 0 for a text that is not mostly words, such as
    source code."""


def units(
    tokenizer: Tokenizer, tokens: Tokens, documents: Sequence[int] = (), split: Counts | None = None
) -> Units:
    """What is predicted of ``tokens [n]``, in ``documents`` of these lengths: all or the first tokens of a
    ``split``. If they lose a part of its text, the whole text counts, and nothing is known of a part of it;
    otherwise, or if no split is given, it is the text for which the tokens stand."""
    decoded = decoded_units(tokenizer, tokens, documents)
    if split is None or not split.is_lossy:
        return decoded
    if split.tokens != len(tokens):
        return Units(decoded.tokens, 0, 0, 0)
    return Units(
        decoded.tokens,
        bytes=split.bytes - split.first_bytes,
        characters=split.characters - split.first_characters,
        words=split.words - split.first_words if decoded.words else 0,
    )


def decoded_units(
    tokenizer: Tokenizer, tokens: Tokens, documents: Sequence[int], piece_len: int = DECODED_TOKENS
) -> Units:
    """[`units`][] of the text for which the tokens stand, ``piece_len`` of which are decoded at a time."""
    lengths = documents or (len(tokens),)
    predicted = sum(max(length - 1, 0) for length in lengths)
    if tokenizer.name == "ids":
        return Units(predicted, 0, predicted, 0)
    counts = np.zeros(4, dtype=np.int64)
    begin = 0
    for length in lengths:
        end = begin + length
        for first in range(begin + 1, end, piece_len):
            # The token before shows where a word continues, and whether a space follows it.
            read = read_tokens(tokens, torch.arange(first - 1, min(first + piece_len, end)))
            counts += count_units(tokenizer.bytes_of(read))
            counts[:3] -= count_units(tokenizer.bytes_of(read[:1]))[:3]
        begin = end
    n_bytes, characters, words, of_letters = counts.tolist()
    return Units(predicted, n_bytes, characters, words if of_letters >= MIN_WORDS * words else 0)


def count_units(raw: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The bytes, characters and words in a slice of a text, and its words of letters, int64 ``[4]``."""
    continues = np.frombuffer(raw, np.uint8) & 0xC0 == 0x80
    words = raw.decode("utf-8", errors="surrogateescape").split()
    of_letters = sum(word.translate(NO_PUNCTUATION).isalpha() for word in words)
    return np.array([len(raw), len(raw) - continues.sum(), len(words), of_letters])


def comparable(nats: float, predicted: Units, tokenizer: Tokenizer) -> dict[str, float]:
    """The loss of all predicted tokens together, in bits per character and per byte; where tokens are words,
    also as ``perplexity`` over all of them, ends of lines included (Dai et al. 2019, section 4.1); where they
    are subwords, as ``word_perplexity`` of the text's words (Rae et al. 2020, section 4.1). NaN for what
    doesn't apply or is not known."""
    bits = nats / math.log(2)
    are_words = tokenizer.name in ("word", "wordlevel")
    are_subwords = not are_words and tokenizer.name not in ("character", "byte", "ids")
    return {
        "bits_per_character": bits / predicted.characters if predicted.characters else math.nan,
        "bits_per_byte": bits / predicted.bytes if predicted.bytes else math.nan,
        "perplexity": perplexity(nats, predicted.tokens) if are_words else math.nan,
        "word_perplexity": perplexity(nats, predicted.words) if are_subwords else math.nan,
    }


def perplexity(nats: float, n: int) -> float:
    """Of ``n`` predictions with this loss in all; NaN of none, and infinite where it is too large."""
    if not n:
        return math.nan
    return math.exp(nats / n) if nats / n < 700 else math.inf


def summary(evaluation: Evaluation, tokenizer: Tokenizer, predicted: Units) -> dict[str, float]:
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        **comparable(evaluation.nats, predicted, tokenizer),
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
