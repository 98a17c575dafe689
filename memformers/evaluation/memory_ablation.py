"""What each part of its memory is worth to a trained model: the loss without the part minus the loss with it.

The held-out text is read in parallel streams, and the memory is carried along; of documents, each is a stream
of its own. Before a segment, the memory is changed ([`memformers.evaluation.controls`][]): its slots or its
positions are zeroed, or swapped with those of another stream. Each stream counts as an independent
observation, and differences are taken within streams, token by token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.data.streams import iter_segments
from memformers.evaluation.attention_mass import filling_segments
from memformers.evaluation.controls import controls_of, scores_under
from memformers.evaluation.intervals import mean_over_streams
from memformers.evaluation.rarity import group_names, groups
from memformers.evaluation.repeats import band_edges, band_names, bands, repeat_distances
from memformers.evaluation.side_by_side import Streams, streams_of_documents, streams_of_text
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory_streams import some_streams
from memformers.models.stack import eval_mode

N_GRAM = 8
"""Tokens, the last of them the one that is predicted, that must have occurred before for it to repeat."""
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class Difference:
    """A mean difference of losses, in nats per token."""

    mean: float
    half_width: float | None
    """Half of its 95 % interval over streams; None where fewer than two streams have such tokens."""


@dataclass(frozen=True)
class Group:
    """Some of the tokens, and how well models predict them; a group without tokens has no losses."""

    name: str
    tokens: int
    loss: dict[str, float]
    """By model: the mean with the unchanged memory, in nats per token."""
    less_baseline: dict[str, Difference]
    """By model, without the baseline: its loss minus the baseline's."""
    less_untouched: dict[str, dict[str, Difference]]
    """By model and control: the loss with the changed memory minus that with the unchanged memory."""


@dataclass(frozen=True)
class Worth:
    """What memory is worth to some models on the same tokens."""

    streams: int
    warm_up: int
    """The number of tokens at the beginning of each stream that fill the memories and don't count."""
    n_gram: int
    """How many tokens, including the predicted one, make a repetition."""
    baseline: str | None
    """The model with the shortest reach, with which the others are compared; None for a single model."""
    overall: Group
    swapped_less_zeroed: dict[str, dict[str, Difference]]
    """By model and part of the memory, over all tokens: the loss with the part swapped minus that with it
    zeroed."""
    by_occurrences: list[Group]
    """By the number of occurrences of a token's word in the training text."""
    by_repeat_distance: list[Group]
    """By the distance, in tokens, to the last occurrence that a token repeats."""
    of_documents: bool = False
    """Whether each stream is a document."""


