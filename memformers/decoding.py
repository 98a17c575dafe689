"""Reading and writing token by token: what is remembered is projected to keys and values once.

A model's forward pass projects its whole memory again for every segment, which is right for training,
where weights change with each step. A :class:`Decoder` keeps the keys and values of compressed memory,
memory and running segment instead. Compression and forgetting happen when a segment is full, exactly as
in training, so the logits are those of the forward pass; and the buffers are allocated once, so neither
time nor memory grows with the length of the text.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.compressive import CompressiveTransformerLayer
from memformers.kernels.dispatch import relative_attention
from memformers.layers import PreNormLayer
from memformers.memory import Memory, check_memory, slots_to_compress
from memformers.sampling import Sampling

if TYPE_CHECKING:
    from memformers.language_model import MemoryLM


class Window:
    """The newest positions of something, ``[..., length, features]``, in a buffer allocated once.

    New ones are written behind the last, the oldest are dropped by moving the beginning on; when the
    buffer's end is reached, what is left moves to its front. The buffer has room for an eighth more
    than ``capacity``, so that this copies eight positions for one that comes.

    Products with the whole buffer read memory in one piece, which a part of it is not: what they give
    for positions outside the window is cut off, or has weight 0 (:meth:`products`, :meth:`mean`).
    """

    def __init__(self, shape: tuple[int, ...], capacity: int, features: int, like: Tensor):
        room = capacity + capacity // 8 + 1
        self.buffer = like.new_zeros(*shape, room, features)
        self.start = self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, new: Tensor) -> None:
        """Take in ``new [..., t, features]``."""
        t = new.shape[-2]
        if self.end + t > self.buffer.shape[-2]:
            kept = self.all().clone()  # the old place and the new one overlap
            self.start, self.end = 0, len(self)
            self.all().copy_(kept)
        self.buffer[..., self.end : self.end + t, :] = new
        self.end += t

    def drop(self, t: int) -> None:
        """Forget the oldest ``t``."""
        self.start += t

    def all(self) -> Tensor:
        """What it holds, oldest first; a view."""
        return self.buffer[..., self.start : self.end, :]

    def products(self, x: Tensor) -> Tensor:
        """``x [..., 1, features]`` times each position, ``[..., 1, length]``."""
        products = torch.bmm(x.flatten(0, -3), self.buffer.flatten(0, -3).transpose(1, 2))
        return products.view(*x.shape[:-1], -1)[..., self.start : self.end]

    def mean(self, weights: Tensor) -> Tensor:
        """The sum ``[..., 1, features]`` of positions by ``weights [..., 1, length]``."""
        padded = weights.new_zeros(*weights.shape[:-1], self.buffer.shape[-2])
        padded[..., self.start : self.end] = weights
        return torch.bmm(padded.flatten(0, -3), self.buffer.flatten(0, -3)).view(*weights.shape[:-1], -1)


class Past:
    """One layer's inputs over a stretch of the past, ``[B, length, D]``, with their keys and values,
    ``[B, H, length, E]``."""

    def __init__(self, layer: PreNormLayer, batch: int, capacity: int):
        attention = layer.self_attn
        like, heads = attention.query.weight, attention.heads
        d_head = layer.d_model // heads
        self.inputs = Window((batch,), capacity, layer.d_model, like)
        self.key = Window((batch, heads), capacity, d_head, like)
        self.value = Window((batch, heads), capacity, d_head, like)

    def __len__(self) -> int:
        return len(self.inputs)

    def append(self, inputs: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in ``inputs [t, B, D]`` and their ``key`` and ``value [B, H, t, E]``."""
        self.inputs.append(inputs.transpose(0, 1))
        self.key.append(key)
        self.value.append(value)

    def drop(self, t: int) -> None:
        """Forget the oldest ``t``."""
        for window in (self.inputs, self.key, self.value):
            window.drop(t)


