"""The lengths of memories, which are the same for all layers or differ by layer.

A model may need only a few long memories: Rae & Razavi 2020 (arXiv 2007.03356) gave them to some layers only,
with the best results in the layers far from the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from memformers.common.errors import UserError

if TYPE_CHECKING:
    from memformers.models.memory import Memory

ByLayer = int | tuple[int, ...]
"""A number for all layers, or one for each, beginning with the layer that reads the text."""


def by_layer(value: ByLayer, n_layers: int, name: str) -> tuple[int, ...]:
    """The number of each of ``n_layers`` layers. Raises ValueError, with the ``name``, for a tuple of another
    length."""
    if not isinstance(value, tuple):
        return (value,) * n_layers
    if len(value) != n_layers:
        raise UserError(
            f"{name}={value} is for {len(value)} layers, but n_layers={n_layers}; give one number for each "
            f"layer, or a single one for all."
        )
    return value


def most(value: ByLayer) -> int:
    """The number of the layer that has the most."""
    return max(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class LayerLengths:
    """How much one layer remembers."""

    mem_len: int
    """M, in positions."""
    c_mem_len: int
    """C, in slots."""
    compression_rate: int
    """c, the positions that a slot stands for."""
    bptt: int = 0
    """How many compressions back f_c learns from the language model's loss."""
    segment_len: int = 1
    """S, in positions."""

    @property
    def slots_a_segment(self) -> int:
        """⌈S / c⌉, how many slots a compression makes after a whole segment."""
        return -(-self.segment_len // self.compression_rate)

    @property
    def slots_anew(self) -> int:
        """The number of the newest slots that are computed again while f_c learns from the language model's
        loss."""
        return min(self.bptt * self.slots_a_segment, self.c_mem_len)

    @property
    def slot_input_positions(self) -> int:
        """The number of positions that those slots represent; the memory keeps them."""
        return self.slots_anew * self.compression_rate

    @property
    def longest_memory(self) -> int:
        """The largest number of positions that a memory has between segments: positions that don't fill a
        slot wait in the memory until they do."""
        return max(self.mem_len, self.compression_rate - 1)

    @property
    def keys(self) -> int:
        """The number of keys without the segment's, M + C."""
        return self.mem_len + self.c_mem_len

    @property
    def positions(self) -> int:
        """The number of positions that are remembered, where a slot counts as c positions."""
        return self.mem_len + self.c_mem_len * self.compression_rate


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

    def check_kind(self, memory: "Memory", model: str, n_layers: int) -> None:
        """Raise ValueError for a ``memory`` of a kind that ``model``, of ``n_layers`` layers, doesn't keep,
        or in which layers of the same lengths don't remember the same positions."""
        for name, mem in (("mem", memory.mem), ("c_mem", memory.c_mem), ("slot_inputs", memory.slot_inputs)):
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

    def check_fits(self, memory: "Memory", model: str, n_layers: int) -> None:
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

    def _limits(self, memory: "Memory", n_layers: int) -> list[tuple[int, int, str]]:
        """For each part of each layer's memory: its length, the longest possible length, and its name in
        messages. Another check refuses a memory of another depth."""
        limits = []
        for layer, own in enumerate(self.of_layers(n_layers)):
            where = f" in layer {layer}" if self._differ else ""
            parts = (
                (memory.mem, own.longest_memory, "a memory of", "positions"),
                (memory.c_mem, own.c_mem_len, "a compressed memory of", "slots"),
                (memory.slot_inputs, own.slot_input_positions, "a memory with slot_inputs of", "positions"),
            )
            for tensors, longest, kind, unit in parts:
                for tensor in tensors[layer : layer + 1]:
                    limits.append((len(tensor), longest, f"{kind} {len(tensor)} {unit}{where}"))
        return limits
