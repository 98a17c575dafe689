"""The training loop that all models and experiments share."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from memformers.common.errors import UserError
from memformers.data.streams import Segment
from memformers.models.language_model import MemoryLM
from memformers.models.lengths import LayerLengths
from memformers.models.memory import Memory
from memformers.models.remembering import newest
from memformers.training.config import TrainConfig
from memformers.training.distributed import ALONE, Distributed, with_precision
from memformers.training.gradients import backward, clip, forward_of
from memformers.training.optimizers import build_optimizers, learning_rate_schedule, set_learning_rates
from memformers.training.state import MetricAccumulator, TrainingState


class NotFiniteError(UserError):
    """The loss or the gradient is no longer finite; the optimizer did not use it."""


def train(
    model: MemoryLM,
    segments: Iterator[Segment],
    config: TrainConfig,
    *,
    record: Callable[[TrainingState, dict[str, float]], None],
    evaluate: Callable[[TrainingState], None],
    state: TrainingState | None = None,
    maybe_checkpoint: Callable[[TrainingState], None] = lambda state: None,
    ranks: Distributed = ALONE,
) -> TrainingState:
    """Train ``model`` in place on ``config.tokens`` tokens of ``segments``; returns the state at the end.

    ``record`` gets the state and training metrics every ``config.log_every`` steps, ``evaluate`` is called
    with the state ``config.evaluations`` times, the last time at the end. With a ``state`` from an earlier
    call, the training continues from there, and ``segments`` must begin at its position. ``maybe_checkpoint``
    is called with the state whenever all its parts belong to the same step; it may save it, or stop the
    training by raising any exception. With several ``ranks``, each calls this function with the segments of
    all streams and uses only its own streams; its state has their memory.

    Raises [`NotFiniteError`][] at a step that diverged, before the optimizer uses its gradient; the first
    ``config.skip_bad_steps`` of such steps are skipped with a warning instead.
    """
    device = next(model.parameters()).device
    config = with_precision(config, device, ranks)
    forward = forward_of(model, ranks, compile=config.compile)
    state = state or TrainingState(build_optimizers(model, config))
    learning_rate = learning_rate_schedule(config)
    model.train()
    clock = time.perf_counter()
    while True:
        pause = time.perf_counter()
        if evaluations_due(state.tokens, config) > state.evaluations:
            evaluate(state)
            state.evaluations = evaluations_due(state.tokens, config)
            state.evaluation_seconds += time.perf_counter() - pause
        maybe_checkpoint(state)
        clock += time.perf_counter() - pause
        if state.tokens >= config.tokens:
            return state

        read = [next(segments) for _ in range(1 + config.tbptt)]
        tokens = sum(segment.inputs.numel() for segment in read)
        predictions = sum(segment.predictions for segment in read)
        own = [segment.with_streams(lambda x: ranks.own(x).to(device)) for segment in read]  # [S, B] each
        set_learning_rates(state.optimizers, learning_rate(state.tokens + tokens // 2))

        memory = nothing_remembered(model, own[0], config) if read[0].starts_over else state.memory
        model.zero_grad()
        outcome = backward(forward, own, memory, config, ranks, predictions=predictions)
        norms = clip(model, config.max_grad_norm)

        if problem := what_is_not_finite(outcome.loss, outcome.auxiliary_loss, *norms):
            skip(problem, state, config)
            # The memory after these segments may contain NaN.
            state.memory = without_what_has_ended(memory, own)
        else:
            for optimizer in state.optimizers:
                optimizer.step()
            share = share_of_memory(state.tokens + tokens, config)
            state.memory = shortened(outcome.memory, share, model.config.layer_lengths)
            state.window.add(replace(outcome, memory=state.memory), tokens, predictions, *norms)

        state.step, state.tokens = state.step + 1, state.tokens + tokens
        state.epoch, state.position = read[-1].epoch, read[-1].end
        now = time.perf_counter()
        state.seconds, clock = state.seconds + now - clock, now
        if state.step % config.log_every == 0 or state.tokens >= config.tokens:
            if state.window.steps:
                metrics = state.window.metrics(state.seconds)
                record(state, metrics | {"learning_rate": state.optimizers[0].param_groups[0]["lr"]})
            state.window = MetricAccumulator(state.seconds)


def nothing_remembered(model: MemoryLM, segment: Segment, config: TrainConfig) -> Memory:
    """What the streams of a ``segment`` begin with. For a compiled step on documents, that is as long as a
    full memory: so all steps have the same shapes, and one compilation is enough."""
    if segment.doc_starts is None or not config.compile:
        return Memory(())
    weight = next(model.parameters())
    batch = segment.inputs.shape[1]
    return Memory.empty(model.config, batch, dtype=weight.dtype, device=weight.device)


def without_what_has_ended(memory: Memory, segments: Sequence[Segment]) -> Memory:
    """The part of the ``memory`` before ``segments``, ``[S, B]`` each, that the next segments may still use:
    nothing if the streams started over within them, and nothing of a stream in which a document began."""
    if any(segment.starts_over for segment in segments[1:]):
        return Memory(())
    doc_starts = [segment.doc_starts for segment in segments if segment.doc_starts is not None]
    return memory.reset(torch.cat(doc_starts).any(0)) if doc_starts else memory


def evaluations_due(tokens: int, config: TrainConfig) -> int:
    """The number of evaluations that are due after this number of ``tokens``."""
    return tokens * config.evaluations // config.tokens


NUMBERS = (
    "the loss",
    "the reconstruction loss",
    "the gradient's norm",
    "the norm of the compression functions' gradient",
)


def what_is_not_finite(*numbers: float) -> str:
    """The first of the ``NUMBERS`` of a step that is not finite, in words; empty if all are finite."""
    named = zip(NUMBERS, numbers, strict=True)
    return next((f"{name} is {value}" for name, value in named if not math.isfinite(value)), "")


def skip(problem: str, state: TrainingState, config: TrainConfig) -> None:
    """Count a bad step and warn, or raise [`NotFiniteError`][] if ``config`` allows no more."""
    where = f"{problem} at token {state.tokens:,} (step {state.step:,})"
    if state.skipped == config.skip_bad_steps:
        raise NotFiniteError(
            f"{where}; training stopped before learning from it. A lower learning_rate, "
            f"muon_learning_rate or max_grad_norm may help, or a larger skip_bad_steps."
        )
    state.skipped += 1
    left = f"{state.skipped} of {config.skip_bad_steps}"
    warnings.warn(f"{where}; the step is skipped ({left}).", RuntimeWarning, stacklevel=3)


STAGES = 8
"""The number of lengths that a growing memory has, one after the other; few, since each is another shape to
compile and to choose a kernel for."""


def share_of_memory(tokens: int, config: TrainConfig) -> float:
    """The fraction of a whole memory's keys that a segment may use after a training on this number of
    ``tokens``: 0 at the beginning, 1 from ``memory_growth`` of the training on."""
    grown = config.memory_growth * config.tokens
    return 1.0 if tokens >= grown else int(STAGES * tokens / grown) / STAGES


def shortened(memory: Memory, share: float, layers: Sequence[LayerLengths]) -> Memory:
    """``memory`` with the newest keys of each of ``layers`` only: at most the fraction ``share`` of as many
    as a whole memory has. Slots come after a whole memory of positions, which they are older than."""
    if share == 1.0 or not memory.mem:
        return memory
    mem, c_mem, slot_inputs = [], [], []
    for layer, own in enumerate(layers):
        keys = int(share * own.keys)
        positions = keys - keys % own.compression_rate if keys < own.mem_len else own.longest_memory
        slots = max(keys - own.mem_len, 0)
        mem.append(newest([memory.mem[layer]], positions))
        c_mem += [newest([x], slots) for x in memory.c_mem[layer : layer + 1]]
        slot_inputs += [
            newest([x], slots * own.compression_rate) for x in memory.slot_inputs[layer : layer + 1]
        ]
    return Memory(tuple(mem), tuple(c_mem), memory.valid, tuple(slot_inputs))
