"""The state of layers while a text is read token by token: their past inputs with their keys and values, in
buffers that are allocated once. Nothing is computed here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from memformers.models.layers import MemoryLayer

ALIGNED = 16
"""The size of a region is a multiple of this many columns: rows that begin at a cache line are read
faster."""


class Region:
    """The columns that hold one part of the past, oldest first, in the buffers of all layers that remember as
    much.

    New positions are written after the last one, and the oldest are dropped by moving the start forward. At
    the end of the region, the remaining positions are copied to the front. It has an eighth more columns than
    its ``capacity``, so that this copies eight positions for one that comes.
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
        """The columns of its positions, including those that are being added."""
        return slice(self.start, self.end + self.coming)

    @property
    def new(self) -> slice:
        """The columns of the positions that are being added."""
        return slice(self.end, self.end + self.coming)

    def drop(self, positions: int) -> None:
        """Drop the oldest positions."""
        self.start += positions


@contextmanager
def taking_in(positions: int, regions: Sequence[Region]) -> Iterator[None]:
    """A block in which each layer adds this many positions to its own of the ``regions``. They belong to the
    past when all layers have added them; if the block ends early, as by Ctrl-C, no layer keeps any."""
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
    running segment together. All are in the same buffers, so a token attends to everything with one product.
    The layers of a stack that remember equally much share the regions, since they advance together.
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
        """The columns of the keys, oldest first; only the ``newest`` of memory and segment unless this is
        None."""
        recent = self.recent.columns
        if newest is not None:
            return [slice(max(recent.stop - newest, recent.start), recent.stop)]
        return [region.columns for region in (self.compressed, self.recent) if len(region)]

    def append(self, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the stream's next ``inputs [t, B, D]``, with their ``key`` and ``value [B, H, t, E]``."""
        self.write(self.recent, inputs, key, value)

    def write(self, region: Region, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Add ``inputs [t, B, D]`` or slots to a region, with their ``key`` and ``value [B, H, t, E]``."""
        self.inputs[:, region.new] = inputs.transpose(0, 1)
        self.key[:, :, region.new] = key
        self.value[..., region.new] = value.mT

    def copy_to_front(self, region: Region) -> None:
        """Copy the contents of a region to its front."""
        old, new = region.columns, slice(region.low, region.low + len(region))
        for buffer in (self.inputs.mT, self.key.mT, self.value):  # positions last
            buffer[..., new] = buffer[..., old].clone()  # the old place and the new one overlap

    def held(self, region: Region) -> Tensor:
        """The inputs or slots of a region, ``[·, B, D]``, a view."""
        return self.inputs[:, region.columns].transpose(0, 1)
