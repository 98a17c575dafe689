"""How memory grows with each segment, and how it is compressed and shortened. At every moment, each past
position is in exactly one place: in the memory, in one slot of the compressed memory, or forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memformers.models.boundaries import slots_left_out, valid_afterwards
from memformers.models.compression import slots_of
from memformers.models.lengths import ByLayer, LayerLengths, MemoryLengths, by_layer
from memformers.models.memory import Memory


@dataclass(frozen=True)
class Leaving:
    """What leaves a memory after a segment."""

    positions: int
    """How many of its oldest positions."""
    slots: int
    """How many compressed slots they become; with 0 they are forgotten."""


def keep_newest(
    memory: Memory, inputs: Sequence[Tensor], mem_len: ByLayer, doc_starts: Tensor | None = None
) -> Memory:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``doc_starts [S, B]``:
    the newest ``mem_len`` positions of both; Transformer-XL forgets the others (section 3.2)."""
    lengths = by_layer(mem_len, len(inputs), "mem_len")
    mem = tuple(map(newest, followed_by(memory.mem, inputs), lengths))
    return followed(memory, Memory(mem, memory.c_mem), doc_starts, len(inputs[0]))


def slots_to_compress(length: int, mem_len: int, compression_rate: int) -> int:
    """The number of slots that bring a memory of ``length`` back to ``mem_len``, n = ⌈(length − mem_len) /
    c⌉. A slot represents c whole positions, so n ≤ ⌊length / c⌋, and up to c − 1 positions may remain."""
    overflow = max(length - mem_len, 0)
    return min(-(-overflow // compression_rate), length // compression_rate)


@dataclass(frozen=True)
class Compressed:
    """The input and the result of one compression, ``old [n·c, B, D]`` and ``new [n, B, D]`` for each layer;
    ``new`` still carries the gradient to f_c. If only other layers compressed something, n is 0."""

    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...]
    left_out: tuple[Tensor, ...] | None = None
    """How many of each stream's oldest new slots the reconstruction loss leaves out, int64 ``[B]`` a layer;
    None for none."""


def compress_oldest(
    memory: Memory,
    inputs: Sequence[Tensor],
    compress: Sequence[Callable[..., Tensor]],
    lengths: MemoryLengths,
    doc_starts: Tensor | None = None,
    received: Callable[[int, int], Tensor | None] = lambda layer, positions: None,
) -> tuple[Memory, Compressed | None]:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` for each layer, and ``doc_starts [S,
    B]``. Each layer's own f_c compresses the positions that overflow into slots, ``[n·c, B, D]`` to ``[n, B,
    D]``. For an f_c that needs it, ``received`` takes a layer and a number of its oldest positions, and
    returns the attention that they received, ``[n·c, B]``.

    Returns the memory and what was compressed, or None if nothing overflowed. Slots are remembered without
    gradient, since f_c learns from its own loss. Source: Compressive Transformer (Rae et al. 2020, arXiv
    1911.05507), section 3.1 and algorithm 1.
    """
    past, S = followed_by(memory.mem, inputs), len(inputs[0])
    layers, rates = lengths.of_layers(len(inputs)), lengths.compression_rate
    found = [sum(map(len, parts)) for parts in past]  # positions of each layer
    slots_of_layers = [
        slots_to_compress(length, own.mem_len, own.compression_rate)
        for length, own in zip(found, layers, strict=True)
    ]
    taken = [n * own.compression_rate for n, own in zip(slots_of_layers, layers, strict=True)]
    mem = tuple(newest(x, length - nc) for x, length, nc in zip(past, found, taken, strict=True))
    if not any(slots_of_layers):
        return followed(memory, replace(memory, mem=mem), doc_starts, S, rates), None
    old = tuple(cut(parts, 0, nc).detach() for parts, nc in zip(past, taken, strict=True))
    new = tuple(
        slots_of(f_c, x, n, received(layer, len(x))) if n else x
        for layer, (f_c, x, n) in enumerate(zip(compress, old, slots_of_layers, strict=True))
    )
    slots = followed_by(memory.c_mem, [x.detach() for x in new])
    c_mem = tuple(newest(parts, own.c_mem_len) for parts, own in zip(slots, layers, strict=True))
    after = Memory(mem, c_mem)
    if any(own.slots_anew for own in layers):
        behind = zip(followed_by(memory.slot_inputs, old), layers, strict=True)
        after = replace(
            after, slot_inputs=tuple(newest(parts, own.slot_input_positions) for parts, own in behind)
        )
    left_out = slots_left_out_by_layer(memory, doc_starts, slots_of_layers, layers)
    return followed(memory, after, doc_starts, S, rates), Compressed(old, new, left_out)


def slots_left_out_by_layer(
    memory: Memory, doc_starts: Tensor | None, slots: Sequence[int], layers: Sequence[LayerLengths]
) -> tuple[Tensor, ...] | None:
    """The number of each layer's new ``slots`` that the reconstruction loss leaves out after a segment with
    ``doc_starts [S, B]`` ([`slots_left_out`][]): int64 ``[B]`` for each layer; None if every stream has only
    one document."""
    if memory.valid is None and doc_starts is None:
        return None
    lengths = memory.lengths(len(layers))
    found: list[Tensor] = []
    of_each = [(M, n, own.compression_rate) for (M, _), n, own in zip(lengths, slots, layers, strict=True)]
    for layer, of_one in enumerate(of_each):
        if layer and of_one == of_each[layer - 1]:  # as are all layers of most models
            found.append(found[-1])
        else:
            left_out = slots_left_out(memory.valid, doc_starts, *of_one)
            assert left_out is not None
            found.append(left_out)
    return tuple(found)


def followed(
    before: Memory, after: Memory, doc_starts: Tensor | None, segment_len: int, rate: ByLayer = 1
) -> Memory:
    """``after`` with its ``valid``, if it follows ``before`` after a segment with ``doc_starts [S, B]``."""
    remembered = before.positions(rate), after.positions(rate)
    return replace(after, valid=valid_afterwards(before.valid, doc_starts, segment_len, *remembered))


def followed_by(past: Sequence[Tensor], new: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each layer's past and what follows it, ``[·, B, D]`` each; an empty ``past`` has no positions."""
    return list(zip(past, new, strict=True)) if past else [(x,) for x in new]


def newest(parts: Sequence[Tensor], length: int) -> Tensor:
    """The last ``length`` positions of ``parts [·, B, D]``, which follow each other in time, or all positions
    if there are fewer."""
    end = sum(map(len, parts))
    return cut(parts, max(end - length, 0), end)


def cut(parts: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """The positions from ``start`` to before ``stop`` of ``parts [·, B, D]``, which follow each other in
    time. They are copied only if they are in several parts: a memory that is no longer than a segment is a
    view of that segment's inputs."""
    pieces = []
    for part in parts:
        pieces.append(part[max(start, 0) : max(stop, 0)])
        start, stop = start - len(part), stop - len(part)
    pieces = [piece for piece in pieces if len(piece)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [parts[0][:0]])