def memory_ablation(
    models: Mapping[str, MemoryLM],
    text: Tensor,
    occurrences: Tensor,
    *,
    tokens: int,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> Worth | None:
    """What memory is worth to ``models``, by name, on about ``tokens`` tokens of ``text [n]``, whose words
    occur ``occurrences [n]`` times in training; None for a text too short for two streams.

    They are the first of equal parts of the text ([`streams_of_text`][]), or of its ``documents``, given by
    how many tokens each has ([`streams_of_documents`][]); before them, each stream reads as many tokens as
    fill the longest memory. ``progress`` is called with the number of further tokens that were read.
    """
    segment_len = max(model.config.segment_len for model in models.values())
    warm_up = max(filling_segments(model) * model.config.segment_len for model in models.values())
    streams = (
        streams_of_documents(documents, warm_up, segment_len, tokens)
        if documents
        else streams_of_text(len(text), warm_up, segment_len, tokens)
    )
    if streams is None:
        return None
    at, there = streams.at, streams.there[warm_up + 1 :]
    reach = max(model.config.remembered_positions for model in models.values())
    edges = band_edges(min(model.config.segment_len for model in models.values()), reach)
    losses = {}
    for name, model in models.items():
        with eval_mode(model):
            losses[name] = losses_under_controls(model, text[at], streams, warm_up, progress)
    looks_back_least = min(models, key=lambda name: models[name].config.remembered_positions)
    baseline = looks_back_least if len(models) > 1 else None

    def grouped(group: Tensor, names: Sequence[str]) -> list[Group]:
        group = group[warm_up + 1 :]
        return [summed_up(name, there & (group == i), losses, baseline) for i, name in enumerate(names)]

    return Worth(
        streams=len(streams.lengths),
        warm_up=warm_up,
        n_gram=N_GRAM,
        baseline=baseline,
        overall=grouped(torch.zeros_like(at), ["all"])[0],
        swapped_less_zeroed={name: swapped_less_zeroed(of_model, there) for name, of_model in losses.items()},
        by_occurrences=grouped(groups(occurrences[at]), group_names()),
        by_repeat_distance=grouped(bands(repeat_distances(text[at], N_GRAM), edges), band_names(edges)),
        of_documents=bool(documents),
    )


@torch.no_grad()
def losses_under_controls(
    model: MemoryLM, tokens: Tensor, streams: Streams, warm_up: int, progress: Callable[[int], object]
) -> dict[str, Tensor]:
    """The loss of each token of the ``streams``, ``tokens [1 + T, B]``, after the first ``1 + warm_up``, in
    nats, float64 ``[T - warm_up, B]``: with the memory untouched, and under each control, by name. Past a
    stream's end it is any number."""
    counted, groups = len(tokens) - 1 - warm_up, []
    for group in streams.groups:
        lengths = streams.lengths[group]
        losses = losses_of_group(model, tokens[: lengths[0], group], lengths, warm_up, progress)
        groups.append({name: F.pad(x, (0, 0, 0, counted - len(x))) for name, x in losses.items()})
    return {name: torch.cat([of_group[name] for of_group in groups], dim=1) for name in groups[0]}


def losses_of_group(
    model: MemoryLM,
    tokens: Tensor,
    lengths: Sequence[int],
    warm_up: int,
    progress: Callable[[int], object],
) -> dict[str, Tensor]:
    """Those of streams ``tokens [1 + T, B]`` of these ``lengths``, the longest first, that are read at once.
    A stream that has come to its end is left out of the next segment, so that nothing is swapped with it."""
    controls = controls_of(model.config.lengths)
    found: dict[str, list[Tensor]] = {name: [] for name in (UNTOUCHED, *controls)}
    memory = Memory(())
    for segment in iter_segments(tokens[:-1], tokens[1:], model.config.segment_len):
        begin = segment.end - len(segment.inputs)
        B = sum(length - 1 > begin for length in lengths)
        segment = replace(segment, inputs=segment.inputs[:, :B], targets=segment.targets[:, :B])
        memory = some_streams(memory, slice(B))
        counted = min(segment.end - warm_up, len(segment.inputs))
        read, changed = scores_under(model, segment, memory, controls if counted > 0 else {})
        if counted > 0:
            for name, scores in ({UNTOUCHED: read.scores} | changed).items():
                losses = scores.losses[-counted:].cpu().double()
                found[name].append(F.pad(losses, (0, len(lengths) - B)))
        memory = read.memory
        progress(segment.inputs.numel() * (1 + len(changed)))
    return {name: torch.cat(parts) for name, parts in found.items()}


def summed_up(
    name: str, which: Tensor, losses: Mapping[str, Mapping[str, Tensor]], baseline: str | None
) -> Group:
    """The group of the tokens that are true in ``which [T, B]``, of which these are the ``losses [T, B]`` by
    model and control."""
    if not which.any():
        return Group(name, 0, {}, {}, {})
    whole = {model: of_model[UNTOUCHED] for model, of_model in losses.items()}
    less_baseline = {
        model: difference(loss, whole[baseline], which)
        for model, loss in whole.items()
        if baseline is not None and model != baseline
    }
    less_untouched = {
        model: {
            control: difference(loss, whole[model], which)
            for control, loss in of_model.items()
            if control != UNTOUCHED
        }
        for model, of_model in losses.items()
    }
    means = {model: loss[which].mean().item() for model, loss in whole.items()}
    return Group(name, int(which.sum()), means, less_baseline, less_untouched)


def swapped_less_zeroed(losses: Mapping[str, Tensor], which: Tensor) -> dict[str, Difference]:
    """For each part of a model's memory: how much more it loses, by its ``losses [T, B]`` under each control,
    with another stream's in that place than with zeros, over the tokens that are true in ``which [T, B]``."""
    parts = [name.removesuffix(" zeroed") for name in losses if name.endswith(" zeroed")]
    return {part: difference(losses[f"{part} swapped"], losses[f"{part} zeroed"], which) for part in parts}


def difference(losses: Tensor, less: Tensor, which: Tensor) -> Difference:
    """The mean over the tokens that are true in ``which [T, B]``, at least one, of ``losses [T, B]`` less
    ``less``, likewise."""
    sums = torch.where(which, losses - less, 0.0).sum(0)
    found = mean_over_streams(sums, which.sum(0))
    return Difference(found.mean, None if found.n < 2 else found.half_width)
