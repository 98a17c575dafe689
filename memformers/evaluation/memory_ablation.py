"""How much each part of its memory helps a trained model: the loss without the part minus the loss with it.

The held-out text is read in parallel streams, and the memory is carried along; of documents, each is a stream
of its own. Before a segment, the memory is changed: its slots or its positions are zeroed, or swapped with
those of another stream. Each stream counts as an independent observation, and differences are taken within
streams, token by token.
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
from memformers.evaluation.attention_distribution import filling_segments
from memformers.evaluation.evaluate import BASELINE, Control, read_segments
from memformers.evaluation.frequency_buckets import rarity_groups, repeat_distances, repeat_groups
from memformers.models.base import eval_mode
from memformers.models.config import MemorySizes
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory

AT_ONCE = 16
"""Streams of a text that is long enough, and documents that are read at once."""
N_GRAM = 8
"""Tokens, the last of them the one that is predicted, that must have occurred before for it to repeat."""
PARTS = {"slots": "c_mem", "memory": "mem"}
"""The parts of a memory, and their fields."""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like,
    "swapped": lambda x: x.roll(1, dims=1),
}


def controls_of(lengths: Sequence[MemorySizes]) -> dict[str, Control]:
    """The changes of a memory of these lengths, by name: its slots or its positions, ``[C, B, D]`` or
    ``[M, B, D]`` a layer, are zeroed, or swapped, so that each stream has those of the stream before it."""

    def changed(part: str, change: Callable[[Tensor], Tensor], memory: Memory) -> Memory:
        new: dict[str, Any] = {part: tuple(map(change, getattr(memory, part)))}
        return replace(memory, **new)

    return {
        f"{name} {how}": partial(changed, part, change)
        for name, part in PARTS.items()
        if any(getattr(own, f"{part}_len") for own in lengths)
        for how, change in CHANGES.items()
    }


@dataclass(frozen=True)
class TokenGroup:
    """Some of the tokens, and how well models predict them; a group without tokens has no losses."""

    name: str
    tokens: int
    loss: dict[str, float]
    """By model: the mean with the unchanged memory, in nats per token."""
    less_baseline: dict[str, Mean]
    """By model, without the baseline: its loss minus the baseline's, with an interval over streams."""
    less_untouched: dict[str, dict[str, Mean]]
    """By model and control: the loss with the changed memory minus that with the unchanged memory."""


@dataclass(frozen=True)
class MemoryAblation:
    """How much memory helps some models on the same tokens."""

    streams: int
    warm_up: int
    """The number of tokens at the beginning of each stream that fill the memories and don't count."""
    n_gram: int
    """How many tokens, including the predicted one, make a repetition."""
    baseline: str | None
    """The model with the shortest reach, with which the others are compared; None for a single model."""
    overall: TokenGroup
    swapped_less_zeroed: dict[str, dict[str, Mean]]
    """By model and part of the memory, over all tokens: the loss with the part swapped minus that with it
    zeroed."""
    by_occurrences: list[TokenGroup]
    """By the number of occurrences of a token's word in the training text."""
    by_repeat_distance: list[TokenGroup]
    """By the distance, in tokens, to the last occurrence that a token repeats."""
    of_documents: bool
    """Whether each stream is a document."""


