"""The text of a training as tokens, and how much of the held-out text an evaluation reads."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import torch

from memformers.common.errors import UserError
from memformers.data import VALIDATION
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length, read_tokens
from memformers.data.tokenize_corpus import dataset_of
from memformers.evaluation.bits_per_byte import comparable, units
from memformers.evaluation.evaluate import Evaluation, evaluate_reading, reading_of
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed

OPENING_TOKENS = 4096
"""How many tokens of the held-out text samples may begin with."""


def spec_of(config: TrainConfig) -> CorpusSpec:
    """What the text of ``config`` is made of."""
    size = config.model.vocab_size
    return CorpusSpec(
        config.data,
        tokenizer=config.tokenizer,
        vocab_size=None if size == ModelConfig().vocab_size else size,
        **asdict(config.text),
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
    raw = text.tokenizer.bytes_of(read_tokens(text.validation.tokens, first))
    return raw.decode("utf-8", errors="surrogateescape")


EVALUATION_STREAMS = 16


class Validation:
    """The held-out text of ``text``: every evaluation of a training reads its first
    ``config.evaluation_tokens`` tokens, in which a document may be cut, and one at the end reads all. With
    several ``ranks``, each reads a share of the streams, or of the documents."""

    def __init__(self, text: TokenDataset, config: TrainConfig, ranks: Distributed = SINGLE_PROCESS):
        self.tokenizer, self.tokens, self.ranks = text.tokenizer, text.validation.tokens, ranks
        self.documents = tuple(text.validation.documents.tolist())
        most = config.evaluation.evaluation_tokens or len(self.tokens)
        first = np.diff(np.minimum(np.cumsum(self.documents, dtype=np.int64), most), prepend=0)
        self.first = self.tokens[:most], tuple(first[first > 0].tolist())
        """What every evaluation reads, and how many tokens each of its documents has."""
        if max(self.first[1] or (most,)) < 2:  # nothing to predict
            self.first = self.tokens, self.documents
        self.units = units(self.tokenizer, *self.first)
        self.predictable = len(self.tokens) - (len(self.documents) or 1)
        """The number of tokens of the whole held-out text that can be predicted."""

    def evaluate(self, model: MemoryLM, whole: bool, done: Callable[[float], None]) -> Evaluation:
        """Evaluate the ``whole`` text, or its first tokens; ``done`` is told after each segment what fraction
        is, as often on every rank. All ranks must call this, and get the same."""
        tokens, documents = (self.tokens, self.documents) if whole else self.first
        reading = reading_of(len(tokens), EVALUATION_STREAMS, model.config.segment_len, documents)
        groups = (group[self.ranks.rank :: self.ranks.size] for group in reading.groups)
        own = replace(reading, groups=tuple(group for group in groups if group))
        steps, read = self.ranks.highest(len(own.steps)), itertools.count(1)
        found = evaluate_reading(model, tokens, own, lambda losses: done(next(read) / steps))
        for _ in range(steps - len(own.steps)):  # while others read
            done(next(read) / steps)
        total = Evaluation(reading, found.reach)
        for part in self.ranks.all_gather(found):
            total.merge(part)
        return total

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """The metrics of an evaluation of the first tokens for a record, with their number."""
        in_units = comparable(evaluation.nats, self.units, self.tokenizer)
        metrics = {
            "loss.valid": evaluation.loss,
            "bits_per_character.valid": in_units["bits_per_character"],
            "accuracy.valid": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
        }
        if evaluation.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = evaluation.reconstruction_loss
        return metrics

    def comparable(self, evaluation: Evaluation) -> dict[str, float]:
        """The loss of the whole text in [`comparable`][memformers.evaluation.bits_per_byte.comparable]
        units."""
        of = units(self.tokenizer, self.tokens, self.documents)
        return comparable(evaluation.nats, of, self.tokenizer)
