"""What a model remembers between segments, as a value, and how it grows, is compressed and is cut.

Each step gives a new [`Memory`][]; nothing here or in a model is kept on a module. At every moment
each past position is in exactly one place: in the memory, in one slot of the compressed memory, or
forgotten from the far end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    ``mem`` holds a tensor ``[M, B, D]`` a layer: that layer's inputs. ``c_mem`` holds a tensor
    ``[C, B, D]`` a layer, where each slot stands for ``compression_rate`` inputs older than all of
    ``mem``; it is empty for a model that doesn't compress. Both carry no gradient, but may be views of
    what a backward pass still needs: don't change them in place.
    """

    mem: tuple[Tensor, ...]
    c_mem: tuple[Tensor, ...] = ()

    @property
    def mem_len(self) -> int:
        """M, in positions."""
        return len(self.mem[0]) if self.mem else 0

    @property
    def c_mem_len(self) -> int:
        """C, in slots."""
        return len(self.c_mem[0]) if self.c_mem else 0


@dataclass(frozen=True)
class MemoryLengths:
    """How much a model remembers."""

    mem_len: int
    """M, in positions."""
    c_mem_len: int = 0
    """C, in slots."""
    compression_rate: int = 1
    """c, the positions that a slot stands for."""

    @property
    def longest_memory(self) -> int:
        """The most positions that a memory has between segments: one shorter than a slot's worth waits until
        it fills one."""
        return max(self.mem_len, self.compression_rate - 1)

    def check_kind(self, memory: Memory, model: str) -> None:
        """Raise ValueError for a ``memory`` of a kind that ``model`` doesn't keep."""
        for name, mem in (("mem", memory.mem), ("c_mem", memory.c_mem)):
            if mem and mem[0].dim() != 3:  # which may have no length at all
                raise UserError(
                    f"{name} of layer 0 was expected as [length, batch, d_model]; it is "
                    f"{list(mem[0].shape)}. Use a memory as the model gives it."
                )
        for came, limit, memory_of in self._limits(memory):
            if came and not limit:
                raise UserError(
                    f"{memory_of} was given to a model={model!r}, which has none; use it with the model that "
                    f"made it."
                )

    def check_fits(self, memory: Memory, model: str) -> None:
        """Raise ValueError for a ``memory`` that ``model`` can't have made: another kind, or longer."""
        self.check_kind(memory, model)
        for came, limit, memory_of in self._limits(memory):
            if came > limit:
                raise UserError(
                    f"{memory_of} was given to a model={model!r}, which keeps {limit} at most; use it with "
                    f"the model that made it."
                )

    def _limits(self, memory: Memory) -> list[tuple[int, int, str]]:
        """Of both memories: the length that came, the longest there can be, and how to name it."""
        return [
            (memory.mem_len, self.longest_memory, f"a memory of {memory.mem_len} positions"),
            (memory.c_mem_len, self.c_mem_len, f"a compressed memory of {memory.c_mem_len} slots"),
        ]


@dataclass(frozen=True)
class Leaving:
    """What leaves a memory after a segment."""

    positions: int
    """How many of its oldest positions."""
    slots: int
    """How many compressed slots they become; with 0 they are forgotten."""


