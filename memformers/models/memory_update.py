"""How memory grows with each segment, and how it is compressed and truncated. At every moment, each past
position is in exactly one place: in the memory, in one slot of the compressed memory, or forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memformers.models.compression import slots_of
from memformers.models.documents import n_masked_slots
from memformers.models.memory import Memory
from memformers.models.memory_sizes import Sizes


def truncate_memory(memory: Memory, inputs: Sequence[Tensor], sizes: Sizes) -> Memory:
    """The newest positions of memory and layer inputs, ``[S, B, D]`` each (Transformer-XL, section 3.2)."""
    past = zip(followed_by(memory.mem, inputs), sizes, strict=True)
    return Memory(tuple(cut(parts, own.n_evicted(sum(map(len, parts)))) for parts, own in past), memory.c_mem)


@dataclass(frozen=True)
class Compressed:
    """Compression of ``old [n·c, B, D]``, n ≥ 0, to ``new [n, B, D]`` with f_c's gradient, in each layer."""

    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...]
    n_masked: tuple[Tensor, ...] | None = None
    """How many of each stream's oldest new slots its loss leaves out, int64 ``[B]`` a layer; None: none."""


def compress_memory(
    memory: Memory,
    inputs: Sequence[Tensor],
    compress: Sequence[Callable[..., Tensor]],
    sizes: Sizes,
    doc_starts: Tensor | None = None,
    received: Callable[[int, int], Tensor | None] = lambda layer, positions: None,
) -> tuple[Memory, Compressed | None]:
    """The memory after a segment with layer inputs ``[S, B, D]`` and ``doc_starts [S, B]``, and what was
    compressed, if anything: each layer's f_c makes slots ``[n, B, D]``, remembered without gradient, of the
    positions that overflow, ``[n·c, B, D]`` (Rae et al. 2020, arXiv 1911.05507, algorithm 1), if need be by
    the attention that they received, ``[n·c, B]``, which ``received`` gives for a layer and their number."""
    past = followed_by(memory.mem, inputs)
    taken = [own.n_evicted(sum(map(len, parts))) for parts, own in zip(past, sizes, strict=True)]  # n·c
    mem = tuple(cut(parts, nc) for parts, nc in zip(past, taken, strict=True))
    if not any(taken):
        return replace(memory, mem=mem), None
    old = tuple(cut(parts, 0, nc).detach() for parts, nc in zip(past, taken, strict=True))
    n_slots = [nc // own.compression_rate for nc, own in zip(taken, sizes, strict=True)]
    new = tuple(
        slots_of(f_c, x, n, received(layer, len(x))) if n else x
        for layer, (f_c, x, n) in enumerate(zip(compress, old, n_slots, strict=True))
    )
    slots = followed_by(memory.c_mem, [x.detach() for x in new]), [own.c_mem_len for own in sizes]
    behind = followed_by(memory.slot_inputs, old), [own.slot_input_positions for own in sizes]
    c_mem, slot_inputs = (
        tuple(cut(parts, max(sum(map(len, parts)) - most, 0)) for parts, most in zip(*each, strict=True))
        for each in (slots, behind)
    )
    n_masked = None
    if memory.valid is not None or doc_starts is not None:
        each = zip(memory.lengths(len(sizes)), n_slots, sizes, strict=True)
        n_masked = tuple(
            n_masked_slots(memory.valid, doc_starts, M, n, own.compression_rate) for (M, _), n, own in each
        )
    memory = Memory(mem, c_mem, slot_inputs=slot_inputs if any(map(len, slot_inputs)) else ())
    return memory, Compressed(old, new, n_masked)


def followed_by(past: Sequence[Tensor], new: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each layer's past and what follows it, ``[·, B, D]`` each; an empty ``past`` has no positions."""
    return list(zip(past, new, strict=True)) if past else [(x,) for x in new]


def cut(parts: Sequence[Tensor], start: int, stop: int | None = None) -> Tensor:
    """The positions from ``start`` to ``stop`` of successive ``parts [·, B, D]``: a copy if they are in
    several, or less than half of one, which a view would keep from being freed."""
    stop, filled = sum(map(len, parts)) if stop is None else stop, []
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if len(piece):
            filled.append((piece, part))
        start, stop = start - len(part), stop - len(part)
    if len(filled) != 1:
        return torch.cat([piece for piece, _ in filled] or [parts[0][:0]])
    piece, part = filled[0]
    return piece.clone() if 2 * len(piece) < len(part) else piece
