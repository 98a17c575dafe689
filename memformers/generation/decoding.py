"""Reading and writing token by token: what is remembered is projected to keys and values once.

A model's forward pass projects its whole memory again for every segment, which is right for training,
where weights change with each step. A [`Decoder`][] keeps the keys and values of compressed memory,
memory and running segment instead ([`memformers.generation.cache`][]). Compression and forgetting happen
when a segment is full, exactly as in training, so the logits are those of the forward pass; and the
buffers are allocated once, so neither time nor memory grows with the length of the text.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.processes import uninterrupted
from memformers.generation.cache import LayerCache, Region
from memformers.models.boundaries import check_starts, first_of_document, valid_afterwards
from memformers.models.cached_attention import CachedAttention
from memformers.models.compression import slots_of
from memformers.models.language_model import MemoryLM
from memformers.models.layers import MemoryLayer
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode


class CachedLayer:
    """A layer, its cache, and its attention over that cache."""

    def __init__(self, layer: MemoryLayer, cache: LayerCache, longest: int, span: int | None):
        self.layer, self.cache = layer, cache
        norm = layer.norm_before_attention
        self.attention = CachedAttention(layer.self_attn, norm, cache, longest, span)

    def forward(self, x: Tensor, first: Tensor | None) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``, of which each sees
        the keys from ``first [B, t]`` on, None for all."""
        attend = self.attention if first is None else partial(self.attention, first=first)
        return self.layer(x=x, cached=attend)

    def remember(self, inputs: Tensor, region: Region) -> None:
        """Take in ``inputs [t, B, D]`` or slots that are coming to a region, with their keys and values."""
        _, key, value = self.attention.project(inputs)
        self.cache.write(region, inputs, key, value)


