"""The held-out text of a training: how much of it an evaluation reads, and what that says."""

import math
from collections.abc import Callable

from memformers.data.streams import stream_length
from memformers.evaluation.evaluate import Evaluation, evaluate
from memformers.evaluation.units import bits_per_character
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.text import Text

EVALUATION_STREAMS = 16
EVALUATED_A_TRAINED = 3
"""Tokens that are evaluated in about the time of one that is trained on, forward and backward."""
FEWEST_SEGMENTS = 2
"""Of each stream: from the second one on, a model has something to remember."""


class Validation:
    """The held-out text of ``text``, and the part of it that every evaluation of a training reads; the last
    one reads all of it.

    Evaluations are of streams, and the part is the beginning of each, so an evaluation of the whole text
    holds that of the part. How long it is follows from ``config`` and the text's length alone, never from
    a clock: it is the same however often the training is resumed.
    """

    def __init__(self, text: Text, config: TrainConfig):
        tokens, self.segment_len = len(text.validation), config.model.segment_len
        self.text = text
        self.streams = min(EVALUATION_STREAMS, tokens - 1)
        self.all_segments = -(-stream_length(tokens, self.streams) // self.segment_len)
        self.segments = int(min(self.all_segments, allowed_segments(config, self.streams)))
        """Of each stream, in the part that every evaluation reads."""

    def evaluate(self, model: MemoryLM, whole: bool, done: Callable[[float], None]) -> Evaluation:
        """Evaluate the ``whole`` text, or the part; ``done`` is told before each segment what fraction is."""
        segments, read = self.all_segments if whole else self.segments, iter(range(self.all_segments))
        return evaluate(
            model, self.text.validation, self.streams, lambda: done(next(read) / segments), segments
        )

    def part(self, evaluation: Evaluation) -> Evaluation:
        """That of the part, in one of the whole text or of the part."""
        return evaluation.beginning(self.segments, self.segment_len)

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """What a record says of an evaluation, with the number of tokens that it is over."""
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
        """Of the whole text exactly; of the part, by the tokens a character that the whole text has."""
        text, tokens = self.text.corpus.validation_text, len(self.text.validation)
        if len(evaluation.losses) == tokens - 1:
            return bits_per_character(evaluation.losses, text)
        return evaluation.loss / math.log(2) * (tokens - 1) / max(len(text) - 1, 1)


def allowed_segments(config: TrainConfig, streams: int) -> float:
    """How many segments of each stream an evaluation before the last may read, so that all of these take no
    more than ``config.evaluation_share`` of the training's work, but for [`FEWEST_SEGMENTS`][]."""
    if config.evaluation_share == 0.0 or config.evaluations == 1:
        return math.inf
    tokens = config.evaluation_share * config.tokens * EVALUATED_A_TRAINED / (config.evaluations - 1)
    return max(tokens // (streams * config.model.segment_len), FEWEST_SEGMENTS)
