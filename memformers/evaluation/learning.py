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

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Range, Share
from memformers.data.streams import Segment, Tokens
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import Evaluation, SegmentScores, evaluate_reading, reading_of, summary
from memformers.evaluation.units import Units
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode
from memformers.runs.folder import UNTOUCHED

# Of 0.01, 0.015, 0.03 and 0.1, and of 1, 3 and 5 · 10⁻⁴: the best on the first half of Tiny Shakespeare's
# held-out tenth.
LEARN_RATES = {"sgd": 0.03, "rms": 3e-4}
N_TRAINING_TOKENS = 16_384
"""Of a training text, whose gradients say how large a number of a gradient usually is."""
Trained = Sequence[tuple[nn.Parameter, Tensor]]
"""Weights that learn, each with a copy of it as it was trained."""
Step = Callable[[Sequence[Tensor | None]], None]
"""Changes the weights that learn by their gradients; None for a weight that has none."""
Progress = Callable[[Tensor], object]
"""Called after each segment with the losses of its predictions, ``[n]``."""
STREAMS = 16
"""Into how many streams a text is cut by default."""
STREAMS_OF_LEARNING = 1
"""The same while learning: with more, there are fewer steps, and little is learned."""


@dataclass(frozen=True)
class LearnConfig(Checked):
    """How a model learns from the text that it is evaluated on: after each segment, by one gradient step on
    the segment's mean loss.

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

    learn_step: Literal["sgd", "rms"] = "sgd"
    """The step of --learn: sgd, plain gradient descent, or rms, which divides each number of the gradient by
    its root mean square over a training text, and pulls weights back towards those that were trained."""
    learn_rate: Annotated[float, Range(0, below=math.inf)] | None = None
    """The learning rate of --learn; by default 0.03 for sgd and 0.0003 for rms."""
    learn_decay: Share = 0.002
    """Which share of the way back to the trained weights a step of rms takes, on average over the weights."""
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
    training: Tokens | None = None,
    progress: Progress = lambda losses: None,
) -> Evaluation:
    """What [`evaluate`][memformers.evaluation.evaluate.evaluate] measures, of a model that learns as it
    reads, as [`learned`][]. Afterwards, the model is as before."""
    with learned(
        model, tokens, streams, learn, documents=documents, training=training, progress=progress
    ) as evaluation:
        return evaluation


@contextmanager
def learned(
    model: MemoryLM,
    tokens: Tokens,
    streams: int,
    learn: LearnConfig,
    *,
    documents: Sequence[int] = (),
    training: Tokens | None = None,
    progress: Progress = lambda losses: None,
) -> Iterator[Evaluation]:
    """The ``model`` after it has read and learned ``tokens``, and how well it predicted them meanwhile.
    ``training`` is a part of the text that it was trained on, which the step rms needs. At the end, the model
    is as before, also after an exception. Raises UserError for a model that has no such weights, for a
    missing training text, and for a loss that is no longer finite."""
    reading = reading_of(len(tokens), streams, model.config.segment_len, documents)
    weights = weights_that_learn(model, learn)
    rms = None
    if learn.learn_step == "rms":
        if training is None:
            raise UserError("learn_step=rms needs a part of the training text; name one with learn_text.")
        rms = gradient_rms(model, weights, training[:N_TRAINING_TOKENS], streams)
    with restored(weights) as trained:
        step = step_of(trained, learn, rms)
        read = partial(read_and_learn, trained=trained, step=step, reset=learn.learn_reset)
        yield evaluate_reading(model, tokens, reading, progress, read)


def read_and_learn(
    model: MemoryLM,
    segments: Iterable[Segment],
    *,
    trained: Trained,
    step: Step,
    reset: bool,
) -> Iterator[SegmentScores]:
    """What [`read_segments`][memformers.evaluation.evaluate.read_segments] yields, with one step on each
    segment after it was yielded. With ``reset``, streams start with the weights as ``trained``."""
    weights = [weight for weight, _ in trained]
    memory = Memory(())
    for segment in segments:
        inputs = segment.inputs.to(model.device)  # [S, B]
        targets = segment.targets.to(model.device)
        if segment.starts_over:
            memory = Memory(())
            if reset:
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
            raise UserError(f"the loss is {nats} while learning; use a lower learn_rate.")
        scores = {UNTOUCHED: (losses.cpu(), correct.cpu())}
        yield segment, memory, read.auxiliary_loss.detach(), scores

        # Then learn. Compressions have no gradient from this loss.
        step(torch.autograd.grad(loss, weights, allow_unused=True))
        memory = read.memory


def step_of(trained: Trained, learn: LearnConfig, rms: Sequence[Tensor] | None) -> Step:
    """The step of ``learn`` for weights whose gradients have this ``rms``, where it needs one."""
    rate = LEARN_RATES[learn.learn_step] if learn.learn_rate is None else learn.learn_rate

    @torch.no_grad()
    def sgd(gradients: Sequence[Tensor | None]) -> None:
        # θ ← θ − η g
        for (weight, _), gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                weight.sub_(gradient, alpha=rate)

    if rms is None:
        return sgd

    # Numbers with large gradients in training take smaller steps, and are pulled back more.
    flat_rms = [rms_of_weight.flatten() for rms_of_weight in rms]
    mean = torch.cat(flat_rms).mean()
    divisors = []
    decays = []
    for rms_of_weight in rms:
        divisors.append(rms_of_weight + mean)  # ε is the mean: no number is divided by nearly 0
        decays.append((rms_of_weight * (learn.learn_decay / mean)).clamp(max=1.0))

    @torch.no_grad()
    def scaled(gradients: Sequence[Tensor | None]) -> None:
        # θ ← θ − η g / (RMS + ε) + λ RMS / mean ⊙ (θ₀ − θ)
        for (weight, start), gradient, divisor, decay in zip(
            trained, gradients, divisors, decays, strict=True
        ):
            if gradient is not None:
                weight.lerp_(start, decay).addcdiv_(gradient, divisor, value=-rate)

    return scaled


def gradient_rms(
    model: MemoryLM, weights: Sequence[nn.Parameter], training: Tokens, streams: int
) -> list[Tensor]:
    """The root mean square of each number of the gradients of the ``weights``, over segments of the
    same number of streams as those that are learned."""
    squares = [torch.zeros_like(weight) for weight in weights]
    reading = reading_of(len(training), streams, model.config.segment_len)
    memory = None
    with eval_mode(model), torch.enable_grad():
        for segment in reading.segments(training):
            inputs = segment.inputs.to(model.device)  # [S, B]
            targets = segment.targets.to(model.device)
            read = model(inputs, memory, targets)
            memory = read.memory
            gradients = torch.autograd.grad(read.scores.loss, weights, allow_unused=True)
            for square, gradient in zip(squares, gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
    return [(square / len(reading.steps)).sqrt() for square in squares]


def weights_that_learn(model: MemoryLM, learn: LearnConfig) -> list[nn.Parameter]:
    modules: list[nn.Module] = [model]
    if learn.learn_weights == "feed-forward":
        modules = [layer.feed_forward for layer in model.transformer.memory_layers]
    elif learn.learn_weights == "norms":
        modules = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    # Modules may share weights; each is changed once.
    weights: dict[nn.Parameter, None] = {}
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                weights[parameter] = None
    if not weights:
        raise UserError(
            f"learn_weights={learn.learn_weights} names no weights of the model that require a gradient; use "
            f"other ones, or model.requires_grad_()."
        )
    return list(weights)


@contextmanager
def restored(weights: Sequence[nn.Parameter]) -> Iterator[Trained]:
    """The ``weights`` with copies of them, from which they are restored afterwards."""
    trained = [(weight, weight.detach().clone()) for weight in weights]
    try:
        yield trained
    finally:
        restore(trained)


@torch.no_grad()
def restore(trained: Trained) -> None:
    for weight, copy in trained:
        weight.copy_(copy)


def learning_columns(
    static: Evaluation, learning: Evaluation, tokenizer: Tokenizer, of: Units
) -> dict[str, float]:
    """The summary of the ``learning`` evaluation under separate names, and what it saves against the
    ``static`` one of the same text, with half of a 95 % interval of this paired difference."""
    numbers = summary(learning, tokenizer, of)
    columns = {f"learning_{name}": number for name, number in numbers.items() if name != "tokens"}
    saved = static.minus(learning)
    columns["learning_saves_nats"] = saved.mean
    columns["learning_saves_uncertainty_nats"] = saved.half_width
    return columns
