"""The training loop that all models and experiments share: a step, and what happens between steps."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memformers.common.fields import Checked, NonNegativeInt, Range
from memformers.common.text import UserError
from memformers.data.streams import IGNORED, Segment
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.sizes import MemorySizes
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed, with_precision
from memformers.training.optimizers import build_optimizers, learning_rate_schedule

# Of a step, which must be finite.
NUMBERS = ("the loss", "the reconstruction loss", "the gradient's norm", "the compressions' gradient's norm")
STAGES = 8  # lengths of a growing memory; few, since each is another shape to compile


class NotFiniteError(UserError):
    """The loss or the gradient is no longer finite."""


@dataclass
class Window:
    """Sums over the steps since the last record, which was made after ``began`` seconds."""

    began: float = 0.0
    steps: int = 0
    tokens: int = 0
    compressions: int = 0
    compression_grads: int = 0
    loss: float = 0.0
    reconstruction_loss: float = 0.0
    grad_norm: float = 0.0
    compression_grad_norm: float = 0.0
    mem_len: int = 0
    c_mem_len: int = 0

    def metrics(self, seconds: float) -> dict[str, float]:
        metrics = {
            "loss.train": self.loss / self.steps,
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
    memory: Memory = field(default_factory=lambda: Memory(()))
    epoch: NonNegativeInt = 0
    """How many times the text has been read before."""
    position: NonNegativeInt = 0
    """Where the next segment begins, in tokens of a stream."""
    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    """Read in all streams together."""
    seconds: Annotated[float, Range(0)] = 0.0
    """Of training steps, without evaluations and checkpoints."""
    evaluation_seconds: Annotated[float, Range(0)] = 0.0
    """Of evaluations and of the samples that are generated with them."""
    extended_at: NonNegativeInt = 0
    """How many tokens had been read when a finished training was extended; 0 if it never was."""
    evaluations: NonNegativeInt = 0
    lowest_loss: float | None = None
    """Of these evaluations, in nats per token."""
    evaluations_without_improvement: NonNegativeInt = 0
    records: NonNegativeInt = 0
    peak_memory_bytes: NonNegativeInt = 0
    """Of any process that has trained this."""
    window: Window = field(default_factory=Window)
    unread: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The losses ``[parts, 2]`` and the gradients' norms ``[2]`` of the newest steps, still on the device."""

    @property
    def progress(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("step", "tokens", "seconds", "evaluation_seconds")}

    def read_losses(self, ranks: Distributed = SINGLE_PROCESS) -> None:
        """Add the newest steps' losses, over all ``ranks``, to the window; this waits for the device."""
        if not self.unread:
            return
        of_parts, norms = (torch.stack(column).cpu().double() for column in zip(*self.unread, strict=True))
        means = ranks.means((of_parts / of_parts.shape[1]).sum(1))  # [steps, 2]
        first, self.unread, window = self.step - len(self.unread), [], self.window
        for step, numbers in enumerate(torch.cat([means, norms], 1).tolist(), first):
            for name, number in zip(NUMBERS, numbers, strict=True):
                if not math.isfinite(number):
                    raise NotFiniteError(
                        f"{name} is {number} in step {step:,}; training stopped. A lower learning_rate, "
                        f"muon_learning_rate or max_grad_norm may help."
                    )
            loss, reconstruction_loss, norm, compression_norm = numbers
            window.steps += 1
            window.loss += loss
            window.reconstruction_loss += reconstruction_loss
            window.grad_norm += norm
            window.compression_grad_norm += compression_norm
            window.compressions += reconstruction_loss > 0
            window.compression_grads += compression_norm > 0
        window.mem_len = self.memory.mem_len
        window.c_mem_len = self.memory.n_slots


def train_steps(
    model: MemoryLM,
    segments: Iterator[Segment],
    config: TrainConfig,
    *,
    record: Callable[[TrainingState, dict[str, float]], None],
    evaluate: Callable[[TrainingState], None],
    state: TrainingState | None = None,
    maybe_checkpoint: Callable[[TrainingState], None] = lambda state: None,
    ranks: Distributed = SINGLE_PROCESS,
) -> TrainingState:
    """Train ``model`` in place on ``config.max_tokens`` tokens of ``segments``; returns the state at the end.

    ``maybe_checkpoint`` is called before each step and may end the training by an exception. ``segments``, of
    the streams of all ``ranks``, must begin at the position of ``state``. Raises [`NotFiniteError`][] at the
    first record, evaluation or checkpoint after a step that diverged.
    """
    config = with_precision(config, model.device, ranks)
    state = state or TrainingState(build_optimizers(model, config))
    forward: Any = torch.compile(model, fullgraph=True) if config.step.compile else model
    if ranks.parallel == "ddp":
        # A compression function has no gradient in a segment that compresses nothing, and a custom memory's
        # parameters may have none while the memory is empty.
        idle = bool(model.transformer.compressions) or ":" in model.config.model
        forward = DistributedDataParallel(forward, find_unused_parameters=idle)
    learning_rate = learning_rate_schedule(config, config.max_tokens - state.extended_at)
    model.train()
    while True:
        if evaluations_due(state, config) > state.evaluations:
            began = time.perf_counter()
            evaluate(state)
            state.evaluations = evaluations_due(state, config)
            state.evaluation_seconds += time.perf_counter() - began
        maybe_checkpoint(state)
        if has_ended(state, config):
            return state

        began, segment = time.perf_counter(), next(segments)
        middle = state.tokens - state.extended_at + segment.inputs.numel() // 2
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(middle) * optimizer.defaults["lr"]
        train_step(model, forward, segment, state, config, ranks)
        is_due = state.step % config.evaluation.log_every == 0 or state.tokens >= config.max_tokens
        if is_due or evaluations_due(state, config) > state.evaluations:
            state.read_losses(ranks)
        state.seconds += time.perf_counter() - began
        if is_due:
            rate = state.optimizers[0].param_groups[0]["lr"]
            record(state, state.window.metrics(state.seconds) | {"learning_rate": rate})
            state.window = Window(state.seconds)


