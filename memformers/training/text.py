"""The text of a training as tokens, and how much of the held-out text an evaluation reads."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.corpora import Corpus
from memformers.data.streams import check_length, documents_reading, plain_reading
from memformers.data.tokenizers import Tokenizer, build_tokenizer, check_order
from memformers.evaluation.evaluate import Evaluation, evaluate_reading
from memformers.evaluation.units import bits
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig


@dataclass(frozen=True)
class Text:
    """A corpus as tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor
    train_documents: tuple[int, ...] = ()
    """How many tokens of ``train`` each document has; empty for a plain text."""
    validation_documents: tuple[int, ...] = ()
    """The same for ``validation``."""


def prepare(corpus: Corpus, config: TrainConfig) -> Text:
    """The corpus as tokens, long enough for ``config`` to train and validate on; else ValueError."""
    check_order(config.tokenizer, config.model.adaptive.cutoffs)
    tokenizer = build_tokenizer(config.tokenizer, corpus.text)
    train_tokens, train_documents = encoded(tokenizer, corpus.train_text, corpus.train_documents)
    validation, held_out = encoded(tokenizer, corpus.validation_text, corpus.validation_documents)
    check_length(len(train_tokens), config.batch_size, config.model.segment_len)
    for documents, purpose in ((train_documents, "train"), (held_out, "validate")):
        if documents and max(documents) < 2:
            raise UserError(
                f"{corpus.source} has only documents of a single token to {purpose} on, and nothing can be "
                f"predicted in them; use longer documents."
            )
    if len(validation) < 2:
        raise UserError(f"{corpus.source} leaves {len(validation)} tokens to validate on; use a longer text.")
    return Text(corpus, tokenizer, train_tokens, validation, train_documents, held_out)


def encoded(tokenizer: Tokenizer, text: str, documents: tuple[str, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """The tokens ``[n]`` of ``text``, and how many of them each of the ``documents`` has that it consists
    of."""
    if not documents:
        return tokenizer.encode(text), ()
    parts = [tokenizer.encode(document) for document in documents]
    return torch.cat(parts), tuple(map(len, parts))


EVALUATION_STREAMS = 16
EVALUATED_A_TRAINED = 3
"""The number of tokens that are evaluated in about the time of one trained token, forward and backward."""
FEWEST_SEGMENTS = 2
"""The number of segments of each stream: from the second one on, the memory isn't empty."""


class Validation:
    """The held-out text of ``text``, and the part of it that every evaluation of a training reads; the last
    one reads all of it.

    Evaluations are of streams, and the part is the beginning of each, so an evaluation of the whole text
    holds that of the part. Documents are read one by one, and the part is every k-th of them, or where a
    single one is too long, the beginning of the first. Its length depends only on ``config`` and the text,
    and not on time, so it is the same however often the training is resumed.
    """

    def __init__(self, text: Text, config: TrainConfig):
        self.text, S, tokens = text, config.model.segment_len, len(text.validation)
        streams = min(EVALUATION_STREAMS, tokens - 1)
        allowed = allowed_segments(config, streams)
        if documents := text.validation_documents:
            in_part = set(sample_of(documents, allowed * streams * S))
            others = sorted(set(range(len(documents))) - in_part)
            self.reading = documents_reading(documents, EVALUATION_STREAMS, S, (sorted(in_part), others))
            """How the text is read, documents of the part first."""
            steps = sum(numbers[0] in in_part for numbers, _ in self.reading.steps)
            allowed = allowed * streams if len(in_part) == 1 else math.inf
        else:
            self.reading = plain_reading(tokens, streams, S)
            steps = len(self.reading.steps)
        self.segments = int(min(steps, allowed))
        """In the order of reading: those of the part that every evaluation reads."""

    def evaluate(self, model: MemoryLM, whole: bool, done: Callable[[float], None]) -> Evaluation:
        """Evaluate the ``whole`` text, or the part; ``done`` is told before each segment what fraction is."""
        segments, read = len(self.reading.steps) if whole else self.segments, itertools.count()

        def between_segments() -> None:
            done(next(read) / segments)

        return evaluate_reading(model, self.text.validation, self.reading, between_segments, segments)

    def part(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation of the part, taken from one of the whole text or of the part."""
        return evaluation.beginning(self.reading, self.segments)

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """The metrics of an evaluation for a record, with the number of evaluated tokens."""
        metrics = {
            "loss.valid": evaluation.loss,
            "bits_per_character.valid": self.bits_per_character(evaluation),
            "accuracy.valid": evaluation.accuracy,
            "evaluated_tokens": len(evaluation.losses),
        }
        if evaluation.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = evaluation.reconstruction_loss
        return metrics

    def bits_per_character(self, evaluation: Evaluation) -> float:
        """Bits per character: exact for the whole text; for a part, from the whole text's number of tokens
        per character."""
        text, tokens = self.text.corpus.validation_text, len(self.text.validation)
        given = len(self.text.validation_documents) or 1  # first tokens, which nothing predicts
        if len(evaluation.losses) < tokens - given:
            return evaluation.loss / math.log(2) * (tokens - given) / max(len(text) - given, 1)
        return bits(evaluation.losses_by_text, self.text.corpus.validation_documents or (text,))[0]


def sample_of(documents: Sequence[int], tokens: float) -> list[int]:
    """The numbers of every k-th of ``documents``, whose lengths are given, with a small k for which they have
    at most this number of ``tokens`` together; only the first document if it alone has more. Documents of a
    single token, in which nothing is predicted, are left out."""
    numbers = [number for number, length in enumerate(documents) if length > 1]
    for k in range(max(int(sum(documents) // tokens), 1), len(numbers)):
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