def keep_newest(memory: Memory, inputs: Sequence[Tensor], mem_len: int) -> Memory:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer: the newest ``mem_len``
    positions of both; Transformer-XL forgets the others (section 3.2)."""
    return Memory(tuple(newest(parts, mem_len) for parts in followed_by(memory.mem, inputs)), memory.c_mem)


def slots_to_compress(length: int, mem_len: int, compression_rate: int) -> int:
    """n = ⌈(length − mem_len) / c⌉ slots bring a memory of ``length`` back to ``mem_len``; but a
    slot stands for c whole positions, so n ≤ ⌊length / c⌋, and up to c − 1 positions may remain."""
    overflow = max(length - mem_len, 0)
    return min(-(-overflow // compression_rate), length // compression_rate)


@dataclass(frozen=True)
class Compressed:
    """What one compression took and made: ``old [n·c, B, D]`` and ``new [n, B, D]``, a layer each;
    ``new`` still carries the gradient to f_c."""

    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...]


def compress_oldest(
    memory: Memory,
    inputs: Sequence[Tensor],
    compress: Sequence[Callable[[Tensor], Tensor]],
    lengths: MemoryLengths,
) -> tuple[Memory, Compressed | None]:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, of which what overflows
    has become compressed slots, by each layer's own f_c, ``[n·c, B, D]`` to ``[n, B, D]``.

    Returns it and what was compressed, or None where nothing overflowed. Slots are remembered without
    gradient, since f_c learns from its own loss. Source: Compressive Transformer (Rae et al. 2020, arXiv
    1911.05507), section 3.1 and algorithm 1.
    """
    past = followed_by(memory.mem, inputs)
    length, c = memory.mem_len + len(inputs[0]), lengths.compression_rate
    n = slots_to_compress(length, lengths.mem_len, c)
    mem = tuple(newest(parts, length - n * c) for parts in past)
    if n == 0:
        return Memory(mem, memory.c_mem), None
    old = tuple(cut(parts, 0, n * c) for parts in past)
    # In the memory's dtype, whatever autocast made of it.
    new = tuple(f_c(x).to(x.dtype) for f_c, x in zip(compress, old, strict=True))
    slots = followed_by(memory.c_mem, [x.detach() for x in new])
    return Memory(mem, tuple(newest(parts, lengths.c_mem_len) for parts in slots)), Compressed(old, new)


def followed_by(past: Sequence[Tensor], new: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Each layer's past and what follows it, ``[·, B, D]`` each; an empty ``past`` has no positions."""
    return list(zip(past, new, strict=True)) if past else [(x,) for x in new]


def newest(parts: Sequence[Tensor], length: int) -> Tensor:
    """The last ``length`` positions of ``parts [·, B, D]``, which follow each other in time, or all where
    there are fewer."""
    end = sum(map(len, parts))
    return cut(parts, max(end - length, 0), end)


def cut(parts: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """The positions from ``start`` to before ``stop`` of ``parts [·, B, D]``, which follow each other in
    time. Copied only where they lie in several: a memory no longer than a segment is a view of that
    segment's inputs."""
    pieces = []
    for part in parts:
        pieces.append(part[max(start, 0) : max(stop, 0)])
        start, stop = start - len(part), stop - len(part)
    pieces = [piece for piece in pieces if len(piece)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [parts[0][:0]])


def memory_tensors(memory: Memory) -> dict[str, Tensor]:
    """A memory as ``mem.0``, …, ``c_mem.0``, …, as files have it."""
    tensors = {f"mem.{i}": mem.contiguous() for i, mem in enumerate(memory.mem)}
    return tensors | {f"c_mem.{i}": c_mem.contiguous() for i, c_mem in enumerate(memory.c_mem)}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The memory of so many layers that [`memory_tensors`][] gives; ValueError for anything else."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in ("mem", "c_mem")}
    mem, c_mem = (tuple(tensors[n] for n in names if n in tensors) for names in kinds.values())
    if others := sorted(set(tensors) - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    return Memory(mem, c_mem)


def check_memory(name: str, mem: Sequence[Tensor], x: Tensor, n_layers: int) -> None:
    """Raise ValueError unless ``mem``, empty or one tensor a layer, fits the input ``x [S, B, D]``."""
    if not mem:
        return
    if len(mem) != n_layers:
        raise UserError(
            f"{name} of {n_layers} layers was expected, one tensor each; this one has {len(mem)}. "
            f"Is it another model's?"
        )
    for layer, tensor in enumerate(mem):
        expected, came = ["·", *x.shape[1:]], list(tensor.shape)
        if came[1:] != expected[1:] or len(came) != 3:
            raise UserError(
                f"{name} of layer {layer} was expected as [length, batch, d_model] = "
                f"[·, {x.shape[1]}, {x.shape[2]}]; it is {came}. Start from no memory for another "
                f"batch, and use a memory with the model that made it."
            )
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise UserError(
                f"{name} of layer {layer} is {tensor.dtype} on {tensor.device}, but the model works "
                f"in {x.dtype} on {x.device}; move it there, or start from no memory."
            )
        if len(tensor) != len(mem[0]):
            raise UserError(
                f"{name} has {len(mem[0])} positions in layer 0 and {len(tensor)} in layer {layer}; "
                f"every layer remembers the same positions."
            )
