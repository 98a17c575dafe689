"""The state of a training: everything that its next step depends on besides the weights and the random
states."""

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, NonNegativeInt, Range
from memformers.models.memory import Memory
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed

# What a step measures, in the order of the columns below; each must be finite.
STEP_MEASURES = (
    "the loss",
    "the reconstruction loss",
    "the gradient's norm",
    "the compressions' gradient's norm",
)


class NotFiniteError(UserError):
    """The loss or the gradient is no longer finite."""


@dataclass
class MetricAccumulator:
    """Sums over the steps since the last record."""

    began: float = 0.0
    """The training's seconds at the last record."""
    steps: int = 0
    tokens: int = 0
    compressions: int = 0
    """Steps that compressed something."""
    compression_grads: int = 0
    """Steps in which a compression function got a gradient."""
    loss: float = 0.0
    reconstruction_loss: float = 0.0
    grad_norm: float = 0.0
    compression_grad_norm: float = 0.0
    mem_len: int = 0
    c_mem_len: int = 0

    def add(
        self, loss: float, reconstruction_loss: float, grad_norm: float, compression_grad_norm: float
    ) -> None:
        """Add the measures of one step."""
        self.steps += 1
        self.loss += loss
        self.reconstruction_loss += reconstruction_loss
        self.grad_norm += grad_norm
        self.compression_grad_norm += compression_grad_norm
        self.compressions += reconstruction_loss > 0
        self.compression_grads += compression_grad_norm > 0

    def metrics(self, seconds: float) -> dict[str, float]:
        """The means over the steps, for a record after ``seconds`` of training."""
        metrics = {
            "loss.train": self.loss / self.steps,
            "gradient_norm": self.grad_norm / self.steps,
            "tokens_per_second": self.tokens / (seconds - self.began),
            "memory.length": self.mem_len,
            "memory.compressed_length": self.c_mem_len,
        }
        if self.compressions:
            metrics["reconstruction_loss.train"] = self.reconstruction_loss / self.compressions
        compression_steps = max(self.compressions, self.compression_grads)
        if compression_steps:
            metrics["gradient_norm.compression"] = self.compression_grad_norm / compression_steps
        return metrics


@dataclass
class TrainingState(Checked):
    """Everything that the next step depends on, except the weights and the random states."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    memory: Memory = field(default_factory=lambda: Memory(()))
    epoch: NonNegativeInt = 0
    """How many times the text has been read before."""
    position: NonNegativeInt = 0
    """Where the next segment begins, in tokens of a stream."""
    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    """Read in all streams together."""
    seconds: Annotated[float, Range(0)] = 0.0
    """Seconds of training steps, without evaluations and checkpoints."""
    evaluation_seconds: Annotated[float, Range(0)] = 0.0
    """Seconds of evaluations and of the samples that are generated with them."""
    extended_at: NonNegativeInt = 0
    """How many tokens had been read when a finished training was extended; 0 if it never was."""
    evaluations: NonNegativeInt = 0
    lowest_loss: float | None = None
    """The lowest loss of these evaluations, in nats per token."""
    evaluations_without_improvement: NonNegativeInt = 0
    records: NonNegativeInt = 0
    """Lines of the run's metrics."""
    peak_memory_bytes: NonNegativeInt = 0
    """The most memory that any process of this training has used."""
    window: MetricAccumulator = field(default_factory=MetricAccumulator)
    """The measures for the next record."""
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The losses ``[parts, 2]`` and the gradients' norms ``[2]`` of the newest steps, still on the device."""

    @property
    def progress(self) -> dict[str, float]:
        """The training's progress, for records and results."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def read_pending(self, ranks: Distributed = SINGLE_PROCESS) -> None:
        """Add the newest steps' measures, over all ``ranks``, to the window; this waits for the device.

        Raises:
            NotFiniteError: If a step diverged.
        """
        if not self.pending:
            return
        losses = torch.stack([losses for losses, _ in self.pending]).cpu().double()  # [steps, parts, 2]
        norms = torch.stack([norms for _, norms in self.pending]).cpu().double()  # [steps, 2]
        n_parts = losses.shape[1]
        means = ranks.means((losses / n_parts).sum(1))  # [steps, 2]
        measures = torch.cat([means, norms], 1).tolist()  # [steps, 4]

        first_step = self.step - len(self.pending)
        self.pending = []
        for step, values in enumerate(measures, first_step):
            check_finite(step, values)
            self.window.add(*values)
        self.window.mem_len = self.memory.mem_len
        self.window.c_mem_len = self.memory.n_slots


def check_finite(step: int, values: list[float]) -> None:
    """Raise NotFiniteError for the first of a step's measures that is NaN or infinite."""
    for name, value in zip(STEP_MEASURES, values, strict=True):
        if not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {value} in step {step:,}; training stopped. A lower learning_rate, "
                f"muon_learning_rate or max_grad_norm may help."
            )


def evaluations_due(state: TrainingState, config: TrainConfig) -> int:
    """How many evaluations are due by now, since the training began or was extended."""
    n_read = state.tokens - state.extended_at
    n_tokens = config.max_tokens - state.extended_at
    return n_read * config.evaluation.evaluations // n_tokens


def has_ended(state: TrainingState, config: TrainConfig) -> bool:
    """Whether nothing is left to train: all tokens are read, or the loss has stopped falling."""
    patience = config.evaluation.patience
    has_plateaued = 0 < patience <= state.evaluations_without_improvement
    return state.tokens >= config.max_tokens or has_plateaued
