"""Evaluation of a text from Python in one call, for notebooks and other programs."""

import warnings
from collections.abc import Sequence

import numpy as np

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments
from memformers.data.kept_text import count_texts
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import evaluate as evaluate_tokens
from memformers.evaluation.evaluate import summary
from memformers.evaluation.learning import LearnConfig, evaluate_learning, learning_columns, usual_streams
from memformers.evaluation.units import LOSES_TEXT, predicted_units
from memformers.models.language_model import MemoryLM


@check_arguments
def evaluate(
    model: MemoryLM,
    tokenizer: Tokenizer,
    text: str | Sequence[str],
    *,
    streams: Count | None = None,
    learn: LearnConfig | None = None,
    learn_text: str = "",
) -> dict[str, float]:
    """Measure how well a model predicts a text, from start to end, with the memory carried along.

    Args:
        model: The model, whose segment and memories are as long as in training.
        tokenizer: Its tokenizer.
        text: A text; or several documents, each of which is read from an empty memory.
        streams: The number of parallel streams into which a text is cut; by default 16, or 1 with ``learn``.
            Each starts with an empty memory; with fewer, more tokens are predicted with a full memory, and
            the evaluation is slower. Of documents, how many are read in parallel, with the same result.
        learn: How a second evaluation learns: it takes a gradient step on each segment once it has predicted
            it (dynamic evaluation; Krause et al. 2019, arXiv 1904.08378), from all streams together, so that
            their number changes the result. The model has its weights back afterwards. None for no learning.
        learn_text: A part of the text that the model was trained on, which ``LearnConfig(learn_step="rms")``
            needs.

    Returns:
        ``loss_nats`` per token and ``uncertainty_nats``, half of its 95 % confidence interval;
        ``bits_per_character`` and ``bits_per_byte`` of ``text``; ``perplexity``, per token, where tokens are
        words, and ``word_perplexity`` where they are subwords, else NaN; ``accuracy``, and the number of
        predicted ``tokens``. With ``learn``, the same numbers of the evaluation that learns, with
        ``learning_`` before their names; and ``learning_saves_nats``, by how much its loss is below
        ``loss_nats``, with ``learning_saves_uncertainty_nats``. Warns if the tokenizer loses a part of the
        text.

    Raises:
        ValueError: For a text that the tokenizer can't encode, or in which nothing can be predicted; for
            learning that diverges, and for weights to learn that the model doesn't have.

    Examples:
        >>> from memformers import ByteTokenizer, MemoryLM, ModelConfig, evaluate
        >>> model = MemoryLM(ModelConfig(vocab_size=256, d_model=32, n_layers=2))
        >>> numbers = evaluate(model, ByteTokenizer(), "To be, or not to be. " * 50)
        >>> numbers["tokens"]
        1049
    """
    if tokenizer.vocab_size != model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model {model.vocab_size}; use its own."
        )
    texts = [text] if isinstance(text, str) else text
    parts = [tokenizer.ids(tokenizer.terminate(t)) for t in texts]
    tokens = np.concatenate(parts or [np.zeros(0, np.int64)])
    documents = () if isinstance(text, str) else tuple(map(len, parts))
    if streams is None:
        streams = usual_streams(learn)
    measured = evaluate_tokens(model, tokens, streams, documents=documents)
    counts = count_texts(tokenizer, texts, parts)
    if counts.is_lossy:
        warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
    text_units = predicted_units(tokenizer, tokens, documents, counts)
    numbers = summary(measured, tokenizer, text_units)
    if learn is not None:
        training = tokenizer.ids(learn_text) if learn_text else None
        learning = evaluate_learning(model, tokens, streams, learn, documents=documents, training=training)
        numbers |= learning_columns(measured, learning, tokenizer, text_units)
    return numbers
