"""Reading and writing token by token: what is remembered is projected to keys and values once.

A model's forward pass projects its whole memory again for every segment, which is right for training,
where weights change with each step. A :class:`Decoder` keeps the keys and values of compressed memory,
memory and running segment instead (:mod:`memformers.cache`). Compression and forgetting happen when a
segment is full, exactly as in training, so the logits are those of the forward pass; and the buffers are
allocated once, so neither time nor memory grows with the length of the text.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from memformers.cache import LayerCache, few_rows, weights
from memformers.compressive import CompressiveTransformerLayer
from memformers.layers import MemoryLayer, eval_mode
from memformers.memory import Memory, check_memory, slots_to_compress
from memformers.sampling import Sampling

if TYPE_CHECKING:
    from memformers.language_model import MemoryLM


class Decoder:
    """A model in the middle of B streams of text: give it tokens, get logits, in any portions.

    Starts from ``memory`` as the forward pass returns it, or from nothing remembered. The model must
    not be trained meanwhile; keys and values would be of other weights. Nothing is dropped out, and
    there are no gradients.

    Raises ValueError for a model without memory (:class:`Rereader` is for that), and for a memory of
    another model or batch.
    """

    @torch.no_grad()
    def __init__(self, model: "MemoryLM", batch: int, memory: Memory | None = None):
        config = model.config
        if config.model == "transformer":
            raise ValueError("model='transformer' keeps no memory; read with a Rereader.")
        self.model, self.config, self.batch = model, config, batch
        self.running = torch.empty(0, batch, dtype=torch.long, device=model.device)
        """Tokens ``[t, B]`` of the running segment, which are not memory yet."""
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""
        compressive = config.model == "compressive"
        # A memory shorter than one slot's worth waits until it fills one.
        mem_len = max(config.mem_len, config.compression_rate - 1 if compressive else 0)
        recent_len = mem_len + config.segment_len
        c_mem_len = config.c_mem_len + recent_len // config.compression_rate + 1 if compressive else 0
        layers = cast(list[MemoryLayer], list(model.transformer.layers))
        span = config.mem_len if config.equal_spans else None
        self.caches = [LayerCache(layer, batch, c_mem_len, recent_len, span) for layer in layers]
        if memory is not None:
            model.check_kind(memory)
            one = model.head.weight.new_empty(1, batch, config.d_model)
            check_memory("mem", memory.mem, one, len(layers))
            check_memory("c_mem", memory.c_mem, one, len(layers))
            check_lengths(memory, mem_len, config.c_mem_len)
            for i, cache in enumerate(self.caches):
                if memory.c_mem_len:
                    cache.remember(memory.c_mem[i], cache.compressed)
                if memory.mem_len:
                    cache.remember(memory.mem[i], cache.recent)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last. Raises
        ValueError for tokens of another shape, or outside the vocabulary."""
        self.model.check_tokens(tokens, self.batch)
        for portion in self.portions(tokens):
            x = self.model.embed(portion)  # [t, B, D]
            for cache in self.caches:
                x = cache.forward(x)
            self.running = torch.cat((self.running, portion))
            if len(self.running) == self.config.segment_len:
                self.end_segment()
        hidden, head = self.model.transformer.norm(x[-1:]), self.model.head
        logits = (
            few_rows(weights(head), hidden) if isinstance(head, nn.Linear) else self.model.predict(hidden)
        )
        self.logits = logits[0]
        return self.logits

    def portions(self, tokens: Tensor) -> list[Tensor]:
        """``tokens [T, B]`` cut where segments end, ``[t, B]`` each."""
        room = self.config.segment_len - len(self.running)
        return [part for part in (tokens[:room], *tokens[room:].split(self.config.segment_len)) if len(part)]

    def end_segment(self) -> None:
        """Compress or forget what the full segment pushes out of the memory."""
        self.running = self.running[:0]
        config = self.config
        for cache in self.caches:
            recent, compressed = cache.recent, cache.compressed
            if not isinstance(cache.layer, CompressiveTransformerLayer):
                recent.drop(max(len(recent) - config.mem_len, 0))
                continue
            n = slots_to_compress(len(recent), config.mem_len, config.compression_rate)
            if n == 0:
                continue
            oldest = cache.inputs[:, recent.columns][:, : n * config.compression_rate].transpose(0, 1)
            cache.remember(cache.layer.compress(oldest), compressed)
            compressed.drop(max(len(compressed) - config.c_mem_len, 0))
            recent.drop(n * config.compression_rate)

    def memory(self) -> Memory:
        """What is remembered from before the running segment, as the forward pass returns it."""
        before = -len(self.running) or None
        mem = tuple(c.inputs[:, c.recent.columns][:, :before].transpose(0, 1).clone() for c in self.caches)
        c_mem = tuple(c.inputs[:, c.compressed.columns].transpose(0, 1).clone() for c in self.caches)
        return Memory(mem, c_mem if len(c_mem[0]) else ())


class Rereader:
    """A model without memory in the middle of B streams: what it reads at each token are the newest
    S tokens, all again, since each of them would see a little farther back otherwise."""

    def __init__(self, model: "MemoryLM", batch: int):
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


def write(
    reader: Decoder | Rereader,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """Go on from what ``reader`` has read: draw the next token ``[B]``, read it, yield it, until
    ``max_new_tokens`` are written or every stream has come to ``stop``. Raises ValueError, when
    called, if nothing was read yet, and for a negative ``max_new_tokens``."""
    if reader.logits is None:
        raise ValueError("the prompt is empty; give the text to go on from, at least one token.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative; use 0 or more.")
    return drawn(reader, max_new_tokens, sampling, generator, stop)


def drawn(
    reader: Decoder | Rereader,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None,
) -> Iterator[Tensor]:
    """The tokens of :func:`write`, int64 ``[B]`` each."""
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


def check_lengths(memory: Memory, mem_len: int, c_mem_len: int) -> None:
    """Raise ValueError for a memory longer than its model keeps."""
    for name, length, limit in (
        ("mem_len", memory.mem_len, mem_len),
        ("c_mem_len", memory.c_mem_len, c_mem_len),
    ):
        if length > limit:
            raise ValueError(
                f"a memory of {length} positions or slots was given to a model of {name}={limit}; use it "
                f"with the model that made it."
            )
