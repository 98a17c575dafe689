"""How much a layer remembers, and numbers that layers share or each has of its own.

Fewer long memories may do: Rae & Razavi 2020 (arXiv 2007.03356) gave them to some of the layers only, best to
those far from the text.
"""

from dataclasses import dataclass

from memformers.common.errors import UserError

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
        """How many of the newest slots are made anew while f_c learns from the language model's loss."""
        return min(self.bptt * self.slots_a_segment, self.c_mem_len)

    @property
    def source_positions(self) -> int:
        """The positions that those slots stand for, which the memory keeps."""
        return self.slots_anew * self.compression_rate

    @property
    def longest_memory(self) -> int:
        """The most positions that a memory has between segments: one shorter than a slot's worth waits until
        it fills one."""
        return max(self.mem_len, self.compression_rate - 1)

    @property
    def keys(self) -> int:
        """The keys beside the segment's, M + C."""
        return self.mem_len + self.c_mem_len

    @property
    def positions(self) -> int:
        """How many positions are remembered, where a slot stands for c of them."""
        return self.mem_len + self.c_mem_len * self.compression_rate
