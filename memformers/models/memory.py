"""What a model remembers between segments, as a value: passed in, returned, and never stored on a module; and
how it grows with each segment. Which of it a query may see is in ``documents.py``.

At any time, every past position is in exactly one place: in the memory, in one slot of the compressed memory,
or forgotten. ``doc_starts [S, B]`` is true where a document starts, and ``valid [B]`` of the newest
positions, c of them a slot, belong to the current one. All that is older stays in the memory, but no query
sees it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.files import atomic_write, user_path
from memformers.common.text import UserError
from memformers.models.config import MemorySizes, NetworkConfig
from memformers.models.documents import n_masked_slots
from memformers.models.io import save_tensors

UNBOUNDED = 1 << 62
"""A number of positions larger than any memory: all of them are valid."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The past of B parallel streams, oldest first; M, C and the rate may differ between layers.

    Only with ``through_memory``, ``mem``, ``before`` and the slots of a custom memory may carry a gradient. A
    backward pass may still need the tensors: don't change them in place. Two memories are equal if all their
    tensors are.

    Examples:
        >>> import torch
        >>> from memformers import Memory, MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(vocab_size=65, n_layers=2))
        >>> memory = model(torch.randint(65, (64, 3))).memory  # of tokens [S, B]
        >>> len(memory.mem), memory.mem[0].shape  # for each layer [M, B, D]
        (2, torch.Size([64, 3, 128]))
        >>> memory.reset(torch.tensor([True, False, False])).valid[0].item()  # stream 0 starts a new document
        0
        >>> memory.streams(slice(2)).mem[0].shape  # the first two streams
        torch.Size([64, 2, 128])
        >>> memory.save("memory.safetensors")
        >>> Memory.load("memory.safetensors") == memory
        True
    """

    mem: tuple[Tensor, ...] = ()
    """For each layer ``[M, B, D]``: that layer's inputs, shifted with ``token_shift``."""
    c_mem: tuple[Tensor, ...] = ()
    """For each layer ``[C, B, D]``, older than all of ``mem``: slots, each for ``compression_rate`` inputs,
    or the inputs that a selective memory keeps; empty for a model that has neither."""
    valid: Tensor | None = None
    """int64 ``[B]``: how many of each stream's newest positions its current document has, a slot counting as
    ``compression_rate``; None for all. Queries don't see earlier ones."""
    slot_inputs: tuple[Tensor, ...] = ()
    """For each layer ``[m·c, B, D]``: the inputs of the newest m slots of ``c_mem``, from which these are
    computed again while f_c learns from the language model's loss; empty with ``bptt=0``."""
    before: tuple[Tensor, ...] = ()
    """For each layer ``[1, B, D]``: the newest input, which a token shift adds to the next one; empty without
    ``token_shift``."""

    @classmethod
    def empty(
        cls,
        config: NetworkConfig,
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "Memory":
        """An empty memory with the shapes of a full one, the compressive M rounded down to whole slots: zeros
        that no query sees, from which a model computes the same as from none. Shapes then stay the same if
        ``segment_len`` is a multiple of the compressive ``compression_rate``."""

        def zeros(lengths: Sequence[int]) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(n, batch, config.d_model, dtype=dtype, device=device) for n in lengths)

        sizes = config.memory_sizes
        mem = zeros([size.mem_len - size.mem_len % size.group for size in sizes])
        lengths = zip(*((s.c_mem_len, s.slot_input_positions, s.predecessors) for s in sizes), strict=True)
        c_mem, *others = (zeros(by_layer) if any(by_layer) else () for by_layer in lengths)
        return cls(mem, c_mem, torch.zeros(batch, dtype=torch.int64, device=device), *others)

    def save(self, path: str | Path) -> None:
        """Write the memory to the safetensors file ``path``, which is replaced as a whole or not at all.
        Raises OSError if it can't be written."""
        with atomic_write(user_path(path)) as temporary:
            save_tensors(memory_tensors(self), temporary)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "Memory":
        """The memory that [`save`][memformers.models.memory.Memory.save] wrote to ``path``, on ``device``.
        Raises ValueError for any other file. A model checks the shapes of a memory that it is given, but
        can't tell whether another model made it."""
        try:
            tensors = load_file(user_path(path), str(device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read as a saved memory: {error}") from None
        layers = [int(name.rpartition(".")[2]) for name in tensors if name.rpartition(".")[2].isdecimal()]
        try:
            return memory_from_tensors(tensors, max(layers, default=-1) + 1)
        except UserError as error:
            raise UserError(f"{path} is not a saved memory: {error}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memory):
            return NotImplemented
        ours, theirs = memory_tensors(self), memory_tensors(other)
        return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """The tensors of each layer, ``[·, B, D]``, by the names of the fields."""
        names = ("mem", "c_mem", "slot_inputs", "before")
        return {name: getattr(self, name) for name in names}

    def layers(self, n_layers: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """``mem [M, B, D]`` and ``c_mem [C, B, D]`` of each of ``n_layers`` layers; None where there is
        none."""
        nothing = (None,) * n_layers
        return zip(self.mem or nothing, self.c_mem or nothing, strict=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        """The memory with ``change`` applied to its tensors, ``[·, B, D]``, and to ``valid`` as ``[1,
        B]``."""
        parts = {name: tuple(map(change, tensors)) for name, tensors in self.parts.items()}
        return Memory(**parts, valid=None if self.valid is None else change(self.valid[None])[0])

    def detach(self) -> "Memory":
        """The same memory without gradient."""
        return self.map(Tensor.detach)

    def streams(self, chosen: Any) -> "Memory":
        """The memory of the ``chosen`` streams: a slice, numbers or booleans ``[·]`` in a tensor or list."""
        return self.map(lambda x: x[:, chosen])

    @classmethod
    def join(cls, memories: Sequence["Memory"]) -> "Memory":
        """The memory of the streams of all ``memories``, one after the other. Raises ValueError unless all
        have the same lengths."""
        lengths = [tuple(tuple(map(len, xs)) for xs in memory.parts.values()) for memory in memories]
        if len(different := dict.fromkeys(lengths)) > 1:
            raise UserError(
                f"expected memories of the same lengths, got {' and '.join(map(str, different))}; join "
                f"memories of one model that have read the same number of segments."
            )
        columns = zip(*(memory.parts.values() for memory in memories), strict=True)  # part by part
        mem, c_mem, slot_inputs, before = (
            tuple(torch.cat(xs, dim=1) for xs in zip(*column, strict=True)) for column in columns
        )
        joined = cls(mem, c_mem, None, slot_inputs, before)
        if all(memory.valid is None for memory in memories) or not any(joined.parts.values()):
            return joined
        return replace(joined, valid=torch.cat([memory.valid_positions() for memory in memories]))

    def valid_positions(self) -> Tensor:
        """``valid [B]``, unbounded where it is None."""
        x = next(x for xs in self.parts.values() for x in xs)
        unbounded = torch.full(x.shape[1:2], UNBOUNDED, dtype=torch.int64, device=x.device)
        return unbounded if self.valid is None else self.valid

    def reset(self, done: Tensor) -> "Memory":
        """The memory in which the streams that are ``done``, boolean ``[B]``, remember nothing: their next
        segment starts a new document. Raises ValueError for another shape, dtype or device."""
        if not any(self.parts.values()):
            return self  # nothing is remembered of any stream
        valid = self.valid_positions()
        check_streams("done", done, torch.bool, valid.shape, valid.device)
        cleared = self.map(lambda x: x.masked_fill(done[:, None], 0) if x.dim() == 3 else x)
        return replace(cleared, valid=valid.masked_fill(done, 0))

    @property
    def mem_len(self) -> int:
        """M, in positions, of the layer that has the most."""
        return max(map(len, self.mem), default=0)

    @property
    def c_mem_len(self) -> int:
        """C, in slots, of the layer that has the most."""
        return max(map(len, self.c_mem), default=0)

    def lengths(self, n_layers: int) -> list[tuple[int, int]]:
        """M and C of each of ``n_layers`` layers."""
        mem, c_mem = ([*map(len, xs)] or [0] * n_layers for xs in (self.mem, self.c_mem))
        return list(zip(mem, c_mem, strict=True))

    def positions(self, sizes: Sequence[MemorySizes]) -> int:
        """The positions of the layer that remembers the most, those of its slots by ``sizes`` included."""
        lengths = zip(self.lengths(len(sizes)), sizes, strict=True)
        return max(M + size.compression_rate * C for (M, C), size in lengths)


# So that torch.export takes a memory as input and output, and loads a program with an example of one.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


def check_streams(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    """Raise UserError unless ``tensor``, of any shape, is None or has this dtype, shape and device."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise UserError(f"expected {name} as a torch.Tensor, got {type(tensor).__name__}; convert it.")
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise UserError(
            f"expected {name} as {dtype} {list(shape)} on {device}, got {tensor.dtype} {list(tensor.shape)} "
            f"on {tensor.device}; it must match the model, batch and device of the input."
        )


def check_returned(kind: type, method: str, output: Any, shape: Sequence[int]) -> None:
    """Raise UserError unless a ``method`` of a class of the user returned a tensor of this ``shape``."""
    if not isinstance(output, Tensor) or output.shape != tuple(shape):
        got = list(output.shape) if isinstance(output, Tensor) else repr(output)
        raise UserError(f"{kind.__qualname__}.{method} returned {got}, expected a tensor {list(shape)}.")


def check_memory(memory: Any, x: Tensor, sizes: Sequence[MemorySizes]) -> Memory:
    """``memory``, or an empty one for None. UserError unless a model whose layers have these ``sizes`` can
    have made it of streams with inputs ``x [S, B, D]``."""
    memory = Memory() if memory is None else memory
    if not isinstance(memory, Memory):
        raise UserError(f"expected memory to be a Memory or None, got a {type(memory).__name__}.")
    settings = [(size.mem_len, size.c_mem_len, size.compression_rate) for size in sizes]
    predecessors = max([0, *(size.predecessors for size in sizes)])  # of all layers for a shift in any
    for name, tensors in memory.parts.items():
        if tensors and len(tensors) != len(sizes):
            raise UserError(
                f"expected {name} of {len(sizes)} layers, got {len(tensors)}; use a memory of this model."
            )
        for i, (tensor, size) in enumerate(zip(tensors, sizes if tensors else (), strict=True)):
            n = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
            check_streams(f"{name} of layer {i}", tensor, x.dtype, torch.Size((n, *x.shape[1:])), x.device)
            limits = {"mem": size.longest_memory, "c_mem": size.c_mem_len, "before": predecessors}
            limit, first = limits.get(name, size.slot_input_positions), settings.index(settings[i])
            if n > limit or n != len(tensors[first]):  # layers of one size have one length
                raise UserError(
                    f"{name} has length {n} in layer {i}, where this model keeps at most {limit}, and "
                    f"{len(tensors[first])} in layer {first}; use it with the model that made it."
                )
    if any(memory.parts.values()) and sum(map(len, memory.before)) < sum(s.predecessors for s in sizes):
        raise UserError(
            "a model with token_shift also needs the newest input of each layer, memory.before; use the "
            "memory of this model."
        )
    check_streams("a memory's valid", memory.valid, torch.int64, x.shape[1:2], x.device)
    for i, (inputs, size) in enumerate(zip(memory.slot_inputs, sizes, strict=False)):
        slots, c, n = len(memory.c_mem[i]) if memory.c_mem else 0, size.compression_rate, len(inputs)
        if n % c or n > slots * c:
            raise UserError(
                f"expected slot_inputs of some of {slots} slots of {c}, got {n}; use it as a model returns "
                f"it."
            )
    return memory


def memory_tensors(memory: Memory) -> dict[str, Tensor]:
    """The tensors of a memory, by their names in files: ``mem.0``, ``c_mem.0`` and so on, ``valid``."""
    tensors = {f"{name}.{i}": x.contiguous() for name, xs in memory.parts.items() for i, x in enumerate(xs)}
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The reverse of [`memory_tensors`][] for ``n_layers`` layers. Raises ValueError for other tensors."""
    names = {part: [f"{part}.{i}" for i in range(n_layers)] for part in Memory().parts}
    if others := sorted(set(tensors) - {"valid"} - {name for listed in names.values() for name in listed}):
        raise UserError(f"it holds {', '.join(others)}, which a memory of {n_layers} layers doesn't have.")
    parts = {
        part: tuple(tensors[name] for name in listed if name in tensors) for part, listed in names.items()
    }
    return Memory(**parts, valid=tensors.get("valid"))


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


def truncate_memory(memory: Memory, inputs: Sequence[Tensor], sizes: Sequence[MemorySizes]) -> Memory:
    """The newest positions of memory and layer inputs, ``[S, B, D]`` each (Transformer-XL, section 3.2)."""
    mem = []
    for i, (x, size) in enumerate(zip(inputs, sizes, strict=True)):
        past = (*memory.mem[i : i + 1], x)  # nothing is remembered before the first segment
        mem.append(cut(past, size.n_evicted(sum(map(len, past)))))
    return Memory(tuple(mem))


@dataclass(frozen=True)
class Compressed:
    """What each layer compressed: ``old [n·c, B, D]``, n ≥ 0, to ``new [n, B, D]`` with f_c's gradient."""

    old: list[Tensor]
    new: list[Tensor]
    n_masked: list[Tensor] | None
    """How many of each stream's oldest new slots the loss ignores, int64 ``[B]`` a layer; None: none."""


def compress_memory(
    memory: Memory,
    inputs: Sequence[Tensor],
    compress: Sequence[Callable[[Tensor], Tensor]],
    sizes: Sequence[MemorySizes],
    doc_starts: Tensor | None = None,
) -> tuple[Memory, Compressed | None]:
    """The memory after a segment with layer inputs ``[S, B, D]`` and ``doc_starts [S, B]``, and what was
    compressed, if anything: each layer's f_c makes slots ``[n, B, D]``, remembered without gradient, of the
    positions that overflow, ``[n·c, B, D]`` (Rae et al. 2020, arXiv 1911.05507, algorithm 1)."""
    mem, c_mem, slot_inputs, old, new = [], [], [], [], []
    for i, (x, f_c, size) in enumerate(zip(inputs, compress, sizes, strict=True)):
        past = (*memory.mem[i : i + 1], x)  # nothing is remembered before the first segment
        n = size.n_evicted(sum(map(len, past)))  # n·c
        mem.append(cut(past, n))
        old.append(cut(past, 0, n).detach())
        new.append(slots_of(f_c, old[i], size.compression_rate))
        slots = (*memory.c_mem[i : i + 1], new[i].detach())
        c_mem.append(cut(slots, sum(map(len, slots)) - size.c_mem_len))
        kept = (*memory.slot_inputs[i : i + 1], old[i])
        slot_inputs.append(cut(kept, sum(map(len, kept)) - size.slot_input_positions))
    if not any(map(len, old)):
        return replace(memory, mem=tuple(mem)), None
    n_masked = None
    if memory.valid is not None or doc_starts is not None:
        n_masked = [
            n_masked_slots(memory.valid, doc_starts, M, len(x), size.compression_rate)
            for (M, _), x, size in zip(memory.lengths(len(sizes)), new, sizes, strict=True)
        ]
    kept_inputs = tuple(slot_inputs) if any(map(len, slot_inputs)) else ()
    return Memory(tuple(mem), tuple(c_mem), slot_inputs=kept_inputs), Compressed(old, new, n_masked)


def slots_of(compress: Callable[[Tensor], Tensor], mem: Tensor, rate: int) -> Tensor:
    """The slots ``[n, B, D]`` that f_c makes of ``mem [n·c, B, D]``, in the dtype of ``mem`` under autocast
    too. Raises ValueError for slots of another shape."""
    if not len(mem):
        return mem
    slots, shape = compress(mem), (len(mem) // rate, *mem.shape[1:])
    if not isinstance(slots, Tensor) or slots.shape != shape:
        module = compress.args[0] if isinstance(compress, partial) else compress
        check_returned(type(module), "forward", slots, shape)
    return slots.to(mem.dtype)
