"""What a model remembers between segments, as a value, and how it grows, is compressed and is cut.

Each step gives a new [`Memory`][]; nothing here or in a model is kept on a module. At every moment
each past position is in exactly one place: in the memory, in one slot of the compressed memory, or
forgotten from the far end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.boundaries import EVERYTHING, slots_left_out, valid_afterwards
from memformers.models.compression import slots_of

if TYPE_CHECKING:
    from memformers.models.config import ModelConfig


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    ``mem`` holds a tensor ``[M, B, D]`` a layer: that layer's inputs. ``c_mem`` holds a tensor
    ``[C, B, D]`` a layer, where each slot stands for ``compression_rate`` inputs older than all of
    ``mem``; it is empty for a model that doesn't compress. Both carry no gradient, but may be views of
    what a backward pass still needs: don't change them in place.

    ``valid``, int64 ``[B]``, says how many of each stream's newest positions belong to its running document,
    where a slot stands for ``compression_rate`` of them; None says all. What came before is hidden from
    queries ([`memformers.models.boundaries`][]).
    """

    mem: tuple[Tensor, ...]
    c_mem: tuple[Tensor, ...] = ()
    valid: Tensor | None = None

    @classmethod
    def empty(
        cls,
        config: "ModelConfig",
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "Memory":
        """A memory of nothing that is as long as a full one: zeros that no query sees.

        A model starts from it as from no memory; but shapes are then the same in every segment, where
        ``segment_len`` is a multiple of ``compression_rate``. It holds as many of ``mem_len`` positions as
        make whole slots, so that the first document begins at the edge of a slot. ``dtype`` and ``device``
        are torch's defaults if not given.
        """
        lengths, slots = config.lengths, config.model == "compressive"
        positions = lengths.mem_len - lengths.mem_len % lengths.compression_rate

        def zeros(length: int) -> tuple[Tensor, ...]:
            shape = length, batch, config.d_model
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers))

        valid = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(zeros(positions), zeros(lengths.c_mem_len) if slots else (), valid)

    def reset(self, done: Tensor) -> "Memory":
        """The memory in which the streams that are ``done``, boolean ``[B]``, remember nothing: what
        comes next is a new document. Raises ValueError for ``done`` of another shape, dtype or device."""
        if not self.mem:
            return self  # nothing is remembered of any stream
        batch, device = self.mem[0].shape[1], self.mem[0].device
        if done.dtype != torch.bool or done.shape != (batch,) or done.device != device:
            raise UserError(
                f"done was expected as boolean [{batch}] on {device}, true for each stream that starts over; "
                f"{done.dtype} {list(done.shape)} on {done.device} came."
            )
        valid = torch.full_like(done, EVERYTHING, dtype=torch.int64) if self.valid is None else self.valid
        return Memory(self.mem, self.c_mem, valid.masked_fill(done, 0))

    @property
    def mem_len(self) -> int:
        """M, in positions."""
        return len(self.mem[0]) if self.mem else 0

    @property
    def c_mem_len(self) -> int:
        """C, in slots."""
        return len(self.c_mem[0]) if self.c_mem else 0

    def positions(self, rate: int) -> int:
        """How many positions are remembered, where a slot stands for ``rate`` of them."""
        return self.mem_len + rate * self.c_mem_len


# So that torch.export takes a memory as input and output, and loads a program with an example of one; it is
# tensors and nothing else.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


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


def keep_newest(
    memory: Memory, inputs: Sequence[Tensor], mem_len: int, starts: Tensor | None = None
) -> Memory:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``starts [S, B]``: the
    newest ``mem_len`` positions of both; Transformer-XL forgets the others (section 3.2)."""
    mem = tuple(newest(parts, mem_len) for parts in followed_by(memory.mem, inputs))
    return followed(memory, Memory(mem, memory.c_mem), starts, len(inputs[0]))


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
    left_out: Tensor | None = None
    """How many of each stream's oldest new slots the reconstruction loss leaves out, int64 ``[B]``; None for
    none."""


def compress_oldest(
    memory: Memory,
    inputs: Sequence[Tensor],
    compress: Sequence[Callable[..., Tensor]],
    lengths: MemoryLengths,
    starts: Tensor | None = None,
    received: Callable[[int, int], Tensor | None] = lambda layer, positions: None,
) -> tuple[Memory, Compressed | None]:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``starts [S, B]``, of
    which what overflows has become compressed slots, by each layer's own f_c, ``[n·c, B, D]`` to
    ``[n, B, D]``. For an f_c that needs it, ``received`` gives the attention that so many of a layer's oldest
    positions received, ``[n·c, B]``.

    Returns it and what was compressed, or None where nothing overflowed. Slots are remembered without
    gradient, since f_c learns from its own loss. Source: Compressive Transformer (Rae et al. 2020, arXiv
    1911.05507), section 3.1 and algorithm 1.
    """
    past, S = followed_by(memory.mem, inputs), len(inputs[0])
    length, c = memory.mem_len + S, lengths.compression_rate
    n = slots_to_compress(length, lengths.mem_len, c)
    mem = tuple(newest(parts, length - n * c) for parts in past)
    if n == 0:
        return followed(memory, Memory(mem, memory.c_mem), starts, S, c), None
    old = tuple(cut(parts, 0, n * c) for parts in past)
    new = tuple(
        slots_of(f_c, x, n, received(layer, n * c))
        for layer, (f_c, x) in enumerate(zip(compress, old, strict=True))
    )
    slots = followed_by(memory.c_mem, [x.detach() for x in new])
    after = Memory(mem, tuple(newest(parts, lengths.c_mem_len) for parts in slots))
    left_out = slots_left_out(memory.valid, starts, memory.mem_len, n, c)
    return followed(memory, after, starts, S, c), Compressed(old, new, left_out)


def followed(before: Memory, after: Memory, starts: Tensor | None, segment_len: int, rate: int = 1) -> Memory:
    """``after`` with its ``valid``, where it follows ``before`` by a segment with ``starts [S, B]``."""
    remembered = before.positions(rate), after.positions(rate)
    return replace(after, valid=valid_afterwards(before.valid, starts, segment_len, *remembered))


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
    """A memory as ``mem.0``, …, ``c_mem.0``, …, and ``valid`` where it has one, as files have it."""
    tensors = {f"mem.{i}": mem.contiguous() for i, mem in enumerate(memory.mem)}
    tensors |= {f"c_mem.{i}": c_mem.contiguous() for i, c_mem in enumerate(memory.c_mem)}
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The memory of so many layers that [`memory_tensors`][] gives; ValueError for anything else."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in ("mem", "c_mem")}
    mem, c_mem = (tuple(tensors[n] for n in names if n in tensors) for names in kinds.values())
    if others := sorted(set(tensors) - {"valid"} - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    return Memory(mem, c_mem, tensors.get("valid"))
