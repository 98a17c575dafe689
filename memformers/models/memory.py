"""What a model remembers between segments, as a value: passed in, returned, and never kept on a module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.boundaries import EVERYTHING, check_streams
from memformers.models.config import NetworkConfig
from memformers.models.kinds import kind_of
from memformers.models.lengths import LayerLengths


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    M, C and the rate may differ between layers. Memory carries no gradient, except ``mem`` if the model was
    called with ``through_memory``. Tensors may be views of those that a backward pass still needs: don't
    change them in place.

    Examples:
        >>> import torch
        >>> from memformers import Memory, MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(vocab_size=65, n_layers=2))
        >>> memory = model(torch.randint(65, (64, 3))).memory  # of tokens [S, B]
        >>> len(memory.mem), memory.mem[0].shape  # for each layer [M, B, D]
        (2, torch.Size([64, 3, 128]))
        >>> memory.reset(torch.tensor([True, False, False])).valid[0].item()  # stream 0 begins a new document
        0
    """

    mem: tuple[Tensor, ...]
    """For each layer ``[M, B, D]``: that layer's inputs."""
    c_mem: tuple[Tensor, ...] = ()
    """For each layer ``[C, B, D]``, where each slot represents ``compression_rate`` inputs that are older
    than all of ``mem``; empty for a model that doesn't compress."""
    valid: Tensor | None = None
    """int64 ``[B]``: the number of each stream's newest positions that belong to its running document, where
    a slot counts as ``compression_rate`` positions; None means all. A layer that remembers fewer positions
    sees all of them. Earlier positions are hidden from queries ([`memformers.models.boundaries`][])."""
    slot_inputs: tuple[Tensor, ...] = ()
    """For each layer ``[m·c, B, D]``: the inputs that the newest m slots of ``c_mem`` represent, without
    gradient. From them, the slots are computed again while f_c learns from the language model's loss. Empty
    for a model with ``bptt=0``."""

    @classmethod
    def empty(
        cls,
        config: NetworkConfig,
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "Memory":
        """An empty memory with the shapes of a full one: zeros that no query sees.

        A model computes the same from it as from no memory, but shapes are then the same in every segment if
        ``segment_len`` is a multiple of ``compression_rate``. ``mem_len`` is rounded down to whole slots, so
        that the first document begins at the edge of a slot. ``dtype`` and ``device`` are torch's defaults if
        not given.
        """
        layers, slots = config.layer_lengths, "c_mem" in kind_of(config.model).takes

        def zeros(lengths: Sequence[int]) -> tuple[Tensor, ...]:
            shapes = [(length, batch, config.d_model) for length in lengths]
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

        valid = torch.zeros(batch, dtype=torch.int64, device=device)
        mem = zeros([own.mem_len - own.mem_len % own.compression_rate for own in layers])
        c_mem = zeros([own.c_mem_len for own in layers]) if slots else ()
        slot_inputs = [own.slot_input_positions for own in layers]
        return cls(mem, c_mem, valid, zeros(slot_inputs) if any(slot_inputs) else ())

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """What is kept by layer, tensors ``[·, B, D]``, by the names of the fields."""
        return {"mem": self.mem, "c_mem": self.c_mem, "slot_inputs": self.slot_inputs}

    def reset(self, done: Tensor) -> "Memory":
        """The memory in which the streams that are ``done``, boolean ``[B]``, remember nothing, since their
        next segment begins a new document. Raises ValueError for ``done`` of another shape, dtype or
        device."""
        if (one := next((x for part in self.parts.values() for x in part), None)) is None:
            return self  # nothing is remembered of any stream
        check_streams("done", done, torch.bool, one.shape[1:2], one.device)
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

    def lengths(self, n_layers: int) -> list[tuple[int, int]]:
        """M and C of each of ``n_layers`` layers."""
        mem, c_mem = ([*map(len, parts)] or [0] * n_layers for parts in (self.mem, self.c_mem))
        return list(zip(mem, c_mem, strict=True))

    def positions(self, lengths: Sequence[LayerLengths]) -> int:
        """The number of positions that the layer with the most remembers, where a slot counts as the
        ``compression_rate`` of its layer's ``lengths``."""
        each = zip(self.lengths(len(lengths)), lengths, strict=True)
        return max(M + own.compression_rate * C for (M, C), own in each)


# So that torch.export takes a memory as input and output, and loads a program with an example of one; it is
# tensors and nothing else.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


def check_memory(memory: Memory, x: Tensor, n_layers: int) -> None:
    """Raise UserError unless each part of ``memory``, empty or one tensor a layer, fits a model of
    ``n_layers`` layers whose input is ``x [S, B, D]``."""
    for name, tensors in memory.parts.items():
        if tensors and len(tensors) != n_layers:
            raise UserError(
                f"expected {name} of {n_layers} layers, one tensor each, got {len(tensors)}; use a memory of "
                f"this model."
            )
        for layer, tensor in enumerate(tensors):
            if tensor.dim() != 3 or tensor.shape[1:] != x.shape[1:]:
                raise UserError(
                    f"expected {name} of layer {layer} as [length, batch, d_model] = "
                    f"[·, {x.shape[1]}, {x.shape[2]}], got {list(tensor.shape)}; start from no memory for "
                    f"another batch, and use a memory with the model that made it."
                )
            if tensor.dtype != x.dtype or tensor.device != x.device:
                raise UserError(
                    f"expected {name} of layer {layer} as {x.dtype} on {x.device}, in which the model works, "
                    f"got {tensor.dtype} on {tensor.device}; move it there, or start from no memory."
                )
    check_streams("a memory's valid", memory.valid, torch.int64, x.shape[1:2], x.device)


def check_lengths(memory: Memory, config: NetworkConfig, *, complete: bool = False) -> None:
    """Raise UserError for a ``memory`` of a kind that a model of ``config`` doesn't keep, or in which layers
    of the same lengths don't remember the same positions; with ``complete``, also for one that is longer
    than the model can have made it."""
    layers = config.layer_lengths
    settings = [(own.mem_len, own.c_mem_len, own.compression_rate) for own in layers]
    limits = [
        ("a memory of {} positions", [own.longest_memory for own in layers]),
        ("a compressed memory of {} slots", [own.c_mem_len for own in layers]),
        ("a memory with slot_inputs of {} positions", [own.slot_input_positions for own in layers]),
    ]
    for (name, tensors), (said, longest) in zip(memory.parts.items(), limits, strict=True):
        for layer, tensor in enumerate(tensors):
            same = settings.index(settings[layer])
            if len(tensor) != len(tensors[same]):
                raise UserError(
                    f"{name} has {len(tensors[same])} positions in layer {same} and {len(tensor)} in layer "
                    f"{layer}; layers of the same lengths remember the same positions."
                )
            if (complete and len(tensor) > longest[layer]) or (len(tensor) and not longest[layer]):
                raise UserError(
                    f"{said.format(len(tensor))} in layer {layer} was given to a model={config.model!r}, "
                    f"which keeps {longest[layer]} at most; use it with the model that made it."
                )


def memory_tensors(memory: Memory) -> dict[str, Tensor]:
    """The tensors of a memory by their names in files: ``mem.0``, …, ``c_mem.0``, …, and ``slot_inputs.0``, …
    and ``valid`` if the memory has them."""
    tensors = {f"{kind}.{i}": x.contiguous() for kind, xs in memory.parts.items() for i, x in enumerate(xs)}
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The memory of ``n_layers`` layers from the result of [`memory_tensors`][]. Raises ValueError for other
    tensors."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in Memory(()).parts}
    if others := sorted(set(tensors) - {"valid"} - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    parts = {kind: tuple(tensors[n] for n in names if n in tensors) for kind, names in kinds.items()}
    return Memory(**parts, valid=tensors.get("valid"))


def with_streams(memory: Memory, change: Callable[[Tensor], Tensor]) -> Memory:
    """The memory of the streams that ``change`` chooses from, or adds to, a tensor ``[·, B, …]``."""
    parts = {kind: tuple(map(change, tensors)) for kind, tensors in memory.parts.items()}
    return Memory(**parts, valid=None if memory.valid is None else change(memory.valid[None])[0])


def some_streams(memory: Memory, streams: slice) -> Memory:
    """The memory of these ``streams``, as views."""
    return with_streams(memory, lambda tensor: tensor[:, streams])


def joined_streams(memories: Sequence[Memory]) -> Memory:
    """The memory of the streams of all ``memories``, one after the other."""
    if len(memories) == 1:
        return memories[0]
    parts = {
        kind: tuple(torch.cat(xs, dim=1) for xs in zip(*(m.parts[kind] for m in memories), strict=True))
        for kind in memories[0].parts
    }
    valid = [memory.valid for memory in memories if memory.valid is not None]
    return Memory(**parts, valid=torch.cat(valid) if valid else None)
