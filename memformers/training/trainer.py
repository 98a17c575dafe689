"""The training loop that all models and tasks share: forward, loss, backward, clip, step, record, evaluate,
checkpoint, until all tokens are read."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memformers.data.streams import IGNORED, Segment
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.sizes import MemorySizes
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.optimizers import build_optimizers, learning_rate_schedule
from memformers.training.state import MetricAccumulator, TrainingState, evaluations_due, has_ended

GROWTH_STAGES = 8  # lengths of a growing memory


class Monitor:
    """What watches a training: it keeps records, evaluates the model and saves checkpoints; this one does
    nothing."""

    def record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Keep the ``metrics`` of the steps since the last record."""

    def evaluate(self, state: TrainingState) -> None:
        """Measure the model: one of the ``config.evaluation.evaluations`` is due."""

    def checkpoint(self, state: TrainingState) -> None:
        """Save a checkpoint if one is due. This is called before each step, and may end the training by an
        exception."""


class CompiledModel(nn.Module):
    """``model``, whose forward and backward pass ``torch.compile`` builds at the first step that
    ``is_active``. Before, the memory has other numbers of keys, each of which would take a compilation."""

    def __init__(self, model: MemoryLM):
        super().__init__()
        self.model = model
        self.is_active = False
        self.compiled = [torch.compile(model, fullgraph=True)]  # in a list: its parameters are the model's

    def forward(self, *arguments: Any) -> Any:
        run = self.compiled[0] if self.is_active else self.model
        return run(*arguments)


