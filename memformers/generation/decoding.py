"""Reading and generating token by token: each memory is projected to keys and values only once.

The forward pass of a model projects the whole memory again for every segment, which is necessary in training,
because the weights change with each step. A [`Decoder`][] keeps the keys and values of compressed memory,
memory and running segment instead ([`memformers.generation.cache`][]). Memories are compressed and discarded
when a segment is full, exactly as in training, so the logits are those of the forward pass. The buffers are
allocated once, so neither time nor memory grows with the length of the text.
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
        """Add ``inputs [t, B, D]`` or slots to a region, with their keys and values."""
        _, key, value = self.attention.project(inputs)
        self.cache.write(region, inputs, key, value)


class Decoder:
    """A model that reads B streams of text: it takes any number of tokens at a time, and returns logits.

    It starts from ``memory`` as the forward pass returns it, or with an empty memory. The model must not be
    trained at the same time, since keys and values would belong to other weights. There is no dropout and no
    gradient. Documents begin where the ``starts`` of [`read`][] say so, and are kept separate as in the
    forward pass ([`memformers.models.boundaries`][]).

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
        of what came before. The segments end at the same places with and without starts.

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
        """How many positions are remembered, including those of the current segment."""
        return len(self.recent) + self.config.lengths.compression_rate * len(self.compressed)

    def make_room(self, region: Region, positions: int) -> None:
        """Copy the contents of a region to its front if this many positions no longer fit after them."""
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
        """Compress or discard what no longer fits into the memory after a full segment."""
        lengths, stack = self.config.lengths, self.model.transformer
        leaving = stack.leaving(len(self.recent), lengths)
        before = self.positions() - len(self.running)
        with uninterrupted():
            if leaving.slots:
                self.make_room(self.compressed, leaving.slots)
                with self.compressed.taking_in(leaving.slots):
                    for layer, compress in zip(self.layers, stack.compressions, strict=True):
                        oldest = layer.cache.held(self.recent)[: leaving.positions]
                        layer.remember(slots_of(compress, oldest, leaving.slots), self.compressed)
                self.compressed.drop(max(len(self.compressed) - lengths.c_mem_len, 0))
            self.recent.drop(leaving.positions)
            after = self.positions()
            self.valid = valid_afterwards(self.valid, self.starts, len(self.running), before, after)
            self.running, self.starts = self.running[:0], None

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        before = -len(self.running) or None
        mem = tuple(layer.cache.held(self.recent)[:before].clone() for layer in self.layers)
        c_mem = tuple(layer.cache.held(self.compressed).clone() for layer in self.layers)
        return Memory(mem, c_mem if len(c_mem[0]) else (), self.valid)


class Rereader:
    """A model without memory that reads B streams: for each token it reads the newest S tokens again, since
    each of them would otherwise see farther back than in training."""

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
    """A reader of ``batch`` streams, from ``memory`` or with an empty memory."""
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
