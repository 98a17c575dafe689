"""The state of a training between two steps."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, NonNegativeInt, Range
from memformers.models.memory import Memory

NUMBERS = ("the loss", "the reconstruction loss", "the gradient's norm", "the compressions' gradient's norm")
"""The numbers of a step, in words."""


@dataclass(frozen=True)
class StepMetrics:
    """A training step, of which the device has the numbers."""

    step: int
    """How many were taken before it."""
    seen: int
    """How many tokens were read before it."""
    tokens: int
    predictions: int
    """Its tokens that have a target."""
    memory: tuple[int, int]
    """The lengths of memory and compressed memory after it."""
    numbers: Tensor
    """float64 ``[5]``: those of [`NUMBERS`][], and how many predictions were correct."""

    def problem(self, numbers: Sequence[float]) -> str:
        """The first of the ``numbers`` that is not finite, in words; empty if all are finite."""
        named = zip(NUMBERS, numbers, strict=False)
        return next((f"{name} is {value}" for name, value in named if not math.isfinite(value)), "")


@dataclass
class MetricAccumulator:
    """Sums over the steps since the last training record."""

    began: float = 0.0
    """The training time, in seconds, at which the window began."""
    steps: int = 0
    tokens: int = 0
    not_predicted: int = 0
    """Tokens without a target."""
    correct: int = 0
    compressions: int = 0
    """Steps in which something was compressed."""
    compression_grads: int = 0
    """Steps in which the compression functions had a gradient."""
    loss: float = 0.0
    reconstruction_loss: float = 0.0
    grad_norm: float = 0.0
    compression_grad_norm: float = 0.0
    mem_len: int = 0
    c_mem_len: int = 0

    def add(self, taken: StepMetrics, numbers: Sequence[float]) -> None:
        """Count the step that was ``taken``, whose ``numbers`` were read."""
        self.steps += 1
        self.tokens += taken.tokens
        self.not_predicted += taken.tokens - taken.predictions
        self.loss += numbers[0]
        self.reconstruction_loss += numbers[1]
        self.grad_norm += numbers[2]
        self.compression_grad_norm += numbers[3]
        self.correct += round(numbers[4])
        self.compressions += numbers[1] > 0
        self.compression_grads += numbers[3] > 0
        self.mem_len, self.c_mem_len = taken.memory

    def metrics(self, seconds: float) -> dict[str, float]:
        """The means over the window, which ends after ``seconds`` of training."""
        metrics = {
            "loss.train": self.loss / self.steps,
            "accuracy.train": self.correct / max(self.tokens - self.not_predicted, 1),
            "gradient_norm": self.grad_norm / self.steps,
            "tokens_per_second": self.tokens / (seconds - self.began),
            "memory.length": self.mem_len,
            "memory.compressed_length": self.c_mem_len,
        }
        if self.compressions:
            metrics["reconstruction_loss.train"] = self.reconstruction_loss / self.compressions
        if steps := max(self.compressions, self.compression_grads):
            metrics["gradient_norm.compression"] = self.compression_grad_norm / steps
        return metrics


@dataclass
class TrainingState(Checked):
    """Everything that the next step depends on, except the weights and the random states."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    """A step of each must change nothing where its attribute ``found_inf``, a scalar, isn't 0, as with
    PyTorch's fused optimizers."""
    memory: Memory = field(default_factory=lambda: Memory(()))
    """The memory that the streams' next segments read."""
    epoch: NonNegativeInt = 0
    """How many times the text has been read before."""
    position: NonNegativeInt = 0
    """Where the next segment begins, in tokens of a stream."""
    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    """The number of tokens read in all streams together."""
    seconds: Annotated[float, Range(0)] = 0.0
    """The time of training steps, without evaluations and checkpoints."""
    evaluation_seconds: Annotated[float, Range(0)] = 0.0
    """The time of evaluations and of the samples that are generated with them."""
    begun: NonNegativeInt = 0
    """How many tokens had been read when a finished training went on; 0 if it never did."""
    evaluations: NonNegativeInt = 0
    """The number of evaluations that are done, since then."""
    lowest_loss: float | None = None
    """Of these evaluations, in nats per token."""
    without_gain: NonNegativeInt = 0
    """How many of these, in a row and up to now, didn't have a lower loss than all before."""
    skipped: NonNegativeInt = 0
    """The number of steps that were skipped because a number in them was not finite."""
    window: MetricAccumulator = field(default_factory=MetricAccumulator)
    pending: list[StepMetrics] = field(default_factory=list)
    """The steps that aren't counted yet, since nobody has waited for their numbers."""

    def go_on(self) -> None:
        """Begin another part of the training, after the end of the one before."""
        self.begun, self.evaluations, self.lowest_loss, self.without_gain = self.tokens, 0, None, 0

    @property
    def progress(self) -> dict[str, float]:
        """How far the training has come, as its result says it."""
        return {n: getattr(self, n) for n in ("step", "tokens", "seconds", "evaluation_seconds")}


def random_states() -> dict[str, Any]:
    """The random states of Python, NumPy, and PyTorch on CPU and on every GPU."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(state.tolist()).hex() for state in torch.cuda.get_rng_state_all()],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore [`random_states`][], those of GPUs only where as many GPUs exist here; ValueError for anything
    else."""
    try:
        python = states["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        np.random.set_state(states["numpy"])
        cpu, *gpus = (
            torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
            for digits in (states["torch"], *states["cuda"])
        )
        torch.set_rng_state(cpu)
        if len(gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpus)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"the random states can't be used: {error!r}") from None
