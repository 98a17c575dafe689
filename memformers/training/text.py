"""The text of a training as tokens, and how much of the held-out text an evaluation reads."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data import VALIDATION
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length, documents_reading, plain_reading, taken
from memformers.data.tokenize_corpus import dataset_of
from memformers.evaluation.evaluate import Evaluation, evaluate_reading
from memformers.evaluation.units import slice_of, units, word_perplexity
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig

OPENING_TOKENS = 4096
"""How many tokens of the held-out text samples may begin with."""


def spec_of(config: TrainConfig) -> CorpusSpec:
    """What the text of ``config`` is made of."""
    size = config.model.vocab_size
    return CorpusSpec(
        config.data,
        config.validation,
        config.test,
        config.document_separator,
        config.text_field,
        config.tokenizer,
        None if size == ModelConfig().vocab_size else size,
    )


def find_text(config: TrainConfig) -> TokenDataset:
    """The text of ``config`` as tokens; UserError for one that can't be used."""
    return dataset_of(spec_of(config))


def check_long_enough(text: TokenDataset, config: TrainConfig) -> None:
    """Raise UserError unless ``config`` can train and validate on ``text``."""
    if (cutoffs := config.model.adaptive.cutoffs) and text.info.tokenizer not in ("frequency", "word"):
        raise UserError(
            f"cutoffs={cutoffs} need tokens that are numbered by frequency, but "
            f"tokenizer={text.info.tokenizer!r} numbers them otherwise; use tokenizer='frequency' or 'word', "
            f"or leave the cutoffs out."
        )
    if VALIDATION not in text.splits:
        raise UserError(f"{text.info.source} has no validation part; prepare it without a model's tokenizer.")
    check_length(len(text.train.tokens), config.batch_size, config.model.segment_len)
    for split, purpose in ((text.train, "train"), (text.validation, "validate")):
        if len(split.documents) and split.documents.max() < 2:
            raise UserError(
                f"{text.info.source} has only documents of a single token to {purpose} on, in which nothing "
                f"can be predicted; use longer documents."
            )


def held_out_beginning(text: TokenDataset) -> str:
    """The beginning of the held-out text."""
    first = torch.arange(min(len(text.validation.tokens), OPENING_TOKENS))
    return slice_of(text.tokenizer.bytes_of(taken(text.validation.tokens, first)))


EVALUATION_STREAMS = 16
EVALUATED_A_TRAINED = 3
"""The number of tokens that are evaluated in about the time of one trained token, forward and backward."""
FEWEST_SEGMENTS = 2
"""The number of segments of each stream: from the second one on, the memory isn't empty."""
LAST_SHARE = 0.2
"""The largest fraction of the training's work that the last evaluation may take."""
LAST_TOKENS = 250_000
"""The number of tokens that it may read in any case."""