def memory_ablation(
    models: Mapping[str, MemoryLM],
    text: Tensor,
    occurrences: Tensor,
    *,
    tokens: int,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> MemoryAblation | None:
    """How much memory helps ``models``, by name, on about ``tokens`` tokens of ``text [n]``, whose words
    occur ``occurrences [n]`` times in training; None for a text too short for two streams.

    They are the first of its parts or ``documents``, as [`beginnings`][] has them; before them, each stream
    reads as many tokens as fill the longest memory. ``progress`` is called with the number of further tokens
    that were read.
    """
    lengths = [model.config.segment_len for model in models.values()]
    warm_up = max(filling_segments(model) * model.config.segment_len for model in models.values())
    reading = beginnings(len(text), warm_up, max(lengths), tokens, documents)
    if reading is None:
        return None
    reach = {name: model.config.remembered_positions for name, model in models.items()}
    baseline = min(reach, key=lambda name: reach[name]) if len(models) > 1 else None
    losses = {
        name: losses_under_controls(model, text, reading, warm_up, progress) for name, model in models.items()
    }
    stream, place = streams_and_places(reading.lengths)
    counted = place >= warm_up

    def difference(ours: Tensor, base: Tensor, which: Tensor) -> Mean:
        of, less = stream[which], (ours - base)[which]
        return mean_of_groups(of.bincount(less).tolist(), of.bincount().tolist())

    def group(name: str, which: Tensor) -> TokenGroup:
        """The group of the tokens that are true in ``which [n]``."""
        if not which.any():
            return TokenGroup(name, 0, {}, {}, {})
        plain = {model: of_model[BASELINE] for model, of_model in losses.items()}
        others = {model: loss for model, loss in plain.items() if baseline not in (None, model)}
        return TokenGroup(
            name=name,
            tokens=int(which.sum()),
            loss={model: loss[which].mean().item() for model, loss in plain.items()},
            less_baseline={m: difference(loss, plain[str(baseline)], which) for m, loss in others.items()},
            less_untouched={
                model: {c: difference(of_model[c], plain[model], which) for c in of_model if c != BASELINE}
                for model, of_model in losses.items()
            },
        )

    def grouped(numbers: Tensor, names: Sequence[str]) -> list[TokenGroup]:
        return [group(name, counted & (numbers == i)) for i, name in enumerate(names)]

    at = torch.tensor(reading.begins)[stream] + place + 1
    parts = zip(reading.begins, reading.lengths, strict=True)
    repeats = [repeat_distances(text[begin : begin + 1 + length], N_GRAM)[1:] for begin, length in parts]
    return MemoryAblation(
        streams=len(reading.lengths),
        warm_up=warm_up,
        n_gram=N_GRAM,
        baseline=baseline,
        overall=group("all", counted),
        swapped_less_zeroed={
            model: {
                part: difference(of_model[f"{part} swapped"], of_model[f"{part} zeroed"], counted)
                for part in PARTS
                if f"{part} zeroed" in of_model
            }
            for model, of_model in losses.items()
        },
        by_occurrences=grouped(*rarity_groups(occurrences[at])),
        by_repeat_distance=grouped(*repeat_groups(torch.cat(repeats), min(lengths), max(reach.values()))),
        of_documents=bool(documents),
    )


def losses_under_controls(
    model: MemoryLM, text: Tensor, reading: Reading, warm_up: int, progress: Callable[[int], object]
) -> dict[str, Tensor]:
    """The loss of each prediction of the ``reading`` of ``text [n]``, stream after stream, in nats, float64:
    with the memory untouched, and under each control, by name. Segments that end within the first ``warm_up``
    predictions are read with the memory untouched alone."""
    reading = replace(reading, segment_len=model.config.segment_len)
    controls = controls_of(model.config.memory_sizes)
    found: dict[str, list[Tensor]] = {name: [] for name in (BASELINE, *controls)}
    with eval_mode(model):
        for segment, _, _, scores in read_segments(model, reading.segments(text), controls, warm_up):
            for name, losses in found.items():
                losses.append(scores.get(name, scores[BASELINE]).losses.cpu().double())
            progress(segment.inputs.numel() * len(scores))
    return {name: reading.in_order(losses) for name, losses in found.items()}


def beginnings(
    n_tokens: int, warm_up: int, segment_len: int, tokens: int, documents: Sequence[int] = ()
) -> Reading | None:
    """The beginnings of at most [`AT_ONCE`][] equal parts of a text of ``n_tokens``, or of the ``documents``
    that it consists of, given by their numbers of tokens; of many, every k-th. Of each, the tokens after the
    first ``warm_up`` count, at least ``segment_len`` of them and about ``tokens`` in all; None where fewer
    than two are that long.

    [`AT_ONCE`][] are read at once, and the longest two of each group are as long, so that no stream is ever
    read alone.
    """
    streams = max(min(AT_ONCE, (n_tokens - 1) // (warm_up + segment_len)), 1)
    lengths = [length - 1 for length in documents] or [(n_tokens - 1) // streams] * streams
    begins = list(accumulate(documents or lengths, initial=0))
    chosen = [number for number, length in enumerate(lengths) if length >= warm_up + segment_len]
    if len(chosen) < 2:
        return None
    if documents:
        chosen = chosen[:: -(-len(chosen) // max(tokens // segment_len, 2))]
    longest = warm_up + max(tokens // len(chosen), segment_len)
    chosen.sort(key=lambda number: (-min(lengths[number], longest), number))
    if len(chosen) % AT_ONCE == 1:
        chosen.pop()
    read = [min(lengths[number], longest) for number in chosen]
    groups = tuple(tuple(range(len(chosen))[i : i + AT_ONCE]) for i in range(0, len(chosen), AT_ONCE))
    for group in groups:
        read[group[0]] = read[group[1]]
    return Reading(tuple(begins[n] for n in chosen), tuple(read), groups, segment_len, bool(documents))
