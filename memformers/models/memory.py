"""What a model remembers between segments, as a value: passed in, returned, and never kept on a module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.config import NetworkConfig
from memformers.models.documents import EVERYTHING, check_streams, without_hidden
from memformers.models.memory_sizes import Sizes


@dataclass(frozen=True, eq=False)
class Memory:
    """The past of B parallel streams, oldest first; M, C and the rate may differ between layers.

    Only ``mem`` may carry a gradient, with ``through_memory``. A backward pass may still need the tensors:
    don't change them in place. Two memories are equal if all their numbers are.

    Examples:
        >>> import torch
        >>> from memformers import Memory, MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(vocab_size=65, n_layers=2))
        >>> memory = model(torch.randint(65, (64, 3))).memory  # of tokens [S, B]
        >>> len(memory.mem), memory.mem[0].shape  # for each layer [M, B, D]
        (2, torch.Size([64, 3, 128]))
        >>> memory.reset(torch.tensor([True, False, False])).valid[0].item()  # stream 0 begins a new document
        0
        >>> memory.streams(slice(2)).mem[0].shape  # the first two streams
        torch.Size([64, 2, 128])
    """

    mem: tuple[Tensor, ...] = ()
    """For each layer ``[M, B, D]``: that layer's inputs."""
    c_mem: tuple[Tensor, ...] = ()
    """For each layer ``[C, B, D]``: slots, each for ``compression_rate`` inputs older than all of ``mem``;
    empty for a model that doesn't compress."""
    valid: Tensor | None = None
    """int64 ``[B]``: how many of each stream's newest positions its running document has, a slot counting as
    ``compression_rate``; None for all. Queries don't see earlier ones ([`memformers.models.documents`][])."""
    slot_inputs: tuple[Tensor, ...] = ()
    """For each layer ``[m·c, B, D]``: the inputs of the newest m slots of ``c_mem``, from which these are
    computed again while f_c learns from the language model's loss; empty with ``bptt=0``."""

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
        ``segment_len`` is a multiple of ``compression_rate``."""

        def zeros(lengths: Sequence[int]) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(n, batch, config.d_model, dtype=dtype, device=device) for n in lengths)

        sizes, is_compressive = config.memory_sizes, config.model == "compressive"
        mem = zeros([own.mem_len - is_compressive * (own.mem_len % own.compression_rate) for own in sizes])
        lengths = [own.c_mem_len for own in sizes], [own.slot_input_positions for own in sizes]
        c_mem, slot_inputs = (zeros(each) if any(each) else () for each in lengths)
        return cls(mem, c_mem, torch.zeros(batch, dtype=torch.int64, device=device), slot_inputs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memory):
            return NotImplemented
        ours, theirs = memory_tensors(self), memory_tensors(other)
        return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """What is kept by layer, tensors ``[·, B, D]``, by the names of the fields."""
        return {"mem": self.mem, "c_mem": self.c_mem, "slot_inputs": self.slot_inputs}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        """With ``change`` applied to its tensors, ``[·, B, D]``, and to ``valid`` as ``[1, B]``."""
        parts = {kind: tuple(map(change, tensors)) for kind, tensors in self.parts.items()}
        return Memory(**parts, valid=None if self.valid is None else change(self.valid[None])[0])

    def detach(self) -> "Memory":
        """The same memory without gradient."""
        return self.map(Tensor.detach)

    def streams(self, chosen: Any) -> "Memory":
        """The memory of the ``chosen`` streams: a slice, numbers or booleans ``[·]`` in a tensor or list."""
        return self.map(lambda x: x[:, chosen])

    @classmethod
    def join(cls, memories: Sequence["Memory"]) -> "Memory":
        """The memory of the streams of all ``memories``, one after the other."""
        each = {kind: zip(*(m.parts[kind] for m in memories), strict=True) for kind in memories[0].parts}
        parts = {kind: tuple(torch.cat(xs, dim=1) for xs in layers) for kind, layers in each.items()}
        valid = [memory.valid for memory in memories if memory.valid is not None]
        return cls(**parts, valid=torch.cat(valid) if valid else None)

    def reset(self, done: Tensor) -> "Memory":
        """The memory in which the streams that are ``done``, boolean ``[B]``, remember nothing: their next
        segment begins a new document. Raises ValueError for another shape, dtype or device."""
        if (one := next((x for part in self.parts.values() for x in part), None)) is None:
            return self  # nothing is remembered of any stream
        check_streams("done", done, torch.bool, one.shape[1:2], one.device)
        valid = torch.full_like(done, EVERYTHING, dtype=torch.int64) if self.valid is None else self.valid
        return replace(self.hidden_from(done), valid=valid.masked_fill(done, 0))

    def hidden_from(self, streams: Tensor) -> "Memory":
        """With 0 for what is not finite in these ``streams``, boolean ``[B]``, of which no query sees it."""
        return self.map(lambda x: without_hidden(x, streams.expand(len(x), -1)) if x.dim() == 3 else x)

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
        mem, c_mem = ([*map(len, parts)] or [0] * n_layers for parts in (self.mem, self.c_mem))
        return list(zip(mem, c_mem, strict=True))

    def positions(self, sizes: Sizes) -> int:
        """How many positions the layer with the most remembers, those of its slots by ``sizes`` included."""
        each = zip(self.lengths(len(sizes)), sizes, strict=True)
        return max(M + own.compression_rate * C for (M, C), own in each)


# So that torch.export takes a memory as input and output, and loads a program with an example of one.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


def check_memory(
    memory: Any, x: Tensor, n_layers: int, sizes: Sizes | None = None, *, complete: bool = False
) -> Memory:
    """``memory``, or for None an empty one. UserError unless it fits ``n_layers`` layers of input ``x [S, B,
    D]`` and ``sizes``, layers of one size alike; with ``complete``, also if longer than they can make it."""
    memory = Memory() if memory is None else memory
    if not isinstance(memory, Memory):
        raise UserError(f"expected memory to be a Memory or None, got a {type(memory).__name__}.")
    settings = [(own.mem_len, own.c_mem_len, own.compression_rate) for own in sizes or ()]
    limits = [(own.longest_memory, own.c_mem_len, own.slot_input_positions) for own in sizes or ()]
    for part, (name, tensors) in enumerate(memory.parts.items()):
        if tensors and len(tensors) != n_layers:
            n = len(tensors)
            raise UserError(f"expected {name} of {n_layers} layers, got {n}; use a memory of this model.")
        for i, tensor in enumerate(tensors):
            length = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
            wanted = torch.Size((length, *x.shape[1:]))
            check_streams(f"{name} of layer {i}", tensor, x.dtype, wanted, x.device)
            if not limits:
                continue
            first, most, n = settings.index(settings[i]), limits[i][part], len(tensor)
            if n != (other := len(tensors[first])) or (complete and n > most) or (n and not most):
                raise UserError(
                    f"{name} has length {n} in layer {i}, where this model keeps at most {most}, and {other} "
                    f"in layer {first}; use it with the model that made it."
                )
    check_streams("a memory's valid", memory.valid, torch.int64, x.shape[1:2], x.device)
    for i, (inputs, own) in enumerate(zip(memory.slot_inputs, sizes or (), strict=False)):
        slots, c, n = len(memory.c_mem[i]) if memory.c_mem else 0, own.compression_rate, len(inputs)
        if n % c or n > slots * c:
            raise UserError(
                f"expected slot_inputs of some of {slots} slots of {c}, got {n}; use it as a model gives it."
            )
    return memory


def memory_tensors(memory: Memory) -> dict[str, Tensor]:
    """The tensors that a memory has, by their names in files: ``mem.0``, ``c_mem.0`` and so on, ``valid``."""
    tensors = {f"{kind}.{i}": x.contiguous() for kind, xs in memory.parts.items() for i, x in enumerate(xs)}
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The reverse of [`memory_tensors`][] for ``n_layers`` layers. Raises ValueError for other tensors."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in Memory().parts}
    if others := sorted(set(tensors) - {"valid"} - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    parts = {kind: tuple(tensors[n] for n in names if n in tensors) for kind, names in kinds.items()}
    return Memory(**parts, valid=tensors.get("valid"))
