"""Layers with what they keep while a text is read token by token, and groups that keep equally much."""

from functools import partial

from torch import Tensor

from memformers.common.processes import deferring_interrupts
from memformers.generation.cache import LayerCache, Region, taking_in
from memformers.models.cached_attention import CachedAttention
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import LayerLengths
from memformers.models.memory import Memory


class CachedLayer:
    """A layer, its cache, and its attention over that cache."""

    def __init__(self, layer: MemoryLayer, cache: LayerCache, longest: int, window: int | None):
        self.layer, self.cache = layer, cache
        norm = layer.norm_before_attention
        self.attention = CachedAttention(layer.self_attn, norm, cache, longest, window)

    def forward(self, x: Tensor, key_start: Tensor | None) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``, of which each sees
        the keys from ``key_start [B, t]`` on, None for all."""
        attend = self.attention if key_start is None else partial(self.attention, key_start=key_start)
        return self.layer(x=x, cached=attend)

    def remember(self, inputs: Tensor, region: Region) -> None:
        """Take in ``inputs [t, B, D]`` or slots that are coming to a region, with their keys and values."""
        _, key, value = self.attention.project(inputs)
        self.cache.write(region, inputs, key, value)


class LayerGroup:
    """Layers that remember equally much, and so advance together in the same regions of their caches."""

    def __init__(self, lengths: LayerLengths, compressed: Region, recent: Region):
        self.lengths, self.compressed, self.recent = lengths, compressed, recent
        self.numbers: list[int] = []
        """Which layers of the stack they are, counted from 0."""
        self.layers: list[CachedLayer] = []

    def take_in(self, memory: Memory) -> None:
        """Begin with what ``memory`` has of these layers."""
        for region, past in ((self.compressed, memory.c_mem), (self.recent, memory.mem)):
            inputs = [past[i] for i in self.numbers] if past else []
            if inputs and len(inputs[0]):
                with taking_in(len(inputs[0]), [region]):
                    for layer, of_layer in zip(self.layers, inputs, strict=True):
                        layer.remember(of_layer, region)

    def positions(self) -> int:
        """How many positions are remembered, those of the running segment among them."""
        return len(self.recent) + self.lengths.compression_rate * len(self.compressed)

    def make_room(self, region: Region, positions: int) -> None:
        """Move the contents of a region to its front if the next ``positions`` don't fit behind them."""
        if region.end + positions > region.high:
            with deferring_interrupts():
                for layer in self.layers:
                    layer.cache.copy_to_front(region)
                region.start, region.end = region.low, region.low + len(region)
