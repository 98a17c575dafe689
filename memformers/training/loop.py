"""The training loop that all models and experiments share."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import Segment
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors
from memformers.models.memory_sizes import MemorySizes
from memformers.models.memory_update import cut
from memformers.training.config import TrainConfig
from memformers.training.distributed import ALONE, Distributed, with_precision
from memformers.training.gradients import backward, clip, forward_of
from memformers.training.optimizers import build_optimizers, learning_rate_schedule, set_learning_rates
from memformers.training.state import MetricAccumulator, StepTaken, TrainingState


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

    Raises [`NotFiniteError`][] for a step that diverged, whose gradient the optimizer does not use; the first
    ``config.skip_bad_steps`` of such steps are skipped with a warning instead. A GPU skips them by itself, so
    that no step waits for it: warning and error come with the next record, evaluation or checkpoint, and
    nothing is learned after a step with an error.
    """
    device = next(model.parameters()).device
    config = with_precision(config, device, ranks)
    forward = forward_of(model, ranks, compile=config.compile)
    state = state or TrainingState(build_optimizers(model, config))
    learning_rate = learning_rate_schedule(config)
    bad_steps, allowed = torch.tensor(state.skipped, device=device), max(state.skipped, config.skip_bad_steps)
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
        own = [segment.with_streams(lambda x: sent(ranks.own(x), device)) for segment in read]  # [S, B] each
        set_learning_rates(state.optimizers, learning_rate(state.tokens + tokens // 2))

        memory = nothing_remembered(model, own[0], config) if read[0].starts_over else state.memory
        model.zero_grad()
        outcome = backward(forward, own, memory, config, ranks, predictions=predictions)
        norms = clip(model, config.max_grad_norm)

        numbers = torch.stack([outcome.loss, outcome.auxiliary_loss, *norms, outcome.correct])
        bad = ~numbers.isfinite().all()
        bad_steps += bad
        skipped = bad | (bad_steps > allowed)  # all steps between the last bad one and its error are skipped
        for optimizer in state.optimizers:
            optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            optimizer.step()
        share = share_of_memory(state.tokens + tokens, config)
        remembered = shortened(outcome.memory, share, model.config.memory_sizes)
        # The memory after the segments of a bad step may contain NaN.
        state.memory = one_of(skipped, reset_finished_streams(memory, own), remembered)
        lengths = remembered.mem_len, remembered.c_mem_len
        state.unread.append(StepTaken(state.step, state.tokens, tokens, predictions, lengths, numbers))

        state.step, state.tokens = state.step + 1, state.tokens + tokens
        state.epoch, state.position = read[-1].epoch, read[-1].end
        recorded = state.step % config.log_every == 0 or state.tokens >= config.tokens
        evaluated = evaluations_due(state.tokens, config) > state.evaluations
        if recorded or evaluated or device.type in FREE_TO_WAIT_FOR:
            read_numbers(state, config)
        now = time.perf_counter()
        state.seconds, clock = state.seconds + now - clock, now
        if recorded:
            if state.window.steps:
                metrics = state.window.metrics(state.seconds)
                record(state, metrics | {"learning_rate": state.optimizers[0].param_groups[0]["lr"]})
            state.window = MetricAccumulator(state.seconds)


FREE_TO_WAIT_FOR = ("cpu",)
"""The devices that have computed a number when PyTorch returns it."""


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


def nothing_remembered(model: MemoryLM, segment: Segment, config: TrainConfig) -> Memory:
    """What the streams of a ``segment`` begin with. For a compiled step on documents, that is as long as a
    full memory: so all steps have the same shapes, and one compilation is enough."""
    if segment.doc_starts is None or not config.compile:
        return Memory(())
    weight = next(model.parameters())
    batch = segment.inputs.shape[1]
    return Memory.empty(model.config, batch, dtype=weight.dtype, device=weight.device)


def reset_finished_streams(memory: Memory, segments: Sequence[Segment]) -> Memory:
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


def read_numbers(state: TrainingState, config: TrainConfig) -> None:
    """Count the steps that were taken since the last call, which waits for the device: the good ones in the
    record, and the bad ones as skipped. Raises [`NotFiniteError`][] if they are too many."""
    taken, state.unread = state.unread, []
    if taken:
        for step, numbers in zip(taken, torch.stack([step.numbers for step in taken]).tolist(), strict=True):
            if problem := what_is_not_finite(*numbers[: len(NUMBERS)]):
                skip(problem, step, state, config)
            else:
                state.window.add(step, numbers)


def skip(problem: str, step: StepTaken, state: TrainingState, config: TrainConfig) -> None:
    """Count a bad ``step`` and warn, or raise [`NotFiniteError`][] if ``config`` allows no more."""
    where = f"{problem} at token {step.seen:,} (step {step.step:,})"
    if state.skipped >= config.skip_bad_steps:
        raise NotFiniteError(
            f"{where}; training stopped before learning from it. A lower learning_rate, "
            f"muon_learning_rate or max_grad_norm may help, or a larger skip_bad_steps."
        )
    state.skipped += 1
    left = f"{state.skipped} of {config.skip_bad_steps}"
    warnings.warn(f"{where}; the step is skipped ({left}).", RuntimeWarning, stacklevel=4)


STAGES = 8
"""The number of lengths that a growing memory has, one after the other; few, since each is another shape to
compile and to choose a kernel for."""


def share_of_memory(tokens: int, config: TrainConfig) -> float:
    """The fraction of a whole memory's keys that a segment may use after a training on this number of
    ``tokens``: 0 at the beginning, 1 from ``memory_growth`` of the training on."""
    grown = config.memory_growth * config.tokens
    return 1.0 if tokens >= grown else int(STAGES * tokens / grown) / STAGES


def shortened(memory: Memory, share: float, layers: Sequence[MemorySizes]) -> Memory:
    """``memory`` with the newest keys of each of ``layers`` only: at most the fraction ``share`` of as many
    as a whole memory has. Slots come after a whole memory of positions, which they are older than."""
    if share == 1.0 or not memory.mem:
        return memory

    def newest(x: Tensor, length: int) -> Tensor:
        return cut([x], max(len(x) - length, 0))

    mem, c_mem, slot_inputs = [], [], []
    for layer, own in enumerate(layers):
        keys = int(share * own.keys)
        positions = keys - keys % own.compression_rate if keys < own.mem_len else own.longest_memory
        slots = max(keys - own.mem_len, 0)
        mem.append(newest(memory.mem[layer], positions))
        c_mem += [newest(x, slots) for x in memory.c_mem[layer : layer + 1]]
        slot_inputs += [
            newest(x, slots * own.compression_rate) for x in memory.slot_inputs[layer : layer + 1]
        ]
    return Memory(tuple(mem), tuple(c_mem), memory.valid, tuple(slot_inputs))
