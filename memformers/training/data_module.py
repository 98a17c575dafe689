"""The text of a training as tokens, and how much of the held-out text an evaluation reads."""

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from memformers.common.errors import UserError
from memformers.data import VALIDATION
from memformers.data.dataset import TokenDataset
from memformers.data.files import Ids
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length
from memformers.data.tokenize_corpus import dataset_of
from memformers.evaluation.evaluate import (
    Evaluation,
    comparable,
    evaluate,
    evaluate_reading,
    reading_of,
    units,
)
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed

EVALUATION_STREAMS = 16


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


class Validation:
    """The held-out text of ``text``: every evaluation of a training reads its first
    ``config.evaluation_tokens`` tokens, in which a document may be cut, and one at the end reads all, or the
    first ``config.final_tokens``. With several ``ranks``, each reads a share of the streams, or documents."""

    def __init__(self, text: TokenDataset, config: TrainConfig, ranks: Distributed = SINGLE_PROCESS):
        self.tokenizer, self.ranks = text.tokenizer, ranks
        self.tokens, self.documents = text.validation.tokens, text.validation.documents
        self.all = self._beginning(config.evaluation.final_tokens)
        """The tokens that the last evaluation reads, and how many each of their documents has."""
        self.first = self._beginning(config.evaluation.evaluation_tokens)
        self.predictable = len(self.tokens) - (len(self.documents) or 1)
        """The number of tokens of the whole held-out text that can be predicted."""

    def _beginning(self, most: int) -> tuple[Ids, tuple[int, ...]]:
        """The first ``most`` tokens, and how many each of their documents has; all for 0, and where nothing
        in them can be predicted."""
        lengths = np.diff(np.minimum(np.cumsum(self.documents, dtype=np.int64), most), prepend=0)
        if max(lengths.tolist() or [most]) < 2:
            return self.tokens, tuple(self.documents.tolist())
        return self.tokens[:most], tuple(lengths[lengths > 0].tolist())

    def evaluate(self, model: MemoryLM, whole: bool, done: Callable[[float], None]) -> Evaluation:
        """Evaluate what the last evaluation reads, if ``whole``, or the first tokens; ``done`` is told after
        each segment what fraction is, as often on every rank. All ranks must call this, and get the same."""
        tokens, documents = self.all if whole else self.first
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

    def comparable(self, evaluation: Evaluation, whole: bool) -> dict[str, float]:
        """The loss of the ``whole`` text, or of its first tokens, in
        [`comparable`][memformers.evaluation.evaluate.comparable] units."""
        of = units(self.tokenizer, *(self.all if whole else self.first))
        return comparable(evaluation.nats, of, self.tokenizer)

    def speed(self, model: MemoryLM) -> tuple[float, float]:
        """The seconds in which a segment's tokens are evaluated on one rank, for each of them: with an empty
        memory, and with a full one, or what is remembered after eight segments."""
        S = model.config.segment_len
        n_segments = min(2 + model.config.remembered_positions // S, 9)
        tokens = self.all[0][: EVALUATION_STREAMS * S * n_segments + 1]
        times: list[float] = []
        for _ in range(2):  # the first time is a warm-up
            evaluate(model, tokens, EVALUATION_STREAMS, progress=lambda _: times.append(time.perf_counter()))
        begun, n = len(times) // 2, min(EVALUATION_STREAMS * S, len(tokens) - 1)
        return (times[begun] - times[begun - 1]) / n, (times[-1] - times[-2]) / n
