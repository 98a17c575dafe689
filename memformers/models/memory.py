"""What a model remembers between segments, as a value: passed in, returned, and never kept on a module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.boundaries import EVERYTHING
from memformers.models.lengths import ByLayer, by_layer

if TYPE_CHECKING:
    from memformers.models.config import ModelConfig


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    ``mem`` has a tensor ``[M, B, D]`` for each layer: that layer's inputs. ``c_mem`` has a tensor
    ``[C, B, D]`` for each layer, where each slot represents ``compression_rate`` inputs that are older than
    all of ``mem``; it is empty for a model that doesn't compress. M, C and the rate may differ between
    layers. Memory carries no gradient, except ``mem`` if the model was called with ``through_memory``. Both
    may be views of tensors that a backward pass still needs: don't change them in place.

    ``valid``, int64 ``[B]``, is the number of each stream's newest positions that belong to its running
    document, where a slot counts as ``compression_rate`` positions; None means all. A layer that remembers
    fewer positions sees all of them. Earlier positions are hidden from queries
    ([`memformers.models.boundaries`][]).

    ``slot_inputs`` has a tensor ``[m·c, B, D]`` for each layer: the inputs that the newest m slots of
    ``c_mem`` represent, without gradient. From them, the slots are computed again while f_c learns from the
    language model's loss. It is empty for a model with ``bptt=0``.
    """

    mem: tuple[Tensor, ...]
    c_mem: tuple[Tensor, ...] = ()
    valid: Tensor | None = None
    slot_inputs: tuple[Tensor, ...] = ()

    @classmethod
    def empty(
        cls,
        config: "ModelConfig",
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
        layers, slots = config.layer_lengths, config.model == "compressive"

        def zeros(lengths: Sequence[int]) -> tuple[Tensor, ...]:
            shapes = [(length, batch, config.d_model) for length in lengths]
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

        valid = torch.zeros(batch, dtype=torch.int64, device=device)
        mem = zeros([own.mem_len - own.mem_len % own.compression_rate for own in layers])
        c_mem = zeros([own.c_mem_len for own in layers]) if slots else ()
        slot_inputs = [own.slots_anew * own.compression_rate for own in layers]
        return cls(mem, c_mem, valid, zeros(slot_inputs) if any(slot_inputs) else ())

    def reset(self, done: Tensor) -> "Memory":
        """The memory in which the streams that are ``done``, boolean ``[B]``, remember nothing, since their
        next segment begins a new document. Raises ValueError for ``done`` of another shape, dtype or
        device."""
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
        return max(map(len, self.slot_inputs), default=0)

    def lengths(self, n_layers: int) -> list[tuple[int, int]]:
        """M and C of each of ``n_layers`` layers."""
        mem, c_mem = ([*map(len, parts)] or [0] * n_layers for parts in (self.mem, self.c_mem))
        return list(zip(mem, c_mem, strict=True))

    def positions(self, rate: ByLayer) -> int:
        """The number of positions that the layer with the most remembers, where a slot counts as ``rate``
        positions."""
        lengths = self.lengths(len(self.mem) or len(self.c_mem))
        if not lengths:
            return 0
        rates = by_layer(rate, len(lengths), "rate")
        return max(M + c * C for (M, C), c in zip(lengths, rates, strict=True))


# So that torch.export takes a memory as input and output, and loads a program with an example of one; it is
# tensors and nothing else.
torch.export.register_dataclass(Memory, serialized_type_name="memformers.Memory")
torch.serialization.add_safe_globals([Memory])


def memory_tensors(memory: Memory) -> dict[str, Tensor]:
    """The tensors of a memory by their names in files: ``mem.0``, …, ``c_mem.0``, …, and ``slot_inputs.0``, …
    and ``valid`` if the memory has them."""
    tensors = {f"mem.{i}": mem.contiguous() for i, mem in enumerate(memory.mem)}
    tensors |= {f"c_mem.{i}": c_mem.contiguous() for i, c_mem in enumerate(memory.c_mem)}
    tensors |= {
        f"slot_inputs.{i}": slot_inputs.contiguous() for i, slot_inputs in enumerate(memory.slot_inputs)
    }
    return tensors if memory.valid is None else tensors | {"valid": memory.valid.contiguous()}


def memory_from_tensors(tensors: Mapping[str, Tensor], n_layers: int) -> Memory:
    """The memory of ``n_layers`` layers from the result of [`memory_tensors`][]. Raises ValueError for other
    tensors."""
    kinds = {kind: [f"{kind}.{i}" for i in range(n_layers)] for kind in ("mem", "c_mem", "slot_inputs")}
    mem, c_mem, slot_inputs = (tuple(tensors[n] for n in names if n in tensors) for names in kinds.values())
    if others := sorted(set(tensors) - {"valid"} - {name for names in kinds.values() for name in names}):
        raise UserError(f"it holds {', '.join(others)}, which this model has not.")
    return Memory(mem, c_mem, tensors.get("valid"), slot_inputs)
