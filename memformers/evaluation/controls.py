"""How much each part of its memory helps a trained model, which reads parallel streams: before a segment,
slots or positions are zeroed, or swapped with those of another stream.

The loss without the part minus the loss with it: each stream, which may be a document, counts as an
independent observation, and differences are taken within streams, token by token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from memformers.common.intervals import Mean, mean_of_groups
from memformers.data.streams import Reading, streams_and_places
from memformers.evaluation.evaluate import Control, read_segments
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.sizes import MemorySizes
from memformers.models.stack import eval_mode
from memformers.runs.folder import UNTOUCHED

MAX_STREAMS = 16
"""Streams into which a plain text is cut, and documents that are read in parallel."""
PARTS = {"slots": "slots", "memory": "mem"}
"""The parts of a memory, and their fields."""
LENGTHS = {"slots": "c_mem_len", "memory": "mem_len"}
"""The lengths of the parts of a memory."""


def zeroed(part: Tensor) -> Tensor:
    """Zeros in place of a part of a memory, ``[M, B, D]``."""
    return torch.zeros_like(part)


def swapped(part: Tensor) -> Tensor:
    """A part of a memory ``[M, B, D]``, in which each stream has that of the stream before it."""
    return part.roll(1, dims=1)


def with_part(field: str, change: Callable[[Tensor], Tensor], memory: Memory) -> Memory:
    """``memory`` with a ``change`` of one part of each layer."""
    layers = []
    for layer in memory.layers:
        changed: dict[str, Any] = {field: change(getattr(layer, field))}
        layers.append(replace(layer, **changed))
    return replace(memory, layers=tuple(layers))


def controls_of(sizes: Sequence[MemorySizes]) -> dict[str, Control]:
    """Changes of a memory by name, such as "slots zeroed", for the parts that it has."""
    controls: dict[str, Control] = {}
    for name, field in PARTS.items():
        if any(getattr(size, LENGTHS[name]) for size in sizes):
            controls[f"{name} zeroed"] = partial(with_part, field, zeroed)
            controls[f"{name} swapped"] = partial(with_part, field, swapped)
    return controls


@dataclass(frozen=True)
class MemoryAblation:
    """How much memory helps some models on the same tokens; losses are in nats per token."""

    streams: int
    warm_up: int
    """How many tokens of each stream fill the memories first and don't count."""
    tokens: int
    """How many tokens count."""
    of_documents: bool
    loss: dict[str, float]
    """By model: the mean loss with its memory unmodified."""
    costs: dict[str, dict[str, Mean]]
    """By model and control: how much more the loss is with the changed memory, with an interval over
    streams."""


def memory_ablation(
    models: Mapping[str, MemoryLM],
    text: Tensor,
    *,
    tokens: int,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> MemoryAblation | None:
    """How much memory helps ``models``, by name, on about ``tokens`` tokens of ``text [n]``, or of the
    ``documents`` that it consists of, given by their numbers of tokens; None for a text too short for two
    streams. ``progress`` is called with the number of further tokens that were read."""
    # All memories are full before a token counts.
    segment_len = max(model.config.segment_len for model in models.values())
    warm_up = 0
    for model in models.values():
        n_segments = -(-model.config.remembered_positions // model.config.segment_len)
        warm_up = max(warm_up, n_segments * model.config.segment_len)
    reading = choose_streams(len(text), warm_up, segment_len, tokens, documents)
    if reading is None:
        return None
    stream, position = streams_and_places(reading.lengths)
    is_counted = position >= warm_up
    stream = stream[is_counted]

    mean_losses: dict[str, float] = {}
    costs: dict[str, dict[str, Mean]] = {}
    for name, model in models.items():
        losses = losses_under_controls(model, text, reading, warm_up, progress)
        untouched = losses.pop(UNTOUCHED)
        mean_losses[name] = untouched[is_counted].mean().item()
        costs[name] = {}
        for control, changed in losses.items():
            rise = (changed - untouched)[is_counted]
            costs[name][control] = mean_of_groups(stream.bincount(rise).tolist(), stream.bincount().tolist())
    return MemoryAblation(
        streams=len(reading.lengths),
        warm_up=warm_up,
        tokens=int(is_counted.sum()),
        of_documents=bool(documents),
        loss=mean_losses,
        costs=costs,
    )


def losses_under_controls(
    model: MemoryLM, text: Tensor, reading: Reading, warm_up: int, progress: Callable[[int], object]
) -> dict[str, Tensor]:
    """The loss of each prediction, stream after stream, in nats, float64: ``untouched``, and under each
    control, which starts after ``warm_up`` predictions."""
    reading = replace(reading, segment_len=model.config.segment_len)
    controls = controls_of(model.config.memory_sizes)
    losses: dict[str, list[Tensor]] = {name: [] for name in (UNTOUCHED, *controls)}
    with eval_mode(model):
        for segment, _, _, scores in read_segments(model, reading.segments(text), controls, warm_up):
            for name, parts in losses.items():
                parts.append(scores.get(name, scores[UNTOUCHED])[0].double())
            progress(segment.inputs.numel() * len(scores))
    return {name: reading.in_order(parts) for name, parts in losses.items()}


def choose_streams(
    n_tokens: int, warm_up: int, segment_len: int, tokens: int, documents: Sequence[int] = ()
) -> Reading | None:
    """The beginnings of at most ``MAX_STREAMS`` equal parts of a text, or of its ``documents``, of many every
    k-th. After the first ``warm_up``, at least ``segment_len`` tokens of each count, about ``tokens`` in all;
    None where fewer than two are that long. The longest two of a group are equally long, so that no stream is
    read alone."""
    # Where each part begins, and how many tokens of it can be predicted.
    shortest = warm_up + segment_len
    if documents:
        lengths = [length - 1 for length in documents]
        begins = list(accumulate(documents, initial=0))
    else:
        n_streams = max(min(MAX_STREAMS, (n_tokens - 1) // shortest), 1)
        lengths = [(n_tokens - 1) // n_streams] * n_streams
        begins = list(accumulate(lengths, initial=0))

    # Those that are long enough; of many documents, every k-th.
    chosen = [number for number, length in enumerate(lengths) if length >= shortest]
    if len(chosen) < 2:
        return None
    if documents:
        n_documents = max(tokens // segment_len, 2)
        chosen = chosen[:: -(-len(chosen) // n_documents)]
    longest = warm_up + max(tokens // len(chosen), segment_len)
    chosen.sort(key=lambda number: (-min(lengths[number], longest), number))
    if len(chosen) % MAX_STREAMS == 1:
        chosen.pop()

    # Groups of parallel streams, from long to short.
    n_read = [min(lengths[number], longest) for number in chosen]
    groups = []
    for first in range(0, len(chosen), MAX_STREAMS):
        groups.append(tuple(range(first, min(first + MAX_STREAMS, len(chosen)))))
        n_read[first] = n_read[first + 1]
    chosen_begins = tuple(begins[number] for number in chosen)
    return Reading(chosen_begins, tuple(n_read), tuple(groups), segment_len, bool(documents))
