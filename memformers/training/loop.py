"""The one training loop: every model, every experiment."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from labml_helpers.schedule import RelativePiecewise
from torch import Tensor, nn

from memformers.data.streams import Segment
from memformers.language_model import LMOutput, MemoryLM
from memformers.memory import Memory
from memformers.training.config import TrainConfig


class NotFiniteError(ValueError):
    """The loss or the gradient is not a finite number any more; nothing was learned from it."""


@dataclass(frozen=True)
class Progress:
    """How far a training has come."""

    step: int
    tokens: int
    seconds: float
    """Of training alone: evaluations and checkpoints don't count."""


Record = Callable[[Progress, dict[str, float]], None]


def train(
    model: MemoryLM,
    segments: Iterator[Segment],
    config: TrainConfig,
    *,
    record: Record,
    evaluate: Callable[[Progress], None],
) -> Progress:
    """Train ``model`` in place on ``config.tokens`` tokens of ``segments``; returns how far it came.

    ``record`` gets training metrics every ``config.log_every`` steps, ``evaluate`` is called
    ``config.evaluations`` times, the last time at the end. Raises :class:`NotFiniteError` at a step
    that diverged, before the optimizer learns from it.
    """
    device = next(model.parameters()).device
    forward = torch.compile(model, fullgraph=True) if config.compile else model
    optimizer = build_optimizer(model, config)
    learning_rate = learning_rate_schedule(config)
    memory, step, tokens, seconds, evaluations = Memory(()), 0, 0, 0.0, 0
    window = Window(seconds)
    model.train()
    clock = time.perf_counter()
    while tokens < config.tokens:
        segment = next(segments)
        inputs, targets = segment.inputs.to(device), segment.targets.to(device)  # [S, B]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(tokens + inputs.numel() // 2)

        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            output: LMOutput = forward(inputs, Memory(()) if segment.starts_over else memory)
            loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + output.auxiliary_loss).backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        check_finite(loss, output.auxiliary_loss, grad_norm, step, tokens)
        optimizer.step()
        memory = output.memory

        step, tokens = step + 1, tokens + inputs.numel()
        window.add(loss, output, targets, grad_norm)
        now = time.perf_counter()
        seconds, clock = seconds + now - clock, now
        if step % config.log_every == 0 or tokens >= config.tokens:
            metrics = window.metrics(seconds) | {"learning_rate": optimizer.param_groups[0]["lr"]}
            record(Progress(step, tokens, seconds), metrics)
            window = Window(seconds)
        if tokens * config.evaluations >= (evaluations + 1) * config.tokens:
            evaluations = tokens * config.evaluations // config.tokens
            evaluate(Progress(step, tokens, seconds))
            clock = time.perf_counter()
    return Progress(step, tokens, seconds)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only the matrices of linear maps and convolutions decay, since nothing pulls an
    embedding, a bias, a norm or a position towards zero by right."""
    maps = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d))
    decaying = {id(m.weight): m.weight for m in maps}
    others = [p for p in model.parameters() if id(p) not in decaying]
    return torch.optim.AdamW(
        [
            {"params": list(decaying.values()), "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.99),
        fused=True,
    )


def learning_rate_schedule(config: TrainConfig) -> Callable[[int], float]:
    """The learning rate at a number of tokens: up from 0, then down to 0, both in straight lines."""
    shape = [(0.0, 0.0), (config.warmup, 1.0), (1.0, 0.0)]
    factor = RelativePiecewise(shape if config.warmup else shape[1:], config.tokens)
    return lambda tokens: config.learning_rate * factor(tokens)


def check_finite(loss: Tensor, auxiliary_loss: Tensor, grad_norm: Tensor, step: int, tokens: int) -> None:
    """Raise :class:`NotFiniteError` that says what is not finite, and where."""
    for name, value in (
        ("the loss", loss),
        ("the reconstruction loss", auxiliary_loss),
        ("the gradient's norm", grad_norm),
    ):
        if not math.isfinite(value.item()):
            raise NotFiniteError(
                f"{name} is {value.item()} at token {tokens:,} (step {step:,}); training stopped "
                f"before learning from it. A lower learning_rate or max_grad_norm may help."
            )


class Window:
    """Sums over the steps since the last training record, ``began`` seconds into the training."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.steps = self.tokens = self.correct = self.compressions = 0
        self.loss = self.reconstruction_loss = self.grad_norm = 0.0
        self.memory = Memory(())

    def add(self, loss: Tensor, output: LMOutput, targets: Tensor, grad_norm: Tensor) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += targets.numel()
        self.correct += int((output.logits.detach().argmax(-1) == targets).sum())
        self.loss += loss.item()
        self.grad_norm += grad_norm.item()
        self.compressions += bool(output.auxiliary_loss > 0)
        self.reconstruction_loss += output.auxiliary_loss.item()
        self.memory = output.memory

    def metrics(self, seconds: float) -> dict[str, float]:
        """The means over the window, which ends so many seconds into the training."""
        metrics = {
            "loss.train": self.loss / self.steps,
            "accuracy.train": self.correct / self.tokens,
            "gradient_norm": self.grad_norm / self.steps,
            "tokens_per_second": self.tokens / (seconds - self.began),
            "memory.length": self.memory.mem_len,
            "memory.compressed_length": self.memory.c_mem_len,
        }
        if self.compressions:
            metrics["reconstruction_loss.train"] = self.reconstruction_loss / self.compressions
        return metrics
