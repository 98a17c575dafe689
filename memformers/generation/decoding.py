"""Reading and writing token by token: what is remembered is projected to keys and values once.

A model's forward pass projects its whole memory again for every segment, which is right for training,
where weights change with each step. A [`Decoder`][] keeps the keys and values of compressed memory,
memory and running segment instead ([`memformers.generation.cache`][]). Compression and forgetting happen
when a segment is full, exactly as in training, so the logits are those of the forward pass; and the
buffers are allocated once, so neither time nor memory grows with the length of the text.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.processes import uninterrupted
from memformers.generation.cache import LayerCache, Region
from memformers.generation.sampling import Sampling, seeded
from memformers.models.cached_attention import CachedAttention
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

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``."""
        return self.layer(x=x, cached=self.attention)

    def remember(self, inputs: Tensor, region: Region) -> None:
        """Take in ``inputs [t, B, D]`` or slots that are coming to a region, with their keys and values."""
        _, key, value = self.attention.project(inputs)
        self.cache.write(region, inputs, key, value)


class Decoder:
    """A model in the middle of B streams of text: give it tokens, get logits, in any portions.

    Starts from ``memory`` as the forward pass returns it, or from nothing remembered. The model must
    not be trained meanwhile; keys and values would be of other weights. Nothing is dropped out, and
    there are no gradients.

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
    def read(self, tokens: Tensor) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last. Raises
        UserError for tokens of another shape, or outside the vocabulary."""
        self.model.check_tokens(tokens, self.batch)
        with eval_mode(self.model):
            for portion in self.portions(tokens):
                self.make_room(self.recent, len(portion))
                with self.recent.taking_in(len(portion)):
                    x = self.model.embed(portion)  # [t, B, D]
                    for layer in self.layers:
                        x = layer.forward(x)
                    logits = self.model.predict(self.model.transformer.norm(x[-1:]))[0]
                self.running, self.logits = torch.cat((self.running, portion)), logits
                if len(self.running) == self.config.segment_len:
                    self.end_segment()
        assert self.logits is not None
        return self.logits

    def make_room(self, region: Region, positions: int) -> None:
        """Move what a region holds to its front where so many positions don't fit behind it any more."""
        if region.end + positions > region.high:
            with uninterrupted():
                for layer in self.layers:
                    layer.cache.copy_to_front(region)
                region.start, region.end = region.low, region.low + len(region)

    def portions(self, tokens: Tensor) -> list[Tensor]:
        """``tokens [T, B]`` cut where segments end, ``[t, B]`` each."""
        room = self.config.segment_len - len(self.running)
        return [part for part in (tokens[:room], *tokens[room:].split(self.config.segment_len)) if len(part)]

    def end_segment(self) -> None:
        """Compress or forget what the full segment pushes out of the memory."""
        lengths, stack = self.config.lengths, self.model.transformer
        leaving = stack.leaving(len(self.recent), lengths)
        with uninterrupted():
            if leaving.slots:
                self.make_room(self.compressed, leaving.slots)
                with self.compressed.taking_in(leaving.slots):
                    for layer, compress in zip(self.layers, stack.compressions, strict=True):
                        oldest = layer.cache.held(self.recent)[: leaving.positions]
                        layer.remember(compress(oldest), self.compressed)
                self.compressed.drop(max(len(self.compressed) - lengths.c_mem_len, 0))
            self.recent.drop(leaving.positions)
            self.running = self.running[:0]

    def memory(self) -> Memory:
        """What is remembered from before the running segment, as the forward pass returns it."""
        before = -len(self.running) or None
        mem = tuple(layer.cache.held(self.recent)[:before].clone() for layer in self.layers)
        c_mem = tuple(layer.cache.held(self.compressed).clone() for layer in self.layers)
        return Memory(mem, c_mem if len(c_mem[0]) else ())


class Rereader:
    """A model without memory in the middle of B streams: what it reads at each token are the newest
    S tokens, all again, since each of them would see a little farther back otherwise."""

    def __init__(self, model: MemoryLM, batch: int):
        check_batch(batch)
        self.model, self.batch = model, batch
        self.text = torch.empty(0, batch, dtype=torch.long, device=model.device)
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last. Raises
        ValueError for tokens of another shape, or outside the vocabulary."""
        self.model.check_tokens(tokens, self.batch)
        self.text = torch.cat((self.text, tokens))[-self.model.config.segment_len :]
        with eval_mode(self.model):
            self.logits = self.model(self.text).logits[-1]
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


def generate(
    model: MemoryLM,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | None = None,
    stop: int | None = None,
    batch: int = 1,
) -> Iterator[Tensor]:
    """What [`MemoryLM.generate`][] does: ``prompt [P, B]`` to tokens int64 ``[B]``."""
    model.check_tokens(prompt)
    if batch < 1 or (batch > 1 and prompt.shape[1] > 1):
        raise UserError(f"batch={batch} for {prompt.shape[1]} prompts; it repeats a single one.")
    streams = reader(model, batch if batch > 1 else prompt.shape[1])
    streams.read(prompt.expand(-1, streams.batch))
    return write(streams, max_new_tokens, sampling, seeded(seed, prompt.device), stop)


def write(
    reader: Reader,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """Go on from what ``reader`` has read: draw the next token ``[B]``, read it, yield it, until
    ``max_new_tokens`` are written or every stream has come to ``stop``. Raises ValueError, when
    called, if nothing was read yet, and for a negative ``max_new_tokens``."""
    if reader.logits is None:
        raise UserError("the prompt is empty; give the text to go on from, at least one token.")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens} is negative; use 0 or more.")

    def tokens() -> Iterator[Tensor]:
        stopped = torch.zeros(reader.batch, dtype=torch.bool)
        for _ in range(max_new_tokens):
            assert reader.logits is not None
            token = sampling.draw(reader.logits.float(), generator)  # [B]
            reader.read(token[None])
            yield token
            if stop is not None:
                stopped |= token.cpu() == stop
                if stopped.all():
                    return

    return tokens()
