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
from memformers.models.lengths import ByLayer, LayerLengths, by_layer

if TYPE_CHECKING:
    from memformers.models.config import ModelConfig


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    ``mem`` holds a tensor ``[M, B, D]`` a layer: that layer's inputs. ``c_mem`` holds a tensor
    ``[C, B, D]`` a layer, where each slot stands for ``compression_rate`` inputs older than all of
    ``mem``; it is empty for a model that doesn't compress. M, C and the rate are those of all layers, or each
    layer has its own. Neither carries a gradient, but ``mem`` does where the model was asked for it
    (``through_memory``). Both may be views of what a backward pass still needs: don't change them in place.

    ``valid``, int64 ``[B]``, says how many of each stream's newest positions belong to its running document,
    where a slot stands for ``compression_rate`` of them; None says all. A layer that remembers fewer sees all
    it has. What came before is hidden from queries ([`memformers.models.boundaries`][]).

    ``sources`` holds a tensor ``[m·c, B, D]`` a layer: the inputs that the newest m slots of ``c_mem`` stand
    for, without gradient, from which they are made anew while f_c learns from the language model's loss. It
    is empty for a model with ``bptt=0``.
    """

    mem: tuple[Tensor, ...]
    c_mem: tuple[Tensor, ...] = ()
    valid: Tensor | None = None
    sources: tuple[Tensor, ...] = ()

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
        layers, slots = config.layer_lengths, config.model == "compressive"

        def zeros(lengths: Sequence[int]) -> tuple[Tensor, ...]:
            shapes = [(length, batch, config.d_model) for length in lengths]
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

        valid = torch.zeros(batch, dtype=torch.int64, device=device)
        mem = zeros([own.mem_len - own.mem_len % own.compression_rate for own in layers])
        c_mem = zeros([own.c_mem_len for own in layers]) if slots else ()
        sources = [own.slots_anew * own.compression_rate for own in layers]
        return cls(mem, c_mem, valid, zeros(sources) if any(sources) else ())

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
        return replace(self, valid=valid.masked_fill(done, 0))

    def detach(self) -> "Memory":
        """The same memory without gradient."""
        mem, c_mem = (tuple(x.detach() for x in tensors) for tensors in (self.mem, self.c_mem))
        return replace(self, mem=mem, c_mem=c_mem)

    @property
    def mem_len(self) -> int:
        """M, in positions, of the layer that has the most."""
        return max(map(len, self.mem), default=0)

    @property
    def c_mem_len(self) -> int:
        """C, in slots, of the layer that has the most."""
        return max(map(len, self.c_mem), default=0)

    @property
    def sources_len(self) -> int:
        """m·c, in positions, of the layer that has the most."""
        return max(map(len, self.sources), default=0)

    def lengths(self, n_layers: int) -> list[tuple[int, int]]:
        """M and C of each of ``n_layers`` layers."""
        mem, c_mem = ([*map(len, parts)] or [0] * n_layers for parts in (self.mem, self.c_mem))
        return list(zip(mem, c_mem, strict=True))

    def positions(self, rate: ByLayer) -> int:
        """How many positions are remembered, where a slot stands for ``rate`` of them, by the layer that
        remembers the most."""
        lengths = self.lengths(len(self.mem) or len(self.c_mem))
        if not lengths:
            return 0
        rates = by_layer(rate, len(lengths), "rate")
        return max(M + c * C for (M, C), c in zip(lengths, rates, strict=True))


# So that torch.export takes a memory as input and output, and loads a program with an example of one; it is
# tensors and nothing else.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


@dataclass(frozen=True)
class MemoryLengths:
    """How much a model remembers: each length is that of all layers, or a tuple with one for each."""

    mem_len: ByLayer
    """M, in positions."""
    c_mem_len: ByLayer = 0
    """C, in slots."""
    compression_rate: ByLayer = 1
    """c, the positions that a slot stands for."""
    bptt: int = 0
    """How many compressions back f_c learns from the language model's loss."""
    segment_len: int = 1
    """S, in positions: a compression makes ⌈S / c⌉ slots after a whole segment."""

    def of_layers(self, n_layers: int) -> list[LayerLengths]:
        """The lengths of each of ``n_layers`` layers. Raises ValueError for a tuple of another length."""
        lengths = (
            by_layer(self.mem_len, n_layers, "mem_len"),
            by_layer(self.c_mem_len, n_layers, "c_mem_len"),
            by_layer(self.compression_rate, n_layers, "compression_rate"),
        )
        return [LayerLengths(*own, self.bptt, self.segment_len) for own in zip(*lengths, strict=True)]

    def check_kind(self, memory: Memory, model: str, n_layers: int) -> None:
        """Raise ValueError for a ``memory`` of a kind that ``model``, of ``n_layers`` layers, doesn't keep,
        or in which layers of the same lengths don't remember the same positions."""
        for name, mem in (("mem", memory.mem), ("c_mem", memory.c_mem), ("sources", memory.sources)):
            for layer, tensor in enumerate(mem):
                if tensor.dim() != 3:  # which may have no length at all
                    raise UserError(
                        f"{name} of layer {layer} was expected as [length, batch, d_model]; it is "
                        f"{list(tensor.shape)}. Use a memory as the model gives it."
                    )
            self._check_alike(name, mem, n_layers)
        for came, limit, memory_of in self._limits(memory, n_layers):
            if came and not limit:
                raise UserError(
                    f"{memory_of} was given to a model={model!r}, which has none; use it with the model that "
                    f"made it."
                )

    def check_fits(self, memory: Memory, model: str, n_layers: int) -> None:
        """Raise ValueError for a ``memory`` that ``model``, of ``n_layers`` layers, can't have made: another
        kind, or longer."""
        self.check_kind(memory, model, n_layers)
        for came, limit, memory_of in self._limits(memory, n_layers):
            if came > limit:
                raise UserError(
                    f"{memory_of} was given to a model={model!r}, which keeps {limit} at most; use it with "
                    f"the model that made it."
                )

    @property
    def _differ(self) -> bool:
        return any(isinstance(x, tuple) for x in (self.mem_len, self.c_mem_len, self.compression_rate))

    def _check_alike(self, name: str, mem: Sequence[Tensor], n_layers: int) -> None:
        of_each = self.of_layers(n_layers)
        for layer, (tensor, own) in enumerate(zip(mem, of_each, strict=False)):
            same = of_each.index(own) if self._differ else 0
            if len(tensor) != len(mem[same]):
                raise UserError(
                    f"{name} has {len(mem[same])} positions in layer {same} and {len(tensor)} in layer "
                    f"{layer}; layers of the same lengths remember the same positions."
                )

    def _limits(self, memory: Memory, n_layers: int) -> list[tuple[int, int, str]]:
        """Of all parts of each layer's memory: the length that came, the longest there can be, and how to
        name it. A memory of another depth is refused elsewhere."""
        limits = []
        for layer, own in enumerate(self.of_layers(n_layers)):
            where = f" in layer {layer}" if self._differ else ""
            parts = (
                (memory.mem, own.longest_memory, "a memory of", "positions"),
                (memory.c_mem, own.c_mem_len, "a compressed memory of", "slots"),
                (memory.sources, own.source_positions, "a memory with sources of", "positions"),
            )
            for tensors, longest, kind, unit in parts:
                for tensor in tensors[layer : layer + 1]:
                    limits.append((len(tensor), longest, f"{kind} {len(tensor)} {unit}{where}"))
        return limits