def train_step(
    model: MemoryLM,
    forward: Callable[..., Any],
    segment: Segment,
    state: TrainingState,
    config: TrainConfig,
    ranks: Distributed = SINGLE_PROCESS,
) -> None:
    """Learn from this rank's part of a ``segment``, in ``gradient_accumulation_steps`` parts, one after the
    other. All predictions have the same weight in the loss, and all parts the same in the auxiliary loss."""
    device, parts = next(model.parameters()).device, config.step.gradient_accumulation_steps
    tensors = [x for x in (segment.inputs, segment.targets, segment.doc_starts) if x is not None]
    if ranks.size > 1:
        tensors = [ranks.local_streams(x) for x in tensors]
    if device.type == "cuda":  # nobody waits for this copy
        tensors = [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    pieces = zip(*(x.to(device).chunk(parts, dim=1) for x in tensors), strict=True)
    memory, batch = Memory(()) if segment.starts_over else state.memory, tensors[0].shape[1]
    if segment.starts_over and segment.doc_starts is not None and config.step.compile:
        # Zeros that no query sees, so that all steps have the same shapes: one compilation is enough.
        dtype = next(model.parameters()).dtype
        memory = Memory.empty(model.config, batch, dtype=dtype, device=device)
    memories, size = [memory], batch // parts
    if parts > 1:
        memories = [memory.streams(slice(i * size, (i + 1) * size)) for i in range(parts)]
    predictions = (segment.targets != IGNORED).sum().item() / (ranks.size * parts)  # in each part, on average
    losses = []
    model.zero_grad()
    for i, (inputs, targets, *doc_starts) in enumerate(pieces):
        with nullcontext() if i == parts - 1 else getattr(forward, "no_sync", nullcontext)():
            with torch.autocast(device.type, torch.bfloat16, enabled=config.step.precision == "bfloat16"):
                output = forward(inputs, memories[i], targets, *doc_starts)
            share = targets.ne(IGNORED).sum().to(output.scores.loss.dtype) / predictions
            loss = torch.where(share > 0, output.scores.loss * share, 0.0)  # the mean over no targets is NaN
            ((loss + output.auxiliary_loss) / parts).backward()
        losses.append(torch.stack([loss.detach(), output.auxiliary_loss.detach().to(loss)]))
        memories[i] = output.memory
    norms = clip(model, config.optim.max_grad_norm)
    for optimizer in state.optimizers:
        optimizer.step()

    state.unread.append((torch.stack(losses), norms))
    state.window.tokens += segment.inputs.numel()
    state.step, state.tokens = state.step + 1, state.tokens + segment.inputs.numel()
    state.epoch, state.position = segment.epoch, segment.end
    state.memory = memories[0] if parts == 1 else Memory.join(memories)
    grown = 0.0 if state.extended_at else config.memory_growth * config.max_tokens
    if state.tokens < grown:
        stage = int(STAGES * state.tokens / grown)
        state.memory = shortened(state.memory, stage / STAGES, model.config.memory_sizes)


def clip(model: MemoryLM, max_norm: float) -> Tensor:
    """Scale the gradients of the compression functions, which learn from another loss, and of all other
    parameters, each down to ``max_norm``. Returns their norms ``[2]`` before, the compressions' last."""
    f_c = dict.fromkeys(p for compress in model.transformer.compressions for p in compress.parameters())
    others = [p for p in model.parameters() if p not in f_c]
    norm = nn.utils.clip_grad_norm_(others, max_norm)
    learned = any(p.grad is not None for p in f_c)
    return torch.stack([norm, nn.utils.clip_grad_norm_(f_c, max_norm) if learned else torch.zeros_like(norm)])


def shortened(memory: Memory, share: float, sizes: Sequence[MemorySizes]) -> Memory:
    """``memory`` with only the newest ``share`` of the keys that the ``sizes`` of each layer allow: first
    positions, in groups that leave together, then slots, which are older."""

    def newest(tensor: Tensor, length: int) -> Tensor:
        return tensor if length >= len(tensor) else tensor[len(tensor) - length :].clone()

    layers = []
    for size, layer in zip(sizes, memory.layers, strict=bool(memory.layers)):
        n_keys = int(share * size.keys)
        mem = layer.mem
        if n_keys < size.mem_len:  # else those that wait for a whole slot are kept too
            mem = newest(mem, n_keys - n_keys % size.group)
        n_slots = max(n_keys - size.mem_len, 0)
        slots = newest(layer.slots, n_slots)
        bptt_inputs = None
        if layer.bptt_inputs is not None:
            bptt_inputs = newest(layer.bptt_inputs, n_slots * size.compression_rate)
        layers.append(replace(layer, mem=mem, slots=slots, bptt_inputs=bptt_inputs))
    return replace(memory, layers=tuple(layers))


def evaluations_due(state: TrainingState, config: TrainConfig) -> int:
    """How many evaluations are due by now, since the training began or was extended."""
    done, whole = state.tokens - state.extended_at, config.max_tokens - state.extended_at
    return done * config.evaluation.evaluations // whole


def has_ended(state: TrainingState, config: TrainConfig) -> bool:
    """Whether nothing is left to train: all tokens are read, or the loss has stopped falling."""
    patience = config.evaluation.patience
    return state.tokens >= config.max_tokens or 0 < patience <= state.evaluations_without_improvement