class LayerCache:
    """What one layer remembers: compressed slots, and then memory and running segment together."""

    def __init__(self, layer: PreNormLayer, batch: int, c_mem_len: int, recent_len: int):
        self.layer, self.attention = layer, layer.self_attn
        self.compressed = Past(layer, batch, c_mem_len)
        self.recent = Past(layer, batch, recent_len)
        # By descending distance, K−1 … 0, so that a shorter past takes the end of it.
        terms = self.attention.distance_terms(c_mem_len + recent_len)
        self.r = terms["r"].flip(1).contiguous()  # [H, K, E]
        self.s = terms["s"].flip(1) if "s" in terms else None  # [H, K]
        self.u, self.v = terms["u"], terms.get("v", torch.zeros_like(terms["u"]))

    def remember(self, inputs: Tensor, past: Past) -> None:
        """Append ``inputs [t, B, D]`` to memory or compressed memory, with their keys and values."""
        z = self.layer.norm_self_attn(inputs)
        past.append(inputs, self.heads(self.attention.key, z), self.heads(self.attention.value, z))

    def heads(self, linear: nn.Linear, z: Tensor) -> Tensor:
        """``z [t, B, D]`` projected, ``[B, H, t, E]``."""
        return rearrange(few_rows(linear, z), "t b (h e) -> b h t e", h=self.attention.heads)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``."""
        layer = self.layer
        z = layer.norm_self_attn(x)
        query = self.heads(self.attention.query, z)  # [B, H, t, E]
        self.recent.append(x, self.heads(self.attention.key, z), self.heads(self.attention.value, z))
        pasts = [past for past in (self.compressed, self.recent) if len(past)]
        context = self.one(query, pasts) if len(x) == 1 else self.several(query, pasts)  # [B, H, t, E]
        x = x + few_rows(self.attention.output, rearrange(context, "b h t e -> t b (h e)"))
        hidden = few_rows(layer.feed_forward.layer1, layer.norm_ff(x)).relu_()
        return x + few_rows(layer.feed_forward.layer2, hidden)

    def one(self, query: Tensor, pasts: list[Past]) -> Tensor:
        """Attention of a single position, which sees all that there is."""
        content = torch.cat([past.key.products(query + self.u[:, None]) for past in pasts], dim=-1)
        by_head = (query + self.v[:, None]).squeeze(2).transpose(0, 1)  # [H, B, E]
        position = torch.bmm(by_head, self.r.transpose(1, 2))  # [H, B, K and more]
        if self.s is not None:
            position = position + self.s[:, None]
        position = position[..., -content.shape[-1] :].transpose(0, 1).unsqueeze(2)  # [B, H, 1, K]
        probabilities = ((content + position) / math.sqrt(query.shape[-1])).softmax(-1)
        parts = probabilities.split([len(past) for past in pasts], dim=-1)
        read = [past.value.mean(part) for part, past in zip(parts, pasts, strict=True)]
        return torch.stack(read).sum(0)  # [B, H, 1, E]

    def several(self, query: Tensor, pasts: list[Past]) -> Tensor:
        """Causal attention of several positions."""
        key = torch.cat([past.key.all() for past in pasts], dim=2)
        value = torch.cat([past.value.all() for past in pasts], dim=2)
        return relative_attention(
            query,
            key,
            value,
            **self.attention.distance_terms(key.shape[2]),
            mask=None,
            dropout_prob=0.0,
            kernel="auto",
        )


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
        self.running = torch.empty(0, batch, dtype=torch.long, device=model.embed.weight.device)
        """Tokens ``[t, B]`` of the running segment, which are not memory yet."""
        compressive = config.model == "compressive"
        # A memory shorter than one slot's worth waits until it fills one.
        mem_len = max(config.mem_len, config.compression_rate - 1 if compressive else 0)
        recent_len = mem_len + config.segment_len
        c_mem_len = config.c_mem_len + recent_len // config.compression_rate + 1 if compressive else 0
        layers = cast(list[PreNormLayer], list(model.transformer.layers))
        self.caches = [LayerCache(layer, batch, c_mem_len, recent_len) for layer in layers]
        if memory is not None:
            model.check_kind(memory)
            one = model.embed.weight.new_empty(1, batch, config.d_model)
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
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last."""
        for portion in self.portions(tokens):
            x = self.model.embed(portion)  # [t, B, D]
            for cache in self.caches:
                x = cache.forward(x)
            self.running = torch.cat((self.running, portion))
            if len(self.running) == self.config.segment_len:
                self.end_segment()
        return few_rows(self.model.head, self.model.transformer.norm(x[-1:]))[0]

    def portions(self, tokens: Tensor) -> list[Tensor]:
        """The tokens cut where segments end."""
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
            oldest = recent.inputs.all()[:, : n * config.compression_rate].transpose(0, 1)
            cache.remember(cache.layer.compress(oldest), compressed)
            compressed.drop(max(len(compressed) - config.c_mem_len, 0))
            recent.drop(n * config.compression_rate)

    def memory(self) -> Memory:
        """What is remembered from before the running segment, as the forward pass returns it."""
        before = -len(self.running) or None
        mem = tuple(c.recent.inputs.all()[:, :before].transpose(0, 1).clone() for c in self.caches)
        c_mem = tuple(c.compressed.inputs.all().transpose(0, 1).clone() for c in self.caches)
        return Memory(mem, c_mem if len(c_mem[0]) else ())


class Rereader:
    """A model without memory in the middle of B streams: what it reads at each token are the newest
    S tokens, all again, since each of them would see a little farther back otherwise."""

    def __init__(self, model: "MemoryLM", batch: int):
        self.model, self.batch = model, batch
        self.text = torch.empty(0, batch, dtype=torch.long, device=model.embed.weight.device)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last."""
        self.text = torch.cat((self.text, tokens))[-self.model.config.segment_len :]
        was_training = self.model.training
        self.model.eval()
        logits = self.model(self.text).logits[-1]
        self.model.train(was_training)
        return logits


def write(
    reader: Decoder | Rereader,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """Read ``prompt [P, B]``, then draw token after token ``[B]`` and read each in turn, until every
    stream has come to ``stop`` or ``max_new_tokens`` are written; the last one is left unread."""
    stopped = torch.zeros(reader.batch, dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        logits = reader.read(prompt)
        token = sampling.draw(logits.float(), generator)  # [B]
        yield token
        if stop is not None:
            stopped |= token == stop
            if stopped.all():
                return
        prompt = token[None]


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


def few_rows(linear: nn.Linear, x: Tensor) -> Tensor:
    """``linear(x)`` for ``x [t, B, in]``, at the speed of memory where there are one or two rows.

    PyTorch gives a matrix of one row to one core; as a batch of matrices, the weight is read by all.
    """
    rows, features = x.shape[:-1].numel(), linear.out_features
    parts = math.gcd(features, 4)
    if rows > 2 or parts == 1 or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, linear.weight, linear.bias)
    weight = linear.weight.view(parts, features // parts, linear.in_features)
    columns = x.reshape(rows, -1).t().expand(parts, -1, -1)  # [parts, in, rows]
    out = torch.bmm(weight, columns).view(features, rows).t().reshape(*x.shape[:-1], features)
    return out if linear.bias is None else out + linear.bias
