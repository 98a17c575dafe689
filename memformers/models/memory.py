"""What a model remembers between segments, as a value: passed in, returned, and never stored on a module.

In the built-in memories, every past position is in exactly one place at any time: in the memory, in one slot,
or forgotten. ``documents.py`` decides which positions a query may see, and ``rules`` how a memory changes
with a segment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.files import atomic_write, user_path
from memformers.models.config import NetworkConfig
from memformers.models.documents import UNBOUNDED
from memformers.models.io import save_tensors
from memformers.models.sizes import MemorySizes

N_VALID = "n_valid"
STATE = "state"
PARTS = ("mem", "slots", "shift_state", "bptt_inputs")
"""The tensors of a layer's memory that all rules share."""


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """What one layer remembers of B streams, oldest first. Each tensor is ``[·, B, …]``.

    Examples:
        >>> import torch
        >>> from memformers import LayerMemory
        >>> past = LayerMemory(torch.zeros(32, 2, 64), torch.zeros(8, 2, 64))  # [M, B, D], [C, B, D]
        >>> past.mem_len, past.n_slots
        (32, 8)
    """

    mem: Tensor
    """``[M, B, D]``: the layer's newest inputs, unchanged, or shifted with ``token_shift``."""
    slots: Tensor
    """``[C, B, D]``: what the layer's rule keeps of older inputs; queries attend to it before ``mem``."""
    shift_state: Tensor | None = None
    """``[1, B, D]``: the newest input, for the token shift of the next one; None without a token shift."""
    bptt_inputs: Tensor | None = None
    """``[m·c, B, D]``: the inputs of the newest m slots. While f_c learns from the language model's loss, the
    slots are computed from them again. None without ``bptt``."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """Whatever else a rule needs, by name, each ``[·, B, …]``; only a layer's own ``attend`` reads it."""

    @property
    def mem_len(self) -> int:
        """M, in positions."""
        return len(self.mem)

    @property
    def n_slots(self) -> int:
        """C, in slots."""
        return len(self.slots)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors ``[·, B, …]``, by their names in files: ``mem``, ``slots`` …, ``state.NAME``."""
        named = {name: getattr(self, name) for name in PARTS}
        present = {name: tensor for name, tensor in named.items() if tensor is not None}
        return present | {f"{STATE}.{name}": tensor for name, tensor in self.state.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "LayerMemory":
        """The reverse of [`tensors`][memformers.models.memory.LayerMemory.tensors], ``[·, B, …]`` each."""
        prefix = f"{STATE}."
        state = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        named: Any = {name: x for name, x in tensors.items() if not name.startswith(prefix)}
        return cls(**named, state=state)

    @classmethod
    def nothing(cls, x: Tensor) -> "LayerMemory":
        """The memory of a layer with inputs ``x [·, B, D]`` before it has read anything."""
        none = x.new_empty(0, *x.shape[1:])
        return cls(none, none)

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerMemory":
        """The same memory with ``change`` applied to every tensor ``[·, B, …]``."""
        return LayerMemory.from_tensors({name: change(x) for name, x in self.tensors().items()})


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """The past of B parallel streams: a [`memformers.LayerMemory`][] of each layer, whose lengths may differ.

    Only with ``through_memory`` may it carry a gradient. A backward pass may still need the tensors: don't
    change them in place. Two memories are equal if all their tensors are.

    Examples:
        >>> import torch
        >>> from memformers import Memory, MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(vocab_size=65, n_layers=2))
        >>> memory = model(torch.randint(65, (64, 3))).memory  # of tokens [S, B]
        >>> memory
        Memory(2 layers, mem_len=64, n_slots=0, streams=3, torch.float32)
        >>> memory.layers[0].mem.shape  # [M, B, D]
        torch.Size([64, 3, 128])
        >>> memory.reset(torch.tensor([True, False, False])).n_valid[0].item()  # stream 0: a new document
        0
        >>> memory.streams(slice(2)).layers[0].mem.shape  # the first two streams
        torch.Size([64, 2, 128])
        >>> memory.save("memory.safetensors")
        >>> Memory.load("memory.safetensors") == memory
        True
    """

    layers: tuple[LayerMemory, ...] = ()
    """For each layer what it remembers; empty before the first segment."""
    n_valid: Tensor | None = None
    """int64 ``[B]``: how many of each stream's newest positions belong to its current document; a slot counts
    as ``compression_rate`` positions. None for all. Older positions are masked."""

    @classmethod
    def empty(
        cls,
        config: NetworkConfig,
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "Memory":
        """A zero-filled memory with the shapes of a full one (the compressive M rounded down to whole slots).
        Queries never see the zeros, so the output equals that of no memory. Shapes then stay the same if
        ``segment_len`` is a multiple of the compressive ``compression_rate``. It has no state of a rule's
        own."""

        def zeros(length: int) -> Tensor:
            return torch.zeros(length, batch, config.d_model, dtype=dtype, device=device)

        layers = tuple(
            LayerMemory(
                mem=zeros(size.mem_len - size.mem_len % size.group),
                slots=zeros(size.c_mem_len),
                shift_state=zeros(1) if size.has_shift_state else None,
                bptt_inputs=zeros(size.bptt_len) if size.bptt_len else None,
            )
            for size in config.memory_sizes
        )
        return cls(layers, torch.zeros(batch, dtype=torch.int64, device=device))

    def __repr__(self) -> str:
        if not self.layers:
            return "Memory(empty)"
        mem_len = in_short([layer.mem_len for layer in self.layers])
        n_slots = in_short([layer.n_slots for layer in self.layers])
        mem = self.layers[0].mem
        documents = "" if self.n_valid is None else ", documents"
        return (
            f"Memory({len(self.layers)} layers, mem_len={mem_len}, n_slots={n_slots}, "
            f"streams={mem.shape[1]}, {mem.dtype}{documents})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memory):
            return NotImplemented
        ours = self.tensors()
        theirs = other.tensors()
        return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())

    @property
    def mem_len(self) -> int:
        """M, in positions, of the layer that has the most."""
        return max([0, *(layer.mem_len for layer in self.layers)])

    @property
    def n_slots(self) -> int:
        """C, in slots, of the layer that has the most."""
        return max([0, *(layer.n_slots for layer in self.layers)])

    def n_positions(self, sizes: Sequence[MemorySizes]) -> int:
        """The positions of the layer that remembers the most, those of its slots by ``sizes`` included."""
        by_layer = zip(self.layers, sizes, strict=bool(self.layers))
        return max([0, *(layer.mem_len + size.compression_rate * layer.n_slots for layer, size in by_layer)])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        """The memory with ``change`` applied to its tensors, ``[·, B, …]``, and to ``n_valid`` as ``[1,
        B]``."""
        layers = tuple(layer.map(change) for layer in self.layers)
        return Memory(layers, None if self.n_valid is None else change(self.n_valid[None])[0])

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
        lengths = [tuple(memory.lengths()) for memory in memories]
        if len(different := dict.fromkeys(lengths)) > 1:
            raise UserError(
                f"expected memories of the same lengths, got {' and '.join(map(str, different))}; join "
                f"memories of one model that have read the same number of segments."
            )
        # Layer by layer, each tensor of all memories along the streams.
        layers = []
        for parts in zip(*(memory.layers for memory in memories), strict=True):
            tensors = [part.tensors() for part in parts]
            joined = {name: torch.cat([x[name] for x in tensors], dim=1) for name in tensors[0]}
            layers.append(LayerMemory.from_tensors(joined))
        if not layers or all(memory.n_valid is None for memory in memories):
            return cls(tuple(layers))
        return cls(tuple(layers), torch.cat([memory.valid_positions() for memory in memories]))

    def lengths(self) -> list[tuple[tuple[str, int], ...]]:
        """For each layer the names and lengths of its tensors."""
        return [tuple((name, len(x)) for name, x in layer.tensors().items()) for layer in self.layers]

    def valid_positions(self) -> Tensor:
        """``n_valid [B]``, unbounded where it is None."""
        if self.n_valid is not None:
            return self.n_valid
        mem = self.layers[0].mem
        return torch.full(mem.shape[1:2], UNBOUNDED, dtype=torch.int64, device=mem.device)

    def reset(self, done: Tensor) -> "Memory":
        """The memory without the past of the streams that are ``done``, boolean ``[B]``: their next segment
        starts a new document. Raises ValueError for another shape, dtype or device."""
        # Before the first segment, nothing is remembered of any stream.
        if not self.layers:
            return self
        n_valid = self.valid_positions()
        check_streams("done", done, torch.bool, n_valid.shape, n_valid.device)

        # Clear hidden values, too: NaN or infinity times a probability of 0 would be NaN.
        def clear(x: Tensor) -> Tensor:
            return x.masked_fill(done.view(1, -1, *[1] * (x.dim() - 2)), 0)

        layers = tuple(layer.map(clear) for layer in self.layers)
        return Memory(layers, n_valid.masked_fill(done, 0))

    def save(self, path: str | Path) -> None:
        """Write the memory to the safetensors file ``path``, which is replaced as a whole or not at all.
        Raises OSError if it can't be written."""
        with atomic_write(user_path(path)) as temporary:
            save_tensors(self.tensors(), temporary)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "Memory":
        """The memory that [`save`][memformers.models.memory.Memory.save] wrote to ``path``, on ``device``.
        Raises ValueError for any other file. A model checks the shapes of a memory that it is given, but
        can't tell whether another model made it."""
        try:
            tensors = load_file(user_path(path), str(device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read as a saved memory: {error}") from None
        try:
            return cls.from_tensors(tensors)
        except UserError as error:
            raise UserError(f"{path} is not a saved memory: {error}") from None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their names in files: ``0.mem``, ``0.slots`` …, ``n_valid``."""
        named = {} if self.n_valid is None else {N_VALID: self.n_valid.contiguous()}
        for i, layer in enumerate(self.layers):
            named |= {f"{i}.{name}": x.contiguous() for name, x in layer.tensors().items()}
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """The reverse of [`tensors`][memformers.models.memory.Memory.tensors]. Raises ValueError for other
        names."""
        # By layer, as in 0.mem; what has another name was not written by save.
        by_layer: dict[int, dict[str, Tensor]] = {}
        unknown = []
        for name, tensor in tensors.items():
            number, _, part = name.partition(".")
            if number.isdecimal() and (part in PARTS or part.startswith(f"{STATE}.")):
                by_layer.setdefault(int(number), {})[part] = tensor
            elif name != N_VALID:
                unknown.append(name)
        if unknown:
            raise UserError(f"it holds {', '.join(sorted(unknown))}, which a memory doesn't have.")
        if sorted(by_layer) != [*range(len(by_layer))] or not all(
            {"mem", "slots"} <= x.keys() for x in by_layer.values()
        ):
            raise UserError("it doesn't hold mem and slots of every layer.")
        layers = tuple(LayerMemory.from_tensors(by_layer[i]) for i in range(len(by_layer)))
        return cls(layers, tensors.get(N_VALID))


# So that torch.export takes a memory as input and output, and loads a program with an example of one.
for kind in (LayerMemory, Memory):
    torch.export.register_dataclass(kind, serialized_type_name=f"memformers.{kind.__name__}")
    torch.serialization.add_safe_globals([kind])


def in_short(lengths: Sequence[int]) -> str:
    """One length if all are the same, else all of them."""
    return str(lengths[0]) if len({*lengths}) == 1 else "|".join(map(str, lengths))


def check_streams(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    """Raise UserError unless ``tensor`` is None or has this dtype, shape and device."""
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
    """Raise UserError unless a ``method`` of a user's class returned a tensor of this ``shape``."""
    if not isinstance(output, Tensor) or output.shape != tuple(shape):
        got = list(output.shape) if isinstance(output, Tensor) else repr(output)
        raise UserError(f"{kind.__qualname__}.{method} returned {got}, expected a tensor {list(shape)}.")


def cut(parts: Sequence[Tensor], start: int, stop: int | None = None) -> Tensor:
    """The positions from ``start`` to ``stop`` of successive ``parts [·, B, D]``: a copy if they span several
    parts, or less than half of one: a view would keep the rest from being freed."""
    if stop is None:
        stop = sum(map(len, parts))
    pieces = []
    wholes = []
    for part in parts:
        piece = part[max(start, 0) : max(stop, 0)]
        if len(piece):
            pieces.append(piece)
            wholes.append(part)
        start -= len(part)
        stop -= len(part)
    # An empty view would keep a whole segment alive, too.
    if not pieces:
        return parts[0][:0].clone()
    if len(pieces) > 1:
        return torch.cat(pieces)
    # A view of at least half of a tensor costs no copy; of less, it would waste more than it saves.
    return pieces[0].clone() if 2 * len(pieces[0]) < len(wholes[0]) else pieces[0]
