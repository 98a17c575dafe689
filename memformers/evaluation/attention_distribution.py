"""How far back a model looks: its attention by distance, and by the kind of key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import plain_reading
from memformers.models.base import eval_mode, keys_by_head
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory


@dataclass(frozen=True)
class AttentionDistribution:
    """Mean attention probabilities, over all queries whose memories are full."""

    by_place: list[list[list[float]]]
    """For each layer and head: the fractions of attention to compressed memory, memory and segment."""
    nearest: list[int]
    """Lower edges of distance bins, in positions of the text: 0, 1, 2, 4, …; each ends where the next begins.
    The distance of a compressed slot is that of the middle of its positions."""
    by_distance: list[list[list[float]]]
    """For each layer and head: the fraction of attention in each bin."""


@torch.no_grad()
def attention_distribution(
    model: MemoryLM, tokens: Tensor, *, documents: Sequence[int] = (), streams: int = 8, segments: int = 8
) -> AttentionDistribution | None:
    """The attention of ``model`` when it reads the text ``tokens [n]`` in ``streams`` parallel streams, over
    ``segments`` segments after its memories are full.

    If the text consists of ``documents``, given by their numbers of tokens, the streams are at most that many
    of the longest ones, as far as all of them go; None where none fills the memories, and for a memory of
    one's own, whose layers may do something else than attend. Raises UserError for a plain text too short for
    one such segment.
    """
    if not model.transformer.keeps_keys:
        return None
    S, filling = model.config.segment_len, filling_segments(model)
    if documents:
        longest_first = sorted(tokens.split(list(documents)), key=len, reverse=True)[:streams]
        chosen = [document for document in longest_first if len(document) >= (filling + 1) * S]
        if not chosen:
            return None
        parts = iter(torch.stack([document[: len(chosen[-1])] for document in chosen], dim=1).split(S))
    else:
        check_long_enough(model, tokens, streams)
        parts = (segment.inputs for segment in plain_reading(len(tokens), streams, S).segments(tokens))
    means, memory, sizes = [], Memory(()), model.config.memory_sizes
    with eval_mode(model):
        for number, inputs in enumerate(islice(parts, filling + segments)):  # [S, B]
            if len(inputs) < S:
                break
            _, layer_inputs = model.transformer(model.embed(inputs.to(model.device)), memory, sizes=sizes)
            if number >= filling:
                means.append(distribution_of_segment(model, layer_inputs, memory))
            memory, _ = model.transformer.remember(memory, layer_inputs, sizes)
    by_place, by_distance = (torch.stack(each).mean(0).tolist() for each in zip(*means, strict=True))
    return AttentionDistribution(by_place, bin_edges(model.config.remembered_positions + S), by_distance)


def filling_segments(model: MemoryLM) -> int:
    """After how many segments the memories of ``model`` are full."""
    return -(-model.config.remembered_positions // model.config.segment_len)


def check_long_enough(model: MemoryLM, tokens: Tensor, streams: int) -> None:
    """Raise ValueError for a text ``tokens [n]`` in which ``streams`` never fill the memories."""
    needed = streams * (filling_segments(model) + 1) * model.config.segment_len + 1
    if len(tokens) < needed:
        raise UserError(
            f"{streams} streams of a text of {len(tokens):,} tokens never fill the memory, which needs "
            f"{needed:,}; use a longer text or fewer streams."
        )


def attention_of_layers(
    model: MemoryLM, inputs: list[Tensor], memory: Memory
) -> Iterator[tuple[int, int, Tensor]]:
    """C, M and the attention ``[B, H, S, K]`` of each layer to a segment, whose layers have these ``inputs
    [S, B, D]``, and to the ``memory`` before it."""
    sizes, S = model.config.memory_sizes, len(inputs[0])
    key_start = model.transformer.first_seen(inputs[0], memory, None, sizes)
    reads, lengths = keys_by_head(memory, sizes, len(inputs)), memory.lengths(len(inputs))
    for i, layer in enumerate(model.transformer.memory_layers):
        M, C = lengths[i]
        past = [of_layers[i] for of_layers in (memory.c_mem, memory.mem) if of_layers]
        context = layer.attention_input(torch.cat((*past, inputs[i])))  # [K, B, D]
        bounds: dict[str, Any] = {"key_start": key_start[i], "reads": reads[i]}
        yield C, M, layer.self_attn.probabilities(query=context[-S:], key=context, **bounds)


def distribution_of_segment(model: MemoryLM, inputs: list[Tensor], memory: Memory) -> tuple[Tensor, Tensor]:
    """Means over the queries of one segment, whose layers have these ``inputs [S, B, D]``: by place,
    ``[layers, H, 3]``, and by distance bin, ``[layers, H, bins]``."""
    config, S = model.config, len(inputs[0])
    edges = bin_edges(config.remembered_positions + config.segment_len)
    places, distances = [], []
    for (C, M, attention), own in zip(
        attention_of_layers(model, inputs, memory), config.memory_sizes, strict=True
    ):
        bins = distance_bins(C, M, S, own.compression_rate)  # [S, K]
        bins = bins.clamp(max=len(edges) - 1).to(attention.device)
        mass = attention.mean(0)  # [H, S, K]
        places.append(torch.stack([part.sum(-1).mean(-1) for part in mass.split((C, M, S), dim=-1)], dim=-1))
        empty = mass.new_zeros(len(mass), len(edges))
        distances.append(empty.index_add(1, bins.flatten(), mass.flatten(1)) / S)
    return torch.stack(places).double().cpu(), torch.stack(distances).double().cpu()


def distance_bins(C: int, M: int, S: int, compression_rate: int) -> Tensor:
    """The distance bin of each key for each query, int64 ``[S, K]``; that of a key in the future, which
    gets no attention, is 0."""
    key = torch.arange(-M, S).double()
    slot = -M - compression_rate * torch.arange(C, 0, -1) + (compression_rate - 1) / 2
    distance = torch.arange(S)[:, None] - torch.cat((slot, key))  # [S, K], in positions of the text
    return (distance.clamp(min=0.5).log2().floor() + 1).long()


def bin_edges(reach: int) -> list[int]:
    """0, 1, 2, 4, … below ``reach``, the number of distances."""
    return [0] + [2**k for k in range(max(reach - 1, 0).bit_length())]
