"""The training loop that all models and experiments share."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import Segment
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed, with_precision
from memformers.training.memory_growth import share_of_memory, shortened
from memformers.training.optimizers import build_optimizers, learning_rate_schedule
from memformers.training.state import MetricAccumulator, StepMetrics, TrainingState
from memformers.training.train_step import backward, clip, forward_of

FREE_TO_WAIT_FOR = ("cpu",)
"""The devices that have computed a number when PyTorch returns it."""


class NotFiniteError(UserError):
    """The loss or the gradient is no longer finite; the optimizer did not use it."""


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
    """Train ``model`` in place on ``config.tokens`` tokens of ``segments``; returns the state at the end.

    ``record`` gets the state and training metrics every ``config.log_every`` steps, ``evaluate`` is called
    with the state ``config.evaluations`` times, the last time at the end. With a ``state`` from an earlier
    call, the training continues from there, and ``segments`` must begin at its position. ``maybe_checkpoint``
    is called with the state whenever all its parts belong to the same step; it may save it, or stop the
    training by raising any exception. With several ``ranks``, each calls this function with the segments of
    all streams and uses only its own streams; its state has their memory.

    Raises [`NotFiniteError`][] for a step that diverged, whose gradient the optimizer does not use; the first
    ``config.skip_bad_steps`` of such steps are skipped with a warning instead. A GPU skips them by itself, so
    that no step waits for it: warning and error come with the next record, evaluation or checkpoint, and
    nothing is learned after a step with an error.
    """
    device = model.device
    config = with_precision(config, device, ranks)
    forward = forward_of(model, ranks, compile=config.step.compile)
    state = state or TrainingState(build_optimizers(model, config))
    learning_rate = learning_rate_schedule(config, config.tokens - state.begun)
    bad_steps = torch.tensor(state.skipped, device=device)
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

        began = time.perf_counter()
        read = [next(segments) for _ in range(1 + config.tbptt)]
        tokens = sum(segment.inputs.numel() for segment in read)
        predictions = sum(segment.predictions for segment in read)
        own = [segment.with_streams(lambda x: sent(ranks.own(x), device)) for segment in read]
        memory = initial_memory(model, own[0], config) if read[0].starts_over else state.memory

        model.zero_grad()
        output = backward(forward, own, memory, config, ranks, predictions=predictions)
        norms = clip(model, config.optim.max_grad_norm)
        numbers = torch.stack([output.loss, output.auxiliary_loss, *norms, output.correct])

        bad = ~numbers.isfinite().all()
        bad_steps += bad
        # All steps between the last bad one that is allowed and its error are skipped.
        skipped = bad | (bad_steps > max(state.skipped, config.checkpoint.skip_bad_steps))
        part = learning_rate(state.tokens - state.begun + tokens // 2)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = part * optimizer.defaults["lr"]
            optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            optimizer.step()

        share = 1.0 if state.begun else share_of_memory(state.tokens + tokens, config)
        remembered = shortened(output.memory, share, model.config.memory_sizes)
        # The memory after the segments of a bad step may contain NaN.
        state.memory = one_of(skipped, reset_finished_streams(memory, own), remembered)
        lengths = remembered.mem_len, remembered.c_mem_len
        state.pending.append(StepMetrics(state.step, state.tokens, tokens, predictions, lengths, numbers))
        state.step, state.tokens = state.step + 1, state.tokens + tokens
        state.epoch, state.position = read[-1].epoch, read[-1].end

        recorded = state.step % config.evaluation.log_every == 0 or state.tokens >= config.tokens
        evaluated = evaluations_due(state, config) > state.evaluations
        if recorded or evaluated or device.type in FREE_TO_WAIT_FOR:
            flush_metrics(state, config)
        state.seconds += time.perf_counter() - began
        if recorded:
            if state.window.steps:
                rate = state.optimizers[0].param_groups[0]["lr"]
                record(state, state.window.metrics(state.seconds) | {"learning_rate": rate})
            state.window = MetricAccumulator(state.seconds)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of any shape, on ``device``; a GPU copies it when it comes to it, and nobody waits."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def one_of(first: Tensor, memory: Memory, other: Memory) -> Memory:
    """``memory`` if ``first``, a boolean scalar, is true, else the ``other``. It waits for the device only
    where their shapes differ: while memory grows, where streams start over, and with segments that are no
    whole number of slots."""
    both = memory_tensors(memory), memory_tensors(other)
    shapes, others = ({name: x.shape for name, x in tensors.items()} for tensors in both)
    if first.device.type in FREE_TO_WAIT_FOR or shapes != others:
        return memory if first else other
    chosen = {name: torch.where(first, x, both[1][name]) for name, x in both[0].items()}
    return memory_from_tensors(chosen, len(memory.mem))


def initial_memory(model: MemoryLM, segment: Segment, config: TrainConfig) -> Memory:
    """What the streams of a ``segment`` begin with. For a compiled step on documents or with lengths by head,
    that is as long as a full memory: so all steps have the same shapes, and one compilation is enough."""
    one_shape = segment.doc_starts is not None or any(own.heads for own in config.model.memory_sizes)
    if not (one_shape and config.step.compile):
        return Memory(())
    dtype, batch = next(model.parameters()).dtype, segment.inputs.shape[1]
    return Memory.empty(model.config, batch, dtype=dtype, device=model.device)


def reset_finished_streams(memory: Memory, segments: Sequence[Segment]) -> Memory:
    """The part of the ``memory`` before ``segments``, ``[S, B]`` each, that the next segments may still use:
    nothing if the streams started over within them, and nothing of a stream in which a document began."""
    if any(segment.starts_over for segment in segments[1:]):
        return Memory(())
    doc_starts = [segment.doc_starts for segment in segments if segment.doc_starts is not None]
    return memory.reset(torch.cat(doc_starts).any(0)) if doc_starts else memory


def evaluations_due(state: TrainingState, config: TrainConfig) -> int:
    """The number of evaluations that are due by now, since the training began or went on."""
    return (state.tokens - state.begun) * config.evaluation.evaluations // (config.tokens - state.begun)


def has_ended(state: TrainingState, config: TrainConfig) -> bool:
    """Whether nothing is left to train: all tokens are read, or the loss has fallen no more for long."""
    return state.tokens >= config.tokens or 0 < config.evaluation.stop_after <= state.without_gain


def flush_metrics(state: TrainingState, config: TrainConfig) -> None:
    """Count the steps that were taken since the last call, which waits for the device: the good ones in the
    record, and the bad ones as skipped, with a warning. Raises [`NotFiniteError`][] if they are too many."""
    taken, state.pending = state.pending, []
    numbers = torch.stack([step.numbers for step in taken]).tolist() if taken else []
    for step, found in zip(taken, numbers, strict=True):
        if not (problem := step.problem(found)):
            state.window.add(step, found)
            continue
        where = f"{problem} at token {step.seen:,} (step {step.step:,})"
        if state.skipped >= config.checkpoint.skip_bad_steps:
            raise NotFiniteError(
                f"{where}; training stopped before learning from it. A lower learning_rate, "
                f"muon_learning_rate or max_grad_norm may help, or a larger skip_bad_steps."
            )
        state.skipped += 1
        left = f"{state.skipped} of {config.checkpoint.skip_bad_steps}"
        warnings.warn(f"{where}; the step is skipped ({left}).", RuntimeWarning, stacklevel=3)
