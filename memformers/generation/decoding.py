"""Reading and generating token by token: each memory is projected to keys and values only once.

The forward pass of a model projects the whole memory again for every segment, which is necessary in training,
because the weights change with each step. A [`Decoder`][] keeps the keys and values of compressed memory,
memory and running segment instead ([`memformers.generation.cache`][]). Memories are compressed and discarded
when a segment is full, exactly as in training, so the logits are those of the forward pass. The buffers are
allocated once, so neither time nor memory grows with the length of the text.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.generation.cache import CachedLayer, LayerGroup, Region
from memformers.models.boundaries import check_starts
from memformers.models.language_model import MemoryLM
from memformers.models.lengths import LayerLengths, by_layer
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode


class Decoder:
    """A model that reads B streams of text: it takes any number of tokens at a time, and returns logits.

    It starts from ``memory`` as the forward pass returns it, or with an empty memory. The model must not be
    trained at the same time, since keys and values would belong to other weights. There is no dropout and no
    gradient. Documents begin where the ``doc_starts`` of [`read`][] say so, and are kept separate as in the
    forward pass ([`memformers.models.boundaries`][]).

    Raises ValueError for a model without memory ([`SlidingWindowDecoder`][] is for that), and for a memory of
    another model or batch.
    """

    @torch.no_grad()
    def __init__(self, model: MemoryLM, batch: int, memory: Memory | None = None):
        config = model.config
        if config.model == "transformer":
            raise UserError("model='transformer' keeps no memory; read with a SlidingWindowDecoder.")
        check_value("batch", batch, Count)
        self.model, self.config, self.batch = model, config, batch
        self.running = torch.empty(0, batch, dtype=torch.long, device=model.device)
        """Tokens ``[t, B]`` of the running segment, which are not memory yet."""
        self.doc_starts: Tensor | None = None
        """Where documents begin among them, boolean ``[t, B]``; None for nowhere."""
        self.valid = None if memory is None else memory.valid
        """How many of the newest positions before the running segment belong to each stream's document,
        ``[B]``; None for all."""
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""
        self.groups: list[LayerGroup] = []
        """The layers by how much they remember: one group where all remember the same."""
        self.layers: list[CachedLayer] = []
        layers, lengths = model.transformer.memory_layers, config.layer_lengths
        windows = by_layer(config.window, len(layers), "window") if config.window else [None] * len(layers)
        for i, (layer, own, window) in enumerate(zip(layers, lengths, windows, strict=True)):
            group = self.group(own)
            self.layers.append(CachedLayer(layer, batch, group.compressed, group.recent, window))
            group.layers[i] = self.layers[-1]
        if memory is not None:
            model.check_memory(memory, batch)
            for group in self.groups:
                group.take_in(memory.c_mem, group.compressed)
                group.take_in(memory.mem, group.recent)

    def group(self, lengths: LayerLengths) -> LayerGroup:
        """That of the layers of these ``lengths``, a new one if there is none yet."""
        for group in self.groups:
            if group.lengths == lengths:
                return group
        recent_len, most_slots = lengths.longest_memory + self.config.segment_len, 0
        if self.model.transformer.compressions:
            most_slots = lengths.c_mem_len + lengths.leaving(recent_len) // lengths.compression_rate
        compressed = Region(0, most_slots)
        self.groups.append(LayerGroup(lengths, compressed, Region(compressed.high, recent_len)))
        return self.groups[-1]

    @torch.no_grad()
    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last.

        ``doc_starts``, boolean ``[T, B]``, is true where a stream's new document begins: its tokens see
        nothing of what came before. The segments end at the same places with and without starts.

        Raises UserError for tokens of another shape, or outside the vocabulary, and for starts of another
        shape, dtype or device.
        """
        self.model.check_tokens(tokens, self.batch)
        check_starts(doc_starts, tokens)
        with eval_mode(self.model):
            for portion, new_starts in self.portions(tokens, doc_starts):
                begun = followed_by_starts(self.doc_starts, self.running, new_starts, portion)
                key_start = self.first_seen(begun, portion)
                for group in self.groups:
                    group.expect(len(portion), group.recent)
                x = self.model.embed(portion)  # [t, B, D]
                for layer, first_of_layer in zip(self.layers, key_start, strict=True):
                    x = layer.forward(x, first_of_layer)
                logits = self.model.predict(self.model.transformer.norm(x[-1:]))[0]
                for group in self.groups:
                    group.recent.settle()
                running = torch.cat((self.running, portion))
                self.running, self.doc_starts, self.logits = running, begun, logits
                if len(self.running) == self.config.segment_len:
                    self.end_segment()
        assert self.logits is not None
        return self.logits

    def first_seen(self, doc_starts: Tensor | None, portion: Tensor) -> list[Tensor | None]:
        """The first key that each token of the next ``portion [t, B]`` may see in each layer, int64
        ``[B, t]``, with the ``doc_starts [·, B]`` of running segment and portion; None for all keys."""
        if doc_starts is None and self.valid is None:
            return [None] * len(self.layers)
        memory, _ = self.views()
        segment = torch.cat((self.running, portion))
        found = self.model.transformer.first_seen(segment, memory, doc_starts, None)
        return [None if of_layer is None else of_layer[:, len(self.running) :] for of_layer in found]

    def portions(self, tokens: Tensor, doc_starts: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """``tokens [T, B]`` with their ``doc_starts [T, B]``, cut where segments end, ``[t, B]`` each."""
        begin, end = 0, self.config.segment_len - len(self.running)
        while begin < len(tokens):
            yield tokens[begin:end], None if doc_starts is None else doc_starts[begin:end]
            begin, end = end, end + self.config.segment_len

    def end_segment(self) -> None:
        """Compress or discard what no longer fits into the memory after a full segment."""
        (memory, inputs), lengths = self.views(), self.config.layer_lengths
        after, compressed = self.model.transformer.advance(memory, inputs, lengths, self.doc_starts)
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


class SlidingWindowDecoder:
    """A model without memory that reads B streams: for each token it reads the newest S tokens again, since
    each of them would otherwise see farther back than in training."""

    def __init__(self, model: MemoryLM, batch: int):
        check_value("batch", batch, Count)
        self.model, self.batch = model, batch
        self.text = torch.empty(0, batch, dtype=torch.long, device=model.device)
        self.doc_starts: Tensor | None = None
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

    @torch.no_grad()
    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """What [`Decoder.read`][] does, ``tokens [T, B]`` with ``doc_starts [T, B]`` to the logits
        ``[B, vocab_size]`` of the token after the last; with the same errors."""
        self.model.check_tokens(tokens, self.batch)
        check_starts(doc_starts, tokens)
        newest = slice(-self.model.config.segment_len, None)
        begun = followed_by_starts(self.doc_starts, self.text, doc_starts, tokens)
        self.doc_starts = None if begun is None else begun[newest]
        self.text = torch.cat((self.text, tokens))[newest]
        with eval_mode(self.model):
            self.logits = self.model(self.text, doc_starts=self.doc_starts).logits[-1]
        return self.logits


Reader = Decoder | SlidingWindowDecoder


def reader(model: MemoryLM, batch: int, memory: Memory | None = None) -> Reader:
    """A reader of ``batch`` streams, from ``memory`` or with an empty memory."""
    check_value("batch", batch, Count)
    if model.config.model == "transformer":
        model.check_memory(memory or Memory(()), batch)
        return SlidingWindowDecoder(model, batch)
    return Decoder(model, batch, memory)


def followed_by_starts(
    before: Tensor | None, tokens_before: Tensor, doc_starts: Tensor | None, tokens: Tensor
) -> Tensor | None:
    """The starts ``[r + t, B]`` of ``tokens_before [r, B]`` and the ``tokens [t, B]`` that follow; None where
    those of both are None, and no document begins."""
    if before is None and doc_starts is None:
        return None
    each = ((before, tokens_before), (doc_starts, tokens))
    return torch.cat([torch.zeros_like(x, dtype=torch.bool) if own is None else own for own, x in each])
