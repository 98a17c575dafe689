"""The held-out text of a training, and its evaluations."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memformers.data.dataset import TokenDataset
from memformers.data.files import Ids
from memformers.evaluation.evaluate import Evaluation, evaluate_reading, reading_of
from memformers.evaluation.units import losses_by_unit, predicted_units
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed

EVALUATION_STREAMS = 16
"""In how many parallel streams a held-out text is read."""


@dataclass(frozen=True)
class Measurement:
    """An evaluation, and its loss in units that can be compared between tokenizers."""

    evaluation: Evaluation
    in_units: dict[str, float]


class HeldOutPart(NamedTuple):
    """A part of a held-out text."""

    tokens: Ids
    documents: tuple[int, ...]
    """The lengths of its documents."""


class Validation:
    """The held-out text. Evaluations during a training read its first ``evaluation_tokens`` tokens, which may
    end within a document. The last evaluation reads everything, or the first ``final_tokens``. With several
    ``ranks``, each reads a part of the streams, or documents."""

    def __init__(self, text: TokenDataset, config: TrainConfig, ranks: Distributed = SINGLE_PROCESS):
        self.ranks = ranks
        self.tokenizer = text.tokenizer
        self.tokens = text.validation.tokens
        self.documents = text.validation.documents
        self.counts = text.validation.counts
        self.n_predictable = len(self.tokens) - (len(self.documents) or 1)
        self.config = config

    @cached_property
    def final_part(self) -> HeldOutPart:
        """What the last evaluation reads."""
        return self.read_first(self.config.evaluation.final_tokens)

    @cached_property
    def usual_part(self) -> HeldOutPart:
        """What the other evaluations read."""
        return self.read_first(self.config.evaluation_tokens)

    @property
    def final_is_usual(self) -> bool:
        """Whether the last evaluation reads the same tokens as the others."""
        is_as_long = len(self.final_part.tokens) == len(self.usual_part.tokens)
        return is_as_long and self.final_part.documents == self.usual_part.documents

    def read_first(self, length: int) -> HeldOutPart:
        """The first ``length`` tokens; all if it is 0, or where nothing could be predicted."""
        ends = np.minimum(np.cumsum(self.documents, dtype=np.int64), length)
        lengths = np.diff(ends, prepend=0)
        longest = max(lengths.tolist() or [length])
        if longest < 2:
            return HeldOutPart(self.tokens, tuple(self.documents.tolist()))
        return HeldOutPart(self.tokens[:length], tuple(lengths[lengths > 0].tolist()))

    def evaluate(self, model: MemoryLM, final: bool, progress: Callable[[float], None]) -> Measurement:
        """Evaluate what the ``final`` evaluation reads, or the others; ``progress`` gets the fraction that is
        done after each segment, equally often on every rank. All ranks must call this, and get the same."""
        tokens, documents = self.final_part if final else self.usual_part
        reading = reading_of(len(tokens), EVALUATION_STREAMS, model.config.segment_len, documents)

        # This rank's streams of each group
        groups = []
        for group in reading.groups:
            streams = group[self.ranks.rank :: self.ranks.size]
            if streams:
                groups.append(streams)
        local = replace(reading, groups=tuple(groups))

        # Evaluate them, then wait while other ranks still read
        n_steps = self.ranks.highest(len(local.steps))
        steps = itertools.count(1)
        part = evaluate_reading(model, tokens, local, lambda losses: progress(next(steps) / n_steps))
        for _ in range(n_steps - len(local.steps)):
            progress(next(steps) / n_steps)

        # The sums of all ranks
        total = Evaluation(reading, part.reach)
        for rank_part in self.ranks.all_gather(part):
            total.merge(rank_part)
        predicted = predicted_units(self.tokenizer, tokens, documents, self.counts)
        return Measurement(total, losses_by_unit(total.nats, predicted, self.tokenizer))

    def describe_tokens(self, evaluation: Evaluation) -> str:
        """What an ``evaluation`` read, such as "the first 499 of 2,999 held-out tokens"."""
        if evaluation.tokens == self.n_predictable:
            return f"all {self.n_predictable:,} held-out tokens"
        return f"the first {evaluation.tokens:,} of {self.n_predictable:,} held-out tokens"
