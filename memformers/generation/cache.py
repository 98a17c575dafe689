"""What layers keep while a text is read token by token: their past inputs with their keys and values, in
buffers that are allocated once. They store and forget, and compute nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from memformers.models.layers import MemoryLayer

ALIGNED = 16
"""Regions are multiples of so many columns: rows that begin at a cache line are read faster."""


class Region:
    """The columns that hold one part of the past, oldest first, in the buffers of all layers that remember as
    much.

    New positions are written behind the last, the oldest are dropped by moving the beginning on; when
    the end of the region is reached, what is left moves to the front. It has an eighth more columns
    than its ``capacity``, so that this copies eight positions for one that comes.
    """

    def __init__(self, low: int, capacity: int):
        self.capacity = capacity
        self.low = self.start = self.end = low
        self.high = low + (ALIGNED * -(-(capacity + capacity // 8 + 1) // ALIGNED) if capacity else 0)
        self.coming = 0
        """How many positions all layers are taking in just now."""

    def __len__(self) -> int:
        return self.end + self.coming - self.start

    @property
    def columns(self) -> slice:
        """Where its positions are, those that are coming among them."""
        return slice(self.start, self.end + self.coming)

    @property
    def new(self) -> slice:
        """Where those that are coming are written."""
        return slice(self.end, self.end + self.coming)

    def drop(self, positions: int) -> None:
        """Forget the oldest ones."""
        self.start += positions


@contextmanager
def taking_in(positions: int, regions: Sequence[Region]) -> Iterator[None]:
    """A block in which each layer takes in so many positions, into its own of the ``regions``. They belong to
    the past when all have; if the block ends early, as by Ctrl-C, no layer has taken in any."""
    for region in regions:
        region.coming = positions
    try:
        yield
        for region in regions:
            region.end += positions
    finally:
        for region in regions:
            region.coming = 0


class LayerCache:
    """What one layer remembers: ``compressed`` slots, and then ``recent`` positions, which are memory and
    running segment together. All lie in the same buffers, so that a token attends to everything with one
    product. The regions are shared by the layers of a stack that remember equally much, since these advance
    together.
    """

    def __init__(self, layer: MemoryLayer, batch: int, compressed: Region, recent: Region):
        self.compressed, self.recent = compressed, recent
        columns, like = recent.high, layer.self_attn.query.weight
        heads = layer.self_attn.heads
        d_head = layer.d_model // heads
        self.inputs = like.new_zeros(batch, columns, layer.d_model)
        self.key = like.new_zeros(batch, heads, columns, d_head)
        # Transposed: so a sum over positions reads it the faster.
        self.value = like.new_zeros(batch, heads, d_head, columns)

    def columns(self, newest: int | None = None) -> list[slice]:
        """Where the keys lie, oldest first; only the ``newest`` of memory and segment unless that is None."""
        recent = self.recent.columns
        if newest is not None:
            return [slice(max(recent.stop - newest, recent.start), recent.stop)]
        return [region.columns for region in (self.compressed, self.recent) if len(region)]

    def append(self, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in the stream's next ``inputs [t, B, D]``, with their ``key`` and ``value [B, H, t, E]``."""
        self.write(self.recent, inputs, key, value)

    def write(self, region: Region, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in the ``inputs [t, B, D]`` or slots that are coming to a region, with their ``key`` and
        ``value [B, H, t, E]``."""
        self.inputs[:, region.new] = inputs.transpose(0, 1)
        self.key[:, :, region.new] = key
        self.value[..., region.new] = value.mT

    def copy_to_front(self, region: Region) -> None:
        """Copy what a region holds to its front."""
        old, new = region.columns, slice(region.low, region.low + len(region))
        for buffer in (self.inputs.mT, self.key.mT, self.value):  # positions last
            buffer[..., new] = buffer[..., old].clone()  # the old place and the new one overlap

    def held(self, region: Region) -> Tensor:
        """The inputs or slots of a region, ``[·, B, D]``, a view."""
        return self.inputs[:, region.columns].transpose(0, 1)
