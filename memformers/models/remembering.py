"""How memory grows with each segment, and how it is compressed and shortened. At every moment, each past
position is in exactly one place: in the memory, in one slot of the compressed memory, or forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memformers.models.boundaries import slots_left_out, valid_afterwards
from memformers.models.compression import slots_of
from memformers.models.lengths import LayerLengths
from memformers.models.memory import Memory


def keep_newest(
    memory: Memory,
    inputs: Sequence[Tensor],
    lengths: Sequence[LayerLengths],
    doc_starts: Tensor | None = None,
) -> Memory:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``doc_starts [S, B]``:
    the newest positions of both; Transformer-XL forgets the others (section 3.2)."""
    past = zip(followed_by(memory.mem, inputs), lengths, strict=True)
    mem = tuple(without_oldest(parts, own.leaving(sum(map(len, parts)))) for parts, own in past)
    return followed(memory, Memory(mem, memory.c_mem), lengths, doc_starts, len(inputs[0]))


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
    lengths: Sequence[LayerLengths],
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
    taken = [own.leaving(sum(map(len, parts))) for parts, own in zip(past, lengths, strict=True)]  # n·c
    mem = tuple(without_oldest(parts, nc) for parts, nc in zip(past, taken, strict=True))
    if not any(taken):
        return followed(memory, replace(memory, mem=mem), lengths, doc_starts, S), None
    old = tuple(cut(parts, 0, nc).detach() for parts, nc in zip(past, taken, strict=True))
    n_slots = [nc // own.compression_rate for nc, own in zip(taken, lengths, strict=True)]
    new = tuple(
        slots_of(f_c, x, n, received(layer, len(x))) if n else x
        for layer, (f_c, x, n) in enumerate(zip(compress, old, n_slots, strict=True))
    )
    slots = zip(followed_by(memory.c_mem, [x.detach() for x in new]), lengths, strict=True)
    after = Memory(mem, tuple(newest(parts, own.c_mem_len) for parts, own in slots))
    if any(own.slot_input_positions for own in lengths):
        behind = zip(followed_by(memory.slot_inputs, old), lengths, strict=True)
        after = replace(
            after, slot_inputs=tuple(newest(parts, own.slot_input_positions) for parts, own in behind)
        )
    left_out = None
    if memory.valid is not None or doc_starts is not None:
        each = zip(memory.lengths(len(lengths)), n_slots, lengths, strict=True)
        left_out = tuple(
            slots_left_out(memory.valid, doc_starts, M, n, own.compression_rate) for (M, _), n, own in each
        )
    return followed(memory, after, lengths, doc_starts, S), Compressed(old, new, left_out)


def followed(
    before: Memory,
    after: Memory,
    lengths: Sequence[LayerLengths],
    doc_starts: Tensor | None,
    segment_len: int,
) -> Memory:
    """``after`` with its ``valid``, if it follows ``before`` after a segment with ``doc_starts [S, B]``."""
    remembered = before.positions(lengths), after.positions(lengths)
    return replace(after, valid=valid_afterwards(before.valid, doc_starts, segment_len, *remembered))


def followed_by(past: Sequence[Tensor], new: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each layer's past and what follows it, ``[·, B, D]`` each; an empty ``past`` has no positions."""
    return list(zip(past, new, strict=True)) if past else [(x,) for x in new]


def newest(parts: Sequence[Tensor], length: int) -> Tensor:
    """The last ``length`` positions of ``parts [·, B, D]``, which follow each other in time, or all positions
    if there are fewer."""
    end = sum(map(len, parts))
    return cut(parts, max(end - length, 0), end)


def without_oldest(parts: Sequence[Tensor], positions: int) -> Tensor:
    """``parts [·, B, D]``, which follow each other in time, but for this many of the oldest ``positions``."""
    return cut(parts, positions, sum(map(len, parts)))


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
