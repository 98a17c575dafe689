"""What layers keep while a text is read token by token, and their attention over it: past inputs with their
keys and values, in buffers that are allocated once."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from memformers.kernels import single
from memformers.models.boundaries import first_in_window
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import LayerLengths
from memformers.models.linear import affine, fold, linear, standardized

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
        """How many positions all layers are taking in just now. They belong to the past when all have."""

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def columns(self) -> slice:
        """The columns of its positions, including those that are being added."""
        return slice(self.start, self.end + self.coming)

    @property
    def new(self) -> slice:
        """The columns of the positions that are being added."""
        return slice(self.end, self.end + self.coming)

    def settle(self) -> None:
        """Keep what has come, now that all layers have taken it in."""
        self.end, self.coming = self.end + self.coming, 0


class CachedLayer:
    """A layer whose weights don't change any more, and what it remembers: ``compressed`` slots, and then
    ``recent`` positions, which are memory and running segment together.

    All are in the same buffers, so a token attends to everything with one product. The scale and shift of the
    layer's norm are folded into the projections, 1/√E into the queries', and the position terms of all
    distances are computed once. With a ``window``, each position sees only that many of the newest keys, its
    own included.
    """

    def __init__(
        self, layer: MemoryLayer, batch: int, compressed: Region, recent: Region, window: int | None
    ):
        self.layer, self.compressed, self.recent, self.window = layer, compressed, recent, window
        attention = self.attention = layer.self_attn
        self.norm, columns = layer.norm_before_attention, recent.high
        heads, d_head = attention.heads, layer.d_model // attention.heads
        like = attention.query.weight
        self.inputs = like.new_zeros(batch, columns, layer.d_model)
        self.key = like.new_zeros(batch, heads, columns, d_head)
        # Transposed: so a sum over positions reads it the faster.
        self.value = like.new_zeros(batch, heads, d_head, columns)
        self.scale = 1 / math.sqrt(d_head)
        maps = [fold(self.norm, m) for m in (attention.query, attention.key, attention.value)]
        (w_query, b_query), *_ = maps
        maps[0] = w_query * self.scale, b_query * self.scale
        self.projections = torch.cat([w for w, _ in maps]), torch.cat([b for _, b in maps])
        terms = attention.distance_terms(compressed.capacity + recent.capacity)
        # By descending distance, K−1 … 0, so that a shorter past takes the end of it.
        self.terms = {"r": terms["r"].flip(1).contiguous()}  # [H, K, E]
        self.terms |= {n: terms[n][:, None] * self.scale for n in ("u", "v") if n in terms}  # [H, 1, E]
        if "s" in terms:
            self.terms["s"] = terms["s"].flip(1)[:, None] * self.scale  # [H, 1, K]

    def forward(self, x: Tensor, key_start: Tensor | None) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``, of which each sees
        the keys from ``key_start [B, t]`` on, None for all."""
        return self.layer(x=x, cached=partial(self.attend, key_start=key_start))

    def attend(self, x: Tensor, key_start: Tensor | None) -> Tensor:
        """Attention of ``x [t, B, D]``, which is taken in, from ``key_start [B, t]`` on: ``[t, B, D]``."""
        query = self.take_in(x, self.recent)
        # One token without documents reads only its window; else what is outside of it is hidden.
        t = x.shape[0]  # len(x) is a call of Python, four times slower
        alone = t == 1 and key_start is None
        columns = self.columns(self.window if alone else None)
        if not alone:
            K = sum(run.stop - run.start for run in columns)
            key_start = first_in_window(x, key_start, K, self.window)
        if t > 1:  # as in training
            key = torch.cat([self.key[:, :, run] for run in columns], dim=2)
            value = torch.cat([self.value[..., run].mT for run in columns], dim=2)
            return self.attention.attend(query / self.scale, key, value, key_start=key_start)
        context = single.relative_attention(
            query, self.key, self.value, columns=columns, **self.terms, key_start=key_start
        )
        return linear(self.attention.output, rearrange(context, "b h t e -> t b (h e)"))

    def take_in(self, inputs: Tensor, region: Region) -> Tensor:
        """Write ``inputs [t, B, D]`` or slots that are coming to a region, with their keys and values;
        returns their queries over √E, ``[B, H, t, E]``."""
        projected = affine(self.projections, standardized(self.norm, inputs))  # [t, B, 3 D]
        query, key, value = rearrange(
            projected, "t b (three h e) -> three b h t e", three=3, h=self.attention.heads
        )
        self.inputs[:, region.new] = inputs.transpose(0, 1)
        self.key[:, :, region.new] = key
        self.value[..., region.new] = value.mT
        return query

    def columns(self, newest: int | None = None) -> list[slice]:
        """The columns of the keys, oldest first; only the ``newest`` of memory and segment unless this is
        None."""
        recent = self.recent.columns
        if newest is not None:
            return [slice(max(recent.stop - newest, recent.start), recent.stop)]
        return [run for run in (self.compressed.columns, recent) if run.stop > run.start]

    def copy_to_front(self, region: Region) -> None:
        """Copy the contents of a region to its front."""
        old, new = region.columns, slice(region.low, region.low + len(region))
        for buffer in (self.inputs.mT, self.key.mT, self.value):  # positions last
            buffer[..., new] = buffer[..., old].clone()  # the old place and the new one overlap

    def held(self, region: Region) -> Tensor:
        """The inputs or slots of a region, ``[·, B, D]``, a view."""
        return self.inputs[:, region.start : region.end].transpose(0, 1)


class LayerGroup:
    """Layers that remember equally much, and so advance together in the same regions of their buffers."""

    def __init__(self, lengths: LayerLengths, compressed: Region, recent: Region):
        self.lengths, self.compressed, self.recent = lengths, compressed, recent
        self.layers: dict[int, CachedLayer] = {}
        """By their number in the stack, counted from 0."""

    def take_in(self, inputs: Sequence[Tensor], region: Region) -> None:
        """Write the ``inputs [t, B, D]`` or slots of these layers, given for every layer of the stack or for
        none, to a region."""
        own = {i: layer_inputs for i, layer_inputs in enumerate(inputs) if i in self.layers}
        if positions := max(map(len, own.values()), default=0):
            self.expect(positions, region)
            for i, layer_inputs in own.items():
                self.layers[i].take_in(layer_inputs, region)
            region.settle()

    def expect(self, positions: int, region: Region) -> None:
        """Let this many positions come to a region, whose contents are moved to its front if they wouldn't
        fit behind them. What had come before without being settled is forgotten."""
        region.coming = 0
        if region.end + positions > region.high:
            for layer in self.layers.values():
                layer.copy_to_front(region)
            region.start, region.end = region.low, region.low + len(region)
        region.coming = positions
