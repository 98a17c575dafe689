"""The text of a training as tokens, and how much of the held-out text an evaluation reads."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from memformers.common.text import UserError
from memformers.data import VALIDATION
from memformers.data.dataset import TokenDataset
from memformers.data.files import Ids
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length
from memformers.data.tokenize_corpus import dataset_of
from memformers.evaluation.evaluate import Evaluation, comparable, evaluate_reading, reading_of, units
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed

EVALUATION_STREAMS = 16


def spec_of(config: TrainConfig) -> CorpusSpec:
    text = asdict(config.text)
    return CorpusSpec(config.data, tokenizer=config.tokenizer, vocab_size=config.model.vocab_size, **text)


def find_text(config: TrainConfig) -> TokenDataset:
    return dataset_of(spec_of(config))


def check_long_enough(text: TokenDataset, config: TrainConfig) -> None:
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


@dataclass(frozen=True)
class Measured:
    """An evaluation, and its loss in units that can be compared between tokenizers."""

    evaluation: Evaluation
    in_units: dict[str, float]
    """As in [`comparable`][memformers.evaluation.evaluate.comparable]."""


class Validation:
    """The held-out text of ``text``: every evaluation of a training reads its first
    ``config.evaluation_tokens`` tokens, in which a document may be cut, and one at the end reads all, or the
    first ``config.final_tokens``. With several ``ranks``, each reads a part of the streams, or documents."""

    def __init__(self, text: TokenDataset, config: TrainConfig, ranks: Distributed = SINGLE_PROCESS):
        self.tokenizer, self.ranks = text.tokenizer, ranks
        self.tokens, self.documents = text.validation.tokens, text.validation.documents
        self.final = self._beginning(config.evaluation.final_tokens)
        """The tokens that the last evaluation reads, and the lengths of their documents."""
        self.first = self._beginning(config.evaluation.evaluation_tokens)
        """Those that the others read."""
        self.final_is_first = [len(self.final[0]), self.final[1]] == [len(self.first[0]), self.first[1]]
        self.predictable = len(self.tokens) - (len(self.documents) or 1)
        """The number of tokens of the whole held-out text that can be predicted."""

    def _beginning(self, length: int) -> tuple[Ids, tuple[int, ...]]:
        """The first ``length`` tokens, and the lengths of their documents; all for 0, and where nothing in
        them can be predicted."""
        lengths = np.diff(np.minimum(np.cumsum(self.documents, dtype=np.int64), length), prepend=0)
        if max(lengths.tolist() or [length]) < 2:
            return self.tokens, tuple(self.documents.tolist())
        return self.tokens[:length], tuple(lengths[lengths > 0].tolist())

    def evaluate(self, model: MemoryLM, final: bool, progress: Callable[[float], None]) -> Measured:
        """Evaluate what the ``final`` evaluation reads, or the others; ``progress`` gets the fraction that is
        done after each segment, equally often on every rank. All ranks must call this, and get the same."""
        tokens, documents = self.final if final else self.first
        reading = reading_of(len(tokens), EVALUATION_STREAMS, model.config.segment_len, documents)
        groups = (group[self.ranks.rank :: self.ranks.size] for group in reading.groups)
        local = replace(reading, groups=tuple(group for group in groups if group))
        steps, read = self.ranks.highest(len(local.steps)), itertools.count(1)
        part = evaluate_reading(model, tokens, local, lambda losses: progress(next(read) / steps))
        for _ in range(steps - len(local.steps)):  # while others read
            progress(next(read) / steps)
        total = Evaluation(reading, part.reach)
        for other in self.ranks.all_gather(part):
            total.merge(other)
        return Measured(
            total, comparable(total.nats, units(self.tokenizer, tokens, documents), self.tokenizer)
        )