class Validation:
    """The held-out text of ``text`` as far as the last evaluation of a training reads it, and the part of it
    that every evaluation reads.

    Evaluations are of streams, and the part is the beginning of each, so the last evaluation holds that of
    the part. Documents are read one by one, and the part is every k-th of them, or where a single one is too
    long, the beginning of the first. Both lengths depend only on ``config`` and the text, and not on time, so
    they are the same however often the training is resumed.
    """

    def __init__(self, text: TokenDataset, config: TrainConfig):
        self.tokenizer, self.split = text.tokenizer, text.validation
        S, tokens, documents = config.model.segment_len, len(self.split.tokens), self.split.documents.tolist()
        streams = min(EVALUATION_STREAMS, tokens - 1)
        allowed, longest = allowed_segments(config, streams), allowed_at_the_end(config)
        if documents:
            read = sample_of(documents, range(len(documents)), longest)
            in_part = set(sample_of(documents, read, allowed * streams * S))
            others = sorted(set(read) - in_part)
            reading = documents_reading(documents, EVALUATION_STREAMS, S, (sorted(in_part), others))
        else:
            reading, longest = plain_reading(tokens, streams, S), longest // streams
        self.reading = replace(reading, lengths=tuple(int(min(n, longest)) for n in reading.lengths))
        """How the text is read, documents of the part first."""
        self.predictable = sum(reading.lengths)
        """The number of tokens of the whole held-out text that can be predicted."""
        steps = len(self.reading.steps)
        if documents:
            steps = sum(numbers[0] in in_part for numbers, _ in self.reading.steps)
            allowed = allowed * streams if len(in_part) == 1 else math.inf
        self.segments = int(min(steps, allowed))
        """In the order of reading: those of the part that every evaluation reads."""

    def evaluate(self, model: MemoryLM, last: bool, done: Callable[[float], None]) -> Evaluation:
        """Evaluate what the ``last`` evaluation reads, or the part; ``done`` is told after each segment what
        fraction is."""
        segments, read = len(self.reading.steps) if last else self.segments, itertools.count(1)
        part = self.segments if last else None

        def progress(losses: Tensor) -> None:
            done(next(read) / segments)

        return evaluate_reading(model, self.split.tokens, self.reading, progress, segments, part)

    def part(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation of the part, taken from the last one or from one of the part."""
        return evaluation.part or evaluation

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """The metrics of an evaluation for a record, with the number of evaluated tokens."""
        metrics = {
            "loss.valid": evaluation.loss,
            "bits_per_character.valid": self.bits_per_character(evaluation),
            "accuracy.valid": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
        }
        if evaluation.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = evaluation.reconstruction_loss
        return metrics

    def read(self, evaluation: Evaluation) -> str:
        """How many of the tokens that can be predicted an evaluation read, in words."""
        n = evaluation.tokens
        return f"all {n:,}" if n == self.predictable else f"{n:,} of {self.predictable:,}"

    def bits_per_character(self, evaluation: Evaluation) -> float:
        """Of [`comparable`][memformers.training.text.Validation.comparable]."""
        return self.comparable(evaluation)["bits_per_character"]

    def comparable(self, evaluation: Evaluation) -> dict[str, float]:
        """Bits per character and per byte, and perplexity per word: exact for the whole text; for a part, as
        if the whole text had its loss per token."""
        split, counts = self.split, self.split.counts
        if evaluation.tokens == self.predictable:
            return evaluation.comparable(units(self.tokenizer, split))
        nats, given = evaluation.loss * self.predictable, counts.documents or 1
        return {
            # The first character of each text is one that nothing predicts.
            "bits_per_character": nats / math.log(2) / max(counts.characters - given, 1),
            "bits_per_byte": nats / math.log(2) / max(counts.bytes - given, 1),
            "word_perplexity": word_perplexity(nats, counts.words),
        }


def sample_of(documents: Sequence[int], numbers: Sequence[int], tokens: float) -> Sequence[int]:
    """Of the ``numbers`` of some ``documents``, whose lengths are given, every k-th, with a small k for which
    they have at most this number of ``tokens`` together; only the first one if it alone has more. Unless all
    are taken, documents of a single token, in which nothing is predicted, are left out."""
    whole = sum(documents[number] for number in numbers)
    if whole <= tokens:
        return numbers
    numbers = [number for number in numbers if documents[number] > 1]
    for k in range(max(int(whole // tokens), 1), len(numbers)):
        if sum(documents[number] for number in numbers[::k]) <= tokens:
            return numbers[::k]
    return numbers[:1]


def allowed_segments(config: TrainConfig, streams: int) -> float:
    """How many segments of each stream an evaluation before the last may read, so that all of them together
    need at most ``config.evaluation_share`` of the training's work, but never fewer than
    [`FEWEST_SEGMENTS`][]."""
    if config.evaluation_share == 0.0 or config.evaluations == 1:
        return math.inf
    tokens = config.evaluation_share * config.tokens * EVALUATED_A_TRAINED / (config.evaluations - 1)
    return max(tokens // (streams * config.model.segment_len), FEWEST_SEGMENTS)


def allowed_at_the_end(config: TrainConfig) -> float:
    """How many tokens the last evaluation may read: [`LAST_SHARE`][] of the training's work, or
    [`LAST_TOKENS`][] if that is more; all where no share is a limit."""
    work = LAST_SHARE * config.tokens * EVALUATED_A_TRAINED
    return max(work, LAST_TOKENS) if config.evaluation_share else math.inf