class Trainer:
    """Trains ``model`` in place on segments, until ``config.max_tokens`` tokens are read or the held-out loss
    has stopped falling.

    Args:
        model: The model, on the device to train on.
        segments: The text, ``[S, B]`` for each step, in the streams of all ``ranks``; it must begin at the
            position of ``state``.
        config: How to train, with any precision but auto.
        monitor: What watches the training; by default nothing.
        state: Where the training is; by default at its start.
        ranks: The processes that train together.
    """

    def __init__(
        self,
        model: MemoryLM,
        segments: Iterator[Segment],
        config: TrainConfig,
        monitor: Monitor | None = None,
        state: TrainingState | None = None,
        ranks: Distributed = SINGLE_PROCESS,
    ):
        assert config.step.precision != "auto"  # the job has decided
        self.model = model
        self.device = next(model.parameters()).device
        self.segments = segments
        self.config = config
        self.monitor = monitor or Monitor()
        self.state = state or TrainingState(build_optimizers(model, config))
        self.ranks = ranks
        self.forward: Any = model
        self.compiled: CompiledModel | None = None
        if config.step.compile:
            self.compiled = CompiledModel(model)
            self.forward = self.compiled
            # Under autocast, a region's gradients mix dtypes: aot_eager refuses them, and inductor rounds the
            # outputs of layers otherwise than eager does.
            is_single_dtype = config.step.precision == "float32"
            has_sinusoids = model.config.positions == "sinusoidal"
            model.transformer.compiles_layers_as_one = is_single_dtype and has_sinusoids
        if ranks.parallel == "ddp":
            # A compression function has no gradient in a segment that compresses nothing, and a custom
            # memory's parameters may have none while the memory is empty.
            may_be_idle = bool(model.transformer.compressions) or ":" in config.model.model
            self.forward = DistributedDataParallel(self.forward, find_unused_parameters=may_be_idle)
        # With bfloat16, matrix products are rounded; weights, memory and losses stay in float32.
        is_rounded = config.step.precision == "bfloat16"
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=is_rounded)
        # An extended training has its own schedule, over the remaining tokens.
        self.learning_rate = learning_rate_schedule(config, config.max_tokens - self.state.extended_at)

    def fit(self) -> TrainingState:
        """Train to the end; returns the state there.

        Raises:
            NotFiniteError: At the first record, evaluation or checkpoint after a step that diverged.
        """
        state = self.state
        self.model.train()
        while True:
            # Between steps
            if evaluations_due(state, self.config) > state.evaluations:
                self.evaluate()
            self.monitor.checkpoint(state)
            if has_ended(state, self.config):
                return state

            # A step
            began = time.perf_counter()
            segment = next(self.segments)
            self.set_learning_rates(segment)
            self.step(segment)

            # Its measures. Reading them waits for the device, so this happens only when they are needed
            is_last = state.tokens >= self.config.max_tokens
            is_record_due = is_last or state.step % self.config.evaluation.log_every == 0
            if is_record_due or evaluations_due(state, self.config) > state.evaluations:
                state.read_pending(self.ranks)
            state.seconds += time.perf_counter() - began
            if is_record_due:
                self.record()

    def step(self, segment: Segment) -> None:
        """Learn from a segment, in ``gradient_accumulation_steps`` parts of its streams, one after the other.

        All predictions have the same weight in the loss, and all parts the same in the auxiliary loss.
        """
        config = self.config
        n_parts = config.step.gradient_accumulation_steps
        n_predicted = (segment.targets != IGNORED).sum().item()  # by all ranks
        predicted_per_part = n_predicted / (self.ranks.size * n_parts)
        part_of_rank = self.ranks.shard(segment).to(self.device)  # [S, B]
        memories = self.memory_parts(part_of_rank, n_parts)
        if self.compiled is not None:
            self.compiled.is_active = self.has_final_shapes(segment)

        # Forward and backward
        self.model.zero_grad()
        losses = []
        for i, part in enumerate(part_of_rank.chunk(n_parts)):
            is_last = i == n_parts - 1
            with self.gradient_sync(is_last):
                with self.autocast:
                    output = self.forward(part.inputs, memories[i], part.targets, part.doc_starts)
                share = part.targets.ne(IGNORED).sum().to(output.scores.loss.dtype) / predicted_per_part
                # The mean over no targets is NaN.
                loss = torch.where(share > 0, output.scores.loss * share, 0.0)
                ((loss + output.auxiliary_loss) / n_parts).backward()
            losses.append(torch.stack([loss.detach(), output.auxiliary_loss.detach().to(loss)]))
            memories[i] = output.memory

        # Clip, and step
        norms = clip_gradients(self.model, config.optim.max_grad_norm)
        for optimizer in self.state.optimizers:
            optimizer.step()

        # Count, and remember
        self.state.pending.append((torch.stack(losses), norms))
        self.count(segment)
        memory = memories[0] if n_parts == 1 else Memory.join(memories)
        self.state.memory = self.truncate_while_growing(memory)

    def has_final_shapes(self, segment: Segment) -> bool:
        """Whether memory has reached its final number of keys."""
        if segment.doc_starts is not None:
            return True  # as memory_parts sees to
        # What each stream has read since memory was empty, and since it has its full length
        n_read = segment.end - len(segment.inputs)
        n_full = (self.state.tokens - self.growing_tokens) / self.config.batch_size
        return min(n_read, n_full) >= max(size.positions for size in self.model.config.memory_sizes)

    def memory_parts(self, segment: Segment, n_parts: int) -> list[Memory]:
        """The memory that each part of ``segment`` is read with."""
        memory = self.state.memory
        if segment.starts_over:
            memory = Memory(())
            if segment.doc_starts is not None and self.config.step.compile:
                # Zeros that no query sees, so that all steps have the same shapes: one compilation is enough.
                dtype = next(self.model.parameters()).dtype
                n_streams = segment.inputs.shape[1]
                memory = Memory.empty(self.model.config, n_streams, dtype=dtype, device=self.device)
        if n_parts == 1:
            return [memory]
        size = segment.inputs.shape[1] // n_parts
        return [memory.streams(slice(i * size, (i + 1) * size)) for i in range(n_parts)]

    def gradient_sync(self, is_last_part: bool) -> AbstractContextManager[object]:
        """Ranks exchange gradients only after the last part of a step."""
        if is_last_part or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()

    def count(self, segment: Segment) -> None:
        n_tokens = segment.inputs.numel()  # of all ranks
        self.state.window.tokens += n_tokens
        self.state.step += 1
        self.state.tokens += n_tokens
        self.state.epoch = segment.epoch
        self.state.position = segment.end

    @property
    def growing_tokens(self) -> float:
        """The tokens over which memory grows; that of an extended training has grown already."""
        return 0.0 if self.state.extended_at else self.config.memory_growth * self.config.max_tokens

    def truncate_while_growing(self, memory: Memory) -> Memory:
        """``memory``, cut to its stage while it grows."""
        if self.state.tokens >= self.growing_tokens:
            return memory
        stage = int(GROWTH_STAGES * self.state.tokens / self.growing_tokens)
        return truncate_to_stage(memory, stage / GROWTH_STAGES, self.model.config.memory_sizes)

    def set_learning_rates(self, segment: Segment) -> None:
        """Set each optimizer's rate to its peak times the schedule, at the middle of the step's tokens."""
        middle = self.state.tokens - self.state.extended_at + segment.inputs.numel() // 2
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate(middle) * optimizer.defaults["lr"]

    def evaluate(self) -> None:
        began = time.perf_counter()
        self.monitor.evaluate(self.state)
        self.state.evaluations = evaluations_due(self.state, self.config)
        self.state.evaluation_seconds += time.perf_counter() - began

    def record(self) -> None:
        rate = self.state.optimizers[0].param_groups[0]["lr"]
        metrics = self.state.window.metrics(self.state.seconds)
        self.monitor.record(self.state, metrics | {"learning_rate": rate})
        self.state.window = MetricAccumulator(self.state.seconds)


def clip_gradients(model: MemoryLM, max_norm: float) -> Tensor:
    """Scale the gradients of the compression functions, which learn from another loss, and of all other
    parameters, each down to ``max_norm``. Returns their norms ``[2]`` before, the compressions' last."""
    compressing: dict[nn.Parameter, None] = {}  # an ordered set
    for f_c in model.transformer.compressions:
        compressing.update(dict.fromkeys(f_c.parameters()))
    remaining = [p for p in model.parameters() if p not in compressing]
    norm = nn.utils.clip_grad_norm_(remaining, max_norm)
    compression_norm = torch.zeros_like(norm)
    if any(p.grad is not None for p in compressing):
        compression_norm = nn.utils.clip_grad_norm_(compressing, max_norm)
    return torch.stack([norm, compression_norm])


def truncate_to_stage(memory: Memory, share: float, sizes: Sequence[MemorySizes]) -> Memory:
    """``memory`` with only the newest ``share`` of the keys that the ``sizes`` of each layer allow: first
    positions, in groups that leave together, then slots, which are older."""
    if not memory.layers:  # nothing has been read yet
        return memory
    layers = []
    for size, layer in zip(sizes, memory.layers, strict=True):
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


def newest(tensor: Tensor, length: int) -> Tensor:
    """The last ``length`` of ``tensor [·, B, D]``, as a copy, so that the rest can be freed."""
    if length >= len(tensor):
        return tensor
    return tensor[len(tensor) - length :].clone()