@dataclass(frozen=True)
class Leaving:
    """What leaves a memory after a segment."""

    positions: int
    """How many of its oldest positions."""
    slots: int
    """How many compressed slots they become; with 0 they are forgotten."""


def keep_newest(
    memory: Memory, inputs: Sequence[Tensor], mem_len: ByLayer, starts: Tensor | None = None
) -> Memory:
    """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``starts [S, B]``: the
    newest ``mem_len`` positions of both; Transformer-XL forgets the others (section 3.2)."""
    lengths = by_layer(mem_len, len(inputs), "mem_len")
    mem = tuple(map(newest, followed_by(memory.mem, inputs), lengths))
    return followed(memory, Memory(mem, memory.c_mem), starts, len(inputs[0]))


def slots_to_compress(length: int, mem_len: int, compression_rate: int) -> int:
    """n = ⌈(length − mem_len) / c⌉ slots bring a memory of ``length`` back to ``mem_len``; but a
    slot stands for c whole positions, so n ≤ ⌊length / c⌋, and up to c − 1 positions may remain."""
    overflow = max(length - mem_len, 0)
    return min(-(-overflow // compression_rate), length // compression_rate)


@dataclass(frozen=True)
class Compressed:
    """What one compression took and made: ``old [n·c, B, D]`` and ``new [n, B, D]``, a layer each;
    ``new`` still carries the gradient to f_c. A layer that compressed nothing, though another did, has n = 0.
    """

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
    layers, rates = lengths.of_layers(len(inputs)), lengths.compression_rate
    found = [sum(map(len, parts)) for parts in past]  # positions of each layer
    slots_of_layers = [
        slots_to_compress(length, own.mem_len, own.compression_rate)
        for length, own in zip(found, layers, strict=True)
    ]
    taken = [n * own.compression_rate for n, own in zip(slots_of_layers, layers, strict=True)]
    mem = tuple(newest(x, length - nc) for x, length, nc in zip(past, found, taken, strict=True))
    if not any(slots_of_layers):
        return followed(memory, replace(memory, mem=mem), starts, S, rates), None
    old = tuple(cut(parts, 0, nc).detach() for parts, nc in zip(past, taken, strict=True))
    new = tuple(
        slots_of(f_c, x, n, received(layer, len(x))) if n else x
        for layer, (f_c, x, n) in enumerate(zip(compress, old, slots_of_layers, strict=True))
    )
    slots = followed_by(memory.c_mem, [x.detach() for x in new])
    c_mem = tuple(newest(parts, own.c_mem_len) for parts, own in zip(slots, layers, strict=True))
    after = Memory(mem, c_mem)
    if any(own.slots_anew for own in layers):
        behind = zip(followed_by(memory.sources, old), layers, strict=True)
        after = replace(after, sources=tuple(newest(parts, own.source_positions) for parts, own in behind))
    left_out = slots_left_out_by_layer(memory, starts, slots_of_layers, layers)
    return followed(memory, after, starts, S, rates), Compressed(old, new, left_out)


def slots_left_out_by_layer(
    memory: Memory, starts: Tensor | None, slots: Sequence[int], layers: Sequence[LayerLengths]
) -> tuple[Tensor, ...] | None:
    """How many of each layer's new ``slots`` the reconstruction loss leaves out after a segment with ``starts
    [S, B]`` ([`slots_left_out`][]): int64 ``[B]`` a layer; None where all streams have but one document."""
    if memory.valid is None and starts is None:
        return None
    lengths = memory.lengths(len(layers))
    found: list[Tensor] = []
    of_each = [(M, n, own.compression_rate) for (M, _), n, own in zip(lengths, slots, layers, strict=True)]
    for layer, of_one in enumerate(of_each):
        if layer and of_one == of_each[layer - 1]:  # as are all layers of most models
            found.append(found[-1])
        else:
            left_out = slots_left_out(memory.valid, starts, *of_one)
            assert left_out is not None
            found.append(left_out)
    return tuple(found)


def followed(
    before: Memory, after: Memory, starts: Tensor | None, segment_len: int, rate: ByLayer = 1
) -> Memory:
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
    """A memory as ``mem.0``, …, ``c_mem.0``, …, and ``sources.0``, … and ``valid`` where it has them, as
    files have it."""
    tensors = {f"mem.{i}": mem.contiguous() for i, mem in enumerate(memory.mem)}
    tensors |= {f"c_mem.{i}": c_mem.contiguous() for i, c_mem in enumerate(memory.c_mem)}
    tensors |= {f"sources.{i}": sources.contiguous() for i, sources in enumerate(memory.sources)}
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The memory of so many layers that [`memory_tensors`][] gives; ValueError for anything else."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in ("mem", "c_mem", "sources")}
    mem, c_mem, sources = (tuple(tensors[n] for n in names if n in tensors) for names in kinds.values())
    if others := sorted(set(tensors) - {"valid"} - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    return Memory(mem, c_mem, tensors.get("valid"), sources)