class Decoder:
    """A model in the middle of B streams of text: give it tokens, get logits, in any portions.

    Starts from ``memory`` as the forward pass returns it, or from nothing remembered. The model must
    not be trained meanwhile; keys and values would be of other weights. Nothing is dropped out, and
    there are no gradients. Documents begin where [`read`][] is told so, and are kept apart as in the forward
    pass ([`memformers.models.boundaries`][]).

    Raises ValueError for a model without memory ([`Rereader`][] is for that), and for a memory of
    another model or batch.
    """

    @torch.no_grad()
    def __init__(self, model: MemoryLM, batch: int, memory: Memory | None = None):
        config, lengths = model.config, model.config.lengths
        if config.model == "transformer":
            raise UserError("model='transformer' keeps no memory; read with a Rereader.")
        check_batch(batch)
        self.model, self.config, self.batch = model, config, batch
        self.running = torch.empty(0, batch, dtype=torch.long, device=model.device)
        """Tokens ``[t, B]`` of the running segment, which are not memory yet."""
        self.starts: Tensor | None = None
        """Where documents begin among them, boolean ``[t, B]``; None for nowhere."""
        self.valid = None if memory is None else memory.valid
        """How many of the newest positions before the running segment belong to each stream's document,
        ``[B]``; None for all."""
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""
        recent_len = lengths.longest_memory + config.segment_len
        c_mem_len = lengths.c_mem_len + model.transformer.leaving(recent_len, lengths).slots
        self.compressed = Region(0, c_mem_len)
        self.recent = Region(self.compressed.high, recent_len)
        longest = c_mem_len + recent_len
        self.layers = [
            CachedLayer(layer, LayerCache(layer, batch, self.compressed, self.recent), longest, config.span)
            for layer in model.transformer.memory_layers
        ]
        if memory is not None:
            model.check_memory(memory, batch)
            for region, past in ((self.compressed, memory.c_mem), (self.recent, memory.mem)):
                if past and len(past[0]):
                    with region.taking_in(len(past[0])):
                        for layer, inputs in zip(self.layers, past, strict=True):
                            layer.remember(inputs, region)

    @torch.no_grad()
    def read(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last.

        ``starts``, boolean ``[T, B]``, is true where a stream's new document begins: its tokens see nothing
        of what came before. Segments end where they would without.

        Raises UserError for tokens of another shape, or outside the vocabulary, and for starts of another
        shape, dtype or device.
        """
        self.model.check_tokens(tokens, self.batch)
        check_starts(starts, tokens)
        with eval_mode(self.model):
            for portion, new_starts in self.portions(tokens, starts):
                begun = followed_by_starts(self.starts, self.running, new_starts, portion)
                first = self.first_seen(begun, len(portion))
                self.make_room(self.recent, len(portion))
                with self.recent.taking_in(len(portion)):
                    x = self.model.embed(portion)  # [t, B, D]
                    for layer in self.layers:
                        x = layer.forward(x, first)
                    logits = self.model.predict(self.model.transformer.norm(x[-1:]))[0]
                running = torch.cat((self.running, portion))
                self.running, self.starts, self.logits = running, begun, logits
                if len(self.running) == self.config.segment_len:
                    self.end_segment()
        assert self.logits is not None
        return self.logits

    def first_seen(self, starts: Tensor | None, portion_len: int) -> Tensor | None:
        """The first key that each of the next ``portion_len`` tokens may see, int64 ``[B, t]``, with the
        ``starts [·, B]`` of running segment and portion; None where all see all."""
        if starts is None and self.valid is None:
            return None
        running, rate = len(self.running), self.config.lengths.compression_rate
        past = len(self.recent) - running, len(self.compressed)
        first = first_of_document(starts, self.valid, running + portion_len, *past, rate)
        return None if first is None else first[:, running:]

    def positions(self) -> int:
        """How many positions are remembered, those of the running segment among them."""
        return len(self.recent) + self.config.lengths.compression_rate * len(self.compressed)

    def make_room(self, region: Region, positions: int) -> None:
        """Move what a region holds to its front where so many positions don't fit behind it any more."""
        if region.end + positions > region.high:
            with uninterrupted():
                for layer in self.layers:
                    layer.cache.copy_to_front(region)
                region.start, region.end = region.low, region.low + len(region)

    def portions(self, tokens: Tensor, starts: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """``tokens [T, B]`` with their ``starts [T, B]``, cut where segments end, ``[t, B]`` each."""
        begin, end = 0, self.config.segment_len - len(self.running)
        while begin < len(tokens):
            yield tokens[begin:end], None if starts is None else starts[begin:end]
            begin, end = end, end + self.config.segment_len

    def end_segment(self) -> None:
        """Compress or forget what the full segment pushes out of the memory."""
        lengths, stack = self.config.lengths, self.model.transformer
        leaving = stack.leaving(len(self.recent), lengths)
        before = self.positions() - len(self.running)
        with uninterrupted():
            if leaving.slots:
                self.make_room(self.compressed, leaving.slots)
                memory, inputs = self.views()
                with self.compressed.taking_in(leaving.slots):
                    for i, (layer, compress) in enumerate(zip(self.layers, stack.compressions, strict=True)):
                        oldest = layer.cache.held(self.recent)[: leaving.positions]
                        received = stack.received_by_oldest(memory, inputs, self.starts, i, leaving.positions)
                        slots = slots_of(compress, oldest, leaving.slots, received)
                        layer.remember(slots, self.compressed)
                self.compressed.drop(max(len(self.compressed) - lengths.c_mem_len, 0))
            self.recent.drop(leaving.positions)
            after = self.positions()
            self.valid = valid_afterwards(self.valid, self.starts, len(self.running), before, after)
            self.running, self.starts = self.running[:0], None

    def memory(self) -> Memory:
        """What is remembered from before the running segment, as the forward pass returns it."""
        memory, _ = self.views()
        return Memory(
            tuple(x.clone() for x in memory.mem), tuple(x.clone() for x in memory.c_mem), memory.valid
        )

    def views(self) -> tuple[Memory, list[Tensor]]:
        """What is remembered from before the running segment, and each layer's inputs ``[t, B, D]`` in it, as
        views of what is kept."""
        end = len(self.recent) - len(self.running)
        recent = [layer.cache.held(self.recent) for layer in self.layers]
        c_mem = tuple(layer.cache.held(self.compressed) for layer in self.layers)
        mem = tuple(inputs[:end] for inputs in recent)
        return Memory(mem, c_mem if len(c_mem[0]) else (), self.valid), [inputs[end:] for inputs in recent]


class Rereader:
    """A model without memory in the middle of B streams: what it reads at each token are the newest
    S tokens, all again, since each of them would see a little farther back otherwise."""

    def __init__(self, model: MemoryLM, batch: int):
        check_batch(batch)
        self.model, self.batch = model, batch
        self.text = torch.empty(0, batch, dtype=torch.long, device=model.device)
        self.starts: Tensor | None = None
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

    @torch.no_grad()
    def read(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """What [`Decoder.read`][] does, ``tokens [T, B]`` with ``starts [T, B]`` to the logits
        ``[B, vocab_size]`` of the token after the last; with the same errors."""
        self.model.check_tokens(tokens, self.batch)
        check_starts(starts, tokens)
        newest = slice(-self.model.config.segment_len, None)
        begun = followed_by_starts(self.starts, self.text, starts, tokens)
        self.starts = None if begun is None else begun[newest]
        self.text = torch.cat((self.text, tokens))[newest]
        with eval_mode(self.model):
            self.logits = self.model(self.text, starts=self.starts).logits[-1]
        return self.logits


Reader = Decoder | Rereader


def check_batch(batch: int) -> None:
    """Raise UserError unless ``batch`` is a number of streams."""
    if type(batch) is not int or batch < 1:
        raise UserError(f"batch={batch!r} is no number of streams; use a whole number, at least 1.")


def reader(model: MemoryLM, batch: int, memory: Memory | None = None) -> Reader:
    """What reads ``batch`` streams token by token, from ``memory`` or from nothing remembered."""
    check_batch(batch)
    if model.config.model == "transformer":
        model.check_memory(memory or Memory(()), batch)
        return Rereader(model, batch)
    return Decoder(model, batch, memory)


def followed_by_starts(
    before: Tensor | None, tokens_before: Tensor, starts: Tensor | None, tokens: Tensor
) -> Tensor | None:
    """The starts ``[r + t, B]`` of ``tokens_before [r, B]`` and the ``tokens [t, B]`` that follow; None where
    those of both are None, and no document begins."""
    if before is None and starts is None:
        return None
    before = torch.zeros_like(tokens_before, dtype=torch.bool) if before is None else before
    return torch.cat((before, torch.zeros_like(tokens, dtype=torch.bool) if starts is None else starts))
