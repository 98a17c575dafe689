"""Dynamic evaluation (Krause et al. 2019, arXiv 1904.08378): a model that goes on learning from the text that
it is evaluated on. Each segment is scored first, then learned, so no prediction has seen its answer. What was
read is remembered in the weights, beside the memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from memformers.common.fields import Checked, Range
from memformers.common.text import UserError
from memformers.data.streams import Segment, Tokens
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import (
    Evaluation,
    SegmentScores,
    Units,
    evaluate_reading,
    reading_of,
    summary,
)
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.runs.folder import UNTOUCHED

STREAMS = 16
"""Into how many streams a text is cut by default."""
STREAMS_OF_LEARNING = 1
"""The same while learning: with more, there are fewer steps, and little is learned."""


@dataclass(frozen=True)
class LearnConfig(Checked):
    """How a model learns from the text that it is evaluated on: after each segment, by one step of plain
    gradient descent on the segment's mean loss.

    Parallel streams share the weights, so a step learns from the segments of all streams. A document starts
    with an empty memory, but with the weights that earlier documents left; the longest documents are read
    first.

    Examples:
        >>> from memformers import ByteTokenizer, LearnConfig, MemoryLM, ModelConfig, evaluate
        >>> model = MemoryLM(ModelConfig(vocab_size=256, d_model=32, n_layers=2))
        >>> text = "To be, or not to be. " * 50
        >>> numbers = evaluate(model, ByteTokenizer(), text, streams=1, learn=LearnConfig())
        >>> numbers["learning_loss_nats"] < numbers["loss_nats"]
        True
    """

    # Of 0.01, 0.015, 0.03 and 0.1, the best for small models of plays and of Python source.
    learn_rate: Annotated[float, Range(0, below=math.inf)] = 0.03
    """The learning rate of --learn."""
    learn_weights: Literal["all", "feed-forward", "norms"] = "all"
    """Which weights --learn changes: all, those of feed-forward networks, or those of layer norms. Weights
    that require no gradient stay as they are."""
    learn_reset: bool = False
    """Whether the trained weights come back when documents start. Documents that are read in parallel still
    learn together; --streams 1 learns from each alone."""


def usual_streams(learn: LearnConfig | None) -> int:
    return STREAMS if learn is None else STREAMS_OF_LEARNING


def evaluate_learning(
    model: MemoryLM,
    tokens: Tokens,
    streams: int,
    learn: LearnConfig,
    *,
    documents: Sequence[int] = (),
    progress: Callable[[Tensor], object] = lambda losses: None,
) -> Evaluation:
    """What [`evaluate`][memformers.evaluation.evaluate.evaluate] measures, of a model that learns as it
    reads. Afterwards, the model is as before, also after an exception. Raises UserError for a model that has
    no such weights, and for a loss that is no longer finite."""
    reading = reading_of(len(tokens), streams, model.config.segment_len, documents)
    with restored(weights_that_learn(model, learn)) as trained:
        read = partial(read_and_learn, trained=trained, learn=learn)
        return evaluate_reading(model, tokens, reading, progress, read)


def read_and_learn(
    model: MemoryLM,
    segments: Iterable[Segment],
    *,
    trained: Sequence[tuple[nn.Parameter, Tensor]],
    learn: LearnConfig,
) -> Iterator[SegmentScores]:
    """What [`read_segments`][memformers.evaluation.evaluate.read_segments] yields, with one step on each
    segment after it was yielded. ``trained`` has the weights that learn, and copies of them as they were."""
    weights = [weight for weight, _ in trained]
    memory = Memory(())
    for segment in segments:
        inputs, targets = segment.inputs.to(model.device), segment.targets.to(model.device)
        if segment.starts_over:
            memory = Memory(())
            if learn.learn_reset:
                restore(trained)
        memory = memory.streams(slice(inputs.shape[1]))

        # Score with the weights that earlier segments left.
        with torch.enable_grad():
            read = model(inputs, memory, targets)
        loss, losses, correct = read.scores
        assert losses is not None  # a model in eval mode has them
        assert correct is not None
        nats = loss.item()
        if not math.isfinite(nats):
            raise UserError(f"the loss is {nats} while learning; use a learn_rate below {learn.learn_rate}.")
        scores = {UNTOUCHED: (losses.cpu(), correct.cpu())}
        yield segment, memory, read.auxiliary_loss.detach(), scores

        # Then learn: θ ← θ − η ∇L. Without bptt, compressions have no gradient from this loss.
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    weight.sub_(gradient, alpha=learn.learn_rate)
        memory = read.memory


def weights_that_learn(model: MemoryLM, learn: LearnConfig) -> list[nn.Parameter]:
    modules: list[nn.Module] = [model]
    if learn.learn_weights == "feed-forward":
        modules = [layer.feed_forward for layer in model.transformer.memory_layers]
    elif learn.learn_weights == "norms":
        modules = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    parameters = (parameter for module in modules for parameter in module.parameters())
    weights = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    if not weights:
        raise UserError(
            f"learn_weights={learn.learn_weights} names no weights of the model that require a gradient; use "
            f"other ones, or model.requires_grad_()."
        )
    return weights


@contextmanager
def restored(weights: Sequence[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """The ``weights`` with copies of them, from which they are restored afterwards."""
    trained = [(weight, weight.detach().clone()) for weight in weights]
    try:
        yield trained
    finally:
        restore(trained)


@torch.no_grad()
def restore(trained: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for weight, copy in trained:
        weight.copy_(copy)


def learning_columns(
    static: Evaluation, learning: Evaluation, tokenizer: Tokenizer, of: Units
) -> dict[str, float]:
    """The [`summary`][] of the ``learning`` evaluation under names of its own, and what it saves against the
    ``static`` one of the same text, with half of a 95 % interval of this paired difference."""
    numbers = summary(learning, tokenizer, of)
    columns = {f"learning_{name}": number for name, number in numbers.items() if name != "tokens"}
    saved = static.minus(learning)
    columns["learning_saves_nats"] = saved.mean
    columns["learning_saves_uncertainty_nats"] = saved.half_width
    return columns
