"""Reading step by step: each memory is projected to keys and values only once.

The forward pass of a model projects the whole memory again for every segment, which is necessary in training,
because the weights change with each step. A [`Stepper`][] keeps the keys and values of compressed memory,
memory and running segment instead ([`memformers.generation.cache`][]). Memories are compressed and discarded
when a segment is full, exactly as in training, so the output is that of the forward pass. The buffers are
allocated once, so neither time nor memory grows with the length of what is read.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.generation.cache import CachedLayer, LayerGroup, Region
from memformers.models.boundaries import check_starts
from memformers.models.config import NetworkConfig
from memformers.models.core import read_features
from memformers.models.lengths import LayerLengths, by_layer
from memformers.models.memory import Memory, check_lengths, check_memory
from memformers.models.own_memory import OwnMemory
from memformers.models.stack import MemoryStack, eval_mode


class Stepper:
    """A transformer that reads B streams, any number of steps at a time, with keys and values kept.

    The model must not be trained at the same time, since keys and values would belong to other weights. There
    is no dropout and no gradient. Documents, or episodes, begin where ``doc_starts`` say so, and are kept
    separate as in the forward pass ([`memformers.models.boundaries`][]).
    [`MemoryCore.stepper`][memformers.models.core.MemoryCore.stepper] makes one for a core.

    Args:
        transformer: The stack of layers.
        config: What it was built from.
        nothing: No steps, ``[0, B, …]``, of what is read: features ``[t, B, F]``, or tokens ``[t, B]``.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.
        encode: From what is read to the transformer's input ``[t, B, D]``.
        decode: From the transformer's output ``[t, B, D]`` to the result.

    Raises:
        ValueError: For a memory of another model or batch.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore
        >>> stepper = MemoryCore(CoreConfig(d_input=3, d_model=32)).eval().stepper(batch=2)
        >>> for features in torch.randn(100, 2, 3):  # [B, F] each
        ...     output = stepper.step(features)
        >>> output.shape, stepper.memory().mem_len
        (torch.Size([2, 32]), 64)
    """

    @torch.no_grad()
    def __init__(
        self,
        transformer: MemoryStack,
        config: NetworkConfig,
        nothing: Tensor,
        memory: Memory | None = None,
        *,
        encode: Callable[[Tensor], Tensor],
        decode: Callable[[Tensor], Tensor],
    ):
        check_value("batch", batch := nothing.shape[1], Count)
        self.transformer, self.config, self.encode, self.decode = transformer, config, encode, decode
        self.running = nothing
        """What was read of the running segment, ``[t, B, …]``, which is not memory yet."""
        self.doc_starts: Tensor | None = None
        """Where documents begin in it, boolean ``[t, B]``; None for nowhere."""
        self.result: Tensor | None = None
        """What ``decode`` gave for the steps that were read last; None before the first."""
        memory, one = memory or Memory(()), transformer.memory_layers[0].norm_ff.weight  # [D]
        check_memory(memory, one.expand(1, batch, -1), config.n_layers)
        check_lengths(memory, config, complete=True)
        self.begin(memory)

    def begin(self, memory: Memory) -> None:
        """Keep what comes before the first step."""
        self.valid = memory.valid
        """How many of the newest positions before the running segment belong to each stream's document,
        ``[B]``; None for all."""
        self.groups: list[LayerGroup] = []
        """The layers by how much they remember: one group where all remember the same."""
        self.layers: list[CachedLayer] = []
        batch, layers, config = self.running.shape[1], self.transformer.memory_layers, self.config
        windows = by_layer(config.window, len(layers), "window") if config.window else [None] * len(layers)
        for i, (layer, own, window) in enumerate(zip(layers, config.layer_lengths, windows, strict=True)):
            group = self.group(own)
            self.layers.append(CachedLayer(layer, batch, group.compressed, group.recent, window))
            group.layers[i] = self.layers[-1]
        self.refill(memory)

    def refill(self, memory: Memory) -> None:
        """Let ``memory`` take the place of everything that is kept."""
        for group in self.groups:
            for region, parts in ((group.compressed, memory.c_mem), (group.recent, memory.mem)):
                region.start = region.end = region.low
                group.take_in(parts, region)

    def group(self, lengths: LayerLengths) -> LayerGroup:
        """That of the layers of these ``lengths``, a new one if there is none yet."""
        for group in self.groups:
            if group.lengths == lengths:
                return group
        recent_len, most_slots = lengths.longest_memory + self.config.segment_len, lengths.c_mem_len
        if self.transformer.compressions:
            most_slots += lengths.leaving(recent_len) // lengths.compression_rate
        compressed = Region(0, most_slots)
        self.groups.append(LayerGroup(lengths, compressed, Region(compressed.high, recent_len)))
        return self.groups[-1]

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` of each stream to its result ``[B, …]``; ``doc_starts [B]`` is true where a
        stream's new document begins with it. Errors as in [`read`][]."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

    def read(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``x [T, B, …]``, T ≥ 1, to its results, one after the other, with ``doc_starts`` as in
        [`portions`][].

        Raises UserError for x of another shape, for what ``encode`` refuses, and for starts of another shape,
        dtype or device.
        """
        if not len(x) or x.shape[1:] != self.running.shape[1:]:
            wanted = ", ".join(map(str, self.running.shape[1:]))
            raise UserError(f"expected [steps, {wanted}], at least one step, got {list(x.shape)}.")
        check_starts(doc_starts, x)
        return torch.cat(list(self.portions(x, doc_starts)))

    @torch.no_grad()
    def portions(self, x: Tensor, doc_starts: Tensor | None) -> Iterator[Tensor]:
        """Read ``x [T, B, …]``; yields the results of portions ``[t, B, …]``, which end where segments end.

        ``doc_starts``, boolean ``[T, B]``, is true where a stream's new document begins: it sees nothing of
        what came before. The segments end at the same places with and without starts.
        """
        begin, end = 0, self.config.segment_len - len(self.running)
        while begin < len(x):
            with eval_mode(self.transformer):
                yield self.take_in(x[begin:end], None if doc_starts is None else doc_starts[begin:end])
            begin, end = end, end + self.config.segment_len

    def take_in(self, portion: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read a ``portion [t, B, …]`` of the running segment, with ``new_starts [t, B]``, to its result;
        after it, a segment that is full becomes memory."""
        begun = followed_by_starts(self.doc_starts, self.running, new_starts, portion)
        key_start = self.first_seen(begun, portion)
        for group in self.groups:
            group.expect(len(portion), group.recent)
        x = self.encode(portion)  # [t, B, D]
        for layer, first_of_layer in zip(self.layers, key_start, strict=True):
            x = layer.forward(x, first_of_layer)
        result = self.decode(self.transformer.norm(x))
        for group in self.groups:
            group.recent.settle()
        running = torch.cat((self.running, portion))
        self.running, self.doc_starts, self.result = running, begun, result
        if len(self.running) == self.config.segment_len:
            self.end_segment()
        return result

    def first_seen(self, doc_starts: Tensor | None, portion: Tensor) -> list[Tensor | None]:
        """The first key that each step of the next ``portion [t, B, …]`` may see in each layer, int64
        ``[B, t]``, with the ``doc_starts [·, B]`` of running segment and portion; None for all keys."""
        if doc_starts is None and self.valid is None:
            return [None] * len(self.layers)
        memory, _ = self.views()
        segment = torch.cat((self.running, portion))
        found = self.transformer.first_seen(segment, memory, doc_starts, None)
        return [None if of_layer is None else of_layer[:, len(self.running) :] for of_layer in found]

    def end_segment(self) -> None:
        """Compress or discard what no longer fits into the memory after a full segment."""
        (memory, inputs), lengths = self.views(), self.config.layer_lengths
        after, compressed = self.transformer.advance(memory, inputs, lengths, self.doc_starts)
        for group in self.groups:
            if compressed is not None:
                group.take_in(compressed.new, group.compressed)
                group.compressed.start += max(len(group.compressed) - group.lengths.c_mem_len, 0)
            group.recent.start += group.lengths.leaving(len(group.recent))
        self.running, self.doc_starts, self.valid = self.running[:0], None, after.valid

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        memory, _ = self.views()
        mem, c_mem = (tuple(x.clone() for x in kept) for kept in (memory.mem, memory.c_mem))
        return Memory(mem, c_mem, memory.valid)

    def views(self) -> tuple[Memory, list[Tensor]]:
        """The memory before the current segment, and the inputs ``[t, B, D]`` of each layer in the segment,
        as views of the buffers."""
        running, mem, c_mem, inputs = len(self.running), [], [], []
        for layer in self.layers:
            recent, end = layer.held(layer.recent), len(layer.recent) - running
            mem.append(recent[:end])
            inputs.append(recent[end:])
            c_mem.append(layer.held(layer.compressed))
        return Memory(tuple(mem), tuple(c_mem) if any(map(len, c_mem)) else (), self.valid), inputs


class RefilledStepper(Stepper):
    """A [`Stepper`][] for a memory of one's own that attention alone reads: it keeps the keys of memory and
    running segment, and after each segment computes those of the next memory anew."""

    def end_segment(self) -> None:
        """Remember a full segment, as the memory does it."""
        memory, inputs = self.views()
        after, _ = self.transformer.after_segment(memory, inputs, self.config, inputs[0], self.doc_starts)
        mem, c_mem = (tuple(x.clone() for x in parts) for parts in (after.mem, after.c_mem))  # no views
        self.refill(Memory(mem, c_mem))
        self.running, self.doc_starts, self.valid = self.running[:0], None, after.valid


class UncachedStepper(Stepper):
    """A [`Stepper`][] for any memory, which keeps no keys: it reads the running segment again with each
    portion, from the memory at its edge. That is exact, and slower."""

    def begin(self, memory: Memory) -> None:
        """Keep the memory before the first step."""
        self.past = memory

    def take_in(self, portion: Tensor, new_starts: Tensor | None) -> Tensor:
        """As [`Stepper.take_in`][]: ``portion [T, B, …]`` with ``new_starts [T, B]``."""
        begun = followed_by_starts(self.doc_starts, self.running, new_starts, portion)
        running = torch.cat((self.running, portion))
        x = self.encode(running)
        output, inputs = read_features(self.transformer, self.config, x, self.past, begun)
        result = self.decode(output[-len(portion) :])
        if len(running) == self.config.segment_len:
            self.past, _ = self.transformer.after_segment(self.past, inputs, self.config, x, begun)
            running, begun = running[:0], None
        self.running, self.doc_starts, self.result = running, begun, result
        return result

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.past


def stepper_of(
    transformer: MemoryStack,
    config: NetworkConfig,
    nothing: Tensor,
    memory: Memory | None = None,
    **how: Callable[[Tensor], Tensor],
) -> Stepper:
    """A [`Stepper`][] of this ``transformer``, with keys kept if they can be; ``nothing`` is ``[0, B, …]``,
    and the other arguments and errors are those of the Stepper."""
    kept = RefilledStepper if isinstance(transformer, OwnMemory) else Stepper
    kind = kept if transformer.keeps_keys else UncachedStepper
    return kind(transformer, config, nothing, memory, **how)


def followed_by_starts(
    before: Tensor | None, read_before: Tensor, doc_starts: Tensor | None, portion: Tensor
) -> Tensor | None:
    """The starts ``[r + t, B]`` of what was ``read_before [r, B, …]``, and those of the ``portion [t, B, …]``
    that follows; None where those of both are None, and no document begins."""
    if before is None and doc_starts is None:
        return None
    each = ((before, read_before), (doc_starts, portion))
    none = [x.new_zeros(x.shape[:2], dtype=torch.bool) for _, x in each]
    return torch.cat([other if own is None else own for (own, _), other in zip(each, none, strict=True)])
