"""Reading step by step, with keys and values kept.

In training, each segment projects its whole memory again, since the weights change with each step. Here each
position is projected once. When a segment is full, the model's own step makes the next memory, so what is read
step by step equals the forward pass. What stays in the memory keeps its keys, and only new slots are projected.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.kernels.dispatch import relative_attention
from memformers.models.boundaries import check_starts, first_in_window
from memformers.models.core import MemoryCore, read_features
from memformers.models.language_model import MemoryLM
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import LayerLengths, by_layer
from memformers.models.linear import linear
from memformers.models.memory import Memory, check_lengths, check_memory, with_streams
from memformers.models.own_memory import OwnMemory
from memformers.models.stack import eval_mode


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer in order of time: compressed memory, memory, and room for a segment."""

    layer: MemoryLayer
    window: int | None
    """How many of the newest keys a position sees, its own included; None for all."""
    terms: dict[str, Tensor]
    """The kernel's terms; r ``[H, K, E]`` and s ``[H, K]`` by descending distance, so that a shorter past
    takes the end of them."""
    key: Tensor
    """``[B, H, C + M + S, E]``; what is not read yet has no meaning."""
    value: Tensor
    """As ``key``."""
    segment_len: int
    """S."""

    @property
    def past(self) -> int:
        """The number of keys before the segment, C + M."""
        return self.key.shape[2] - self.segment_len

    def project(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values ``[B, H, t, E]`` of what attention reads, ``z [t, B, D]``."""
        attention = self.layer.self_attn
        return attention.by_head(linear(attention.key, z)), attention.by_head(linear(attention.value, z))

    def followed(self, x: Tensor | None, slots: slice, recent: slice) -> "LayerCache":
        """The cache of the next segment: the columns ``slots`` of this one, the keys and values of ``x [n, B,
        D]``, and the columns ``recent``."""
        B, H, _, E = self.key.shape
        room = self.key.new_empty(B, H, self.segment_len, E)
        new = (room[:, :, :0],) * 2 if x is None else self.project(self.layer.attention_input(x))
        key, value = (
            torch.cat((old[:, :, slots], added, old[:, :, recent], room), dim=2)
            for old, added in zip((self.key, self.value), new, strict=True)
        )
        return replace(self, key=key, value=value)

    def attend(self, x: Tensor, begin: int, key_start: Tensor | None, alone: bool) -> Tensor:
        """Attention of the layer's next inputs ``x [t, B, D]``, which become the keys from ``begin`` on, over
        the keys from ``key_start [B, t]`` on, None for all: ``[t, B, D]``; ``alone`` says that t is 1 and
        that all keys are finite."""
        attention, z, end = self.layer.self_attn, self.layer.attention_input(x), begin + len(x)
        self.key[:, :, begin:end], self.value[:, :, begin:end] = self.project(z)
        query = attention.by_head(linear(attention.query, z))
        first = 0 if self.window is None else max(begin + 1 - self.window, 0)
        key, value = self.key[:, :, first:end], self.value[:, :, first:end]
        terms = {n: term[:, first - end :] if n in ("r", "s") else term for n, term in self.terms.items()}
        if key_start is not None:
            key_start = (key_start - first).clamp(min=0)
        if alone:
            context = attention_of_one(query, key, value, **terms, key_start=key_start)
        else:
            key_start = first_in_window(x, key_start, end - first, self.window)
            terms |= {name: terms[name].flip(1) for name in ("r", "s") if name in terms}
            context = relative_attention(
                query, key, value, **terms, key_start=key_start, kernel=attention.kernel
            )
        return linear(attention.output, rearrange(context, "b h t e -> t b (h e)"))


def attention_of_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    r: Tensor,
    *,
    u: Tensor,
    v: Tensor | None = None,
    s: Tensor | None = None,
    key_start: Tensor | None = None,
) -> Tensor:
    """[`memformers.kernels.naive.relative_attention`][] of the newest position ``query [B, H, 1, E]``, with r
    ``[H, K, E]`` and s ``[H, K]`` by descending distance, and only of keys and values that are finite."""
    B, H, K, E = key.shape
    scale = 1 / math.sqrt(E)
    # Rows times transposed matrices: PyTorch reads these at the speed of memory on every processor.
    with_v = query if v is None else query + v[:, None]
    position = torch.bmm(with_v.squeeze(2).transpose(0, 1), r.mT)  # [H, B, K]
    position = position if s is None else position + s[:, None]
    position = position.transpose(0, 1).reshape(B * H, 1, K)
    with_u, keys = (query + u[:, None]).flatten(0, 1), key.flatten(0, 1).mT
    scores = torch.baddbmm(position, with_u, keys, beta=scale, alpha=scale)  # [B·H, 1, K]
    if key_start is not None:
        hidden = torch.arange(K, device=key_start.device) < key_start[:, :, None]  # [B, 1, K]
        scores = scores.view(B, H, K).masked_fill(hidden, -math.inf).view(B * H, 1, K)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(B, H, 1, E)


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values kept.

    It reads in eval mode and without gradient. The model must not be trained at the same time, since keys and
    values would belong to other weights. Documents, or episodes, begin where ``doc_starts`` say so, and are
    kept separate as in the forward pass ([`memformers.models.boundaries`][]).

    Args:
        model: A core, which reads features ``[t, B, F]`` to its outputs ``[t, B, D]``; or a language model,
            which reads tokens ``[t, B]`` to the logits ``[1, B, vocab_size]`` after the last of each segment.
        batch: The number of streams, B.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.

    Raises:
        ValueError: For a memory of another model or batch.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore, Stepper
        >>> stepper = Stepper(MemoryCore(CoreConfig(d_input=3, d_model=32)).eval(), batch=2)
        >>> for features in torch.randn(100, 2, 3):  # [B, F] each
        ...     output = stepper.step(features)
        >>> output.shape, stepper.memory().mem_len
        (torch.Size([2, 32]), 64)
    """

    @torch.no_grad()
    def __init__(self, model: MemoryCore | MemoryLM, batch: int, memory: Memory | None = None):
        check_value("batch", batch, Count)
        self.model, self.transformer, self.config = model, model.transformer, model.config
        self.lengths, n_layers = self.config.layer_lengths, self.config.n_layers
        weight = self.transformer.memory_layers[0].norm_ff.weight  # [D]
        self.encode: Callable[[Tensor], Tensor]
        if isinstance(model, MemoryLM):
            self.encode, self.decode = model.embed, lambda output: model.predict(output[-1:])
            nothing = weight.new_empty(0, batch, dtype=torch.int64)
        else:
            self.encode, self.decode = model.encoded, lambda output: output
            nothing = weight.new_empty(0, batch, model.config.d_input or model.config.d_model)
        memory = (memory or Memory(())).detach()
        check_memory(memory, weight.expand(1, batch, -1), n_layers)
        check_lengths(memory, self.config, complete=True)
        self.caches: list[LayerCache] = []
        """Of each layer; none where other things than attention read the memory, and the running segment is
        read again with each step."""
        if self.transformer.keeps_keys:
            window = self.config.window
            windows = [None] * n_layers if window is None else by_layer(window, n_layers, "window")
            each = zip(self.transformer.memory_layers, self.lengths, windows, strict=True)
            self.caches = [empty_cache(*of_layer, self.config.segment_len, batch) for of_layer in each]
        self.begin(memory, nothing, self.projected(memory))

    def begin(self, memory: Memory, nothing: Tensor, caches: list[LayerCache]) -> None:
        """Begin a segment after ``memory``, of which the ``caches`` have the keys; ``nothing`` is ``[0, B,
        …]``."""
        S, weight = self.config.segment_len, self.transformer.memory_layers[0].norm_ff.weight
        inputs = weight.new_empty(len(caches), S, nothing.shape[1], len(weight))
        finite = nothing.device.type == "cpu" and all(map(is_finite, (*memory.mem, *memory.c_mem)))
        self.past, self.caches, self.inputs, self.finite = memory, caches, inputs, finite
        self.running, self.doc_starts = nothing, None

    def projected(self, memory: Memory) -> list[LayerCache]:
        """The caches after a ``memory`` of which no key is known."""
        none, found = slice(0), []
        for i, cache in enumerate(self.caches):
            past = [parts[i] for parts in (memory.c_mem, memory.mem) if parts]
            found.append(cache.followed(torch.cat(past) if past else None, none, none))
        return found

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return with_streams(self.past, torch.clone)

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` of each stream to its result ``[B, …]``; ``doc_starts [B]`` is true where a
        stream's new document begins with it. Errors as in [`read`][]."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

    @torch.no_grad()
    def read(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``x [T, B, …]``, T ≥ 1, to its results, one after the other.

        ``doc_starts``, boolean ``[T, B]``, is true where a stream's new document begins: it sees nothing of
        what came before. The segments end at the same places with and without starts. Raises UserError for x
        of another shape, for what ``encode`` refuses, and for starts of another shape, dtype or device.
        """
        if not len(x) or x.shape[1:] != self.running.shape[1:]:
            wanted = ", ".join(map(str, self.running.shape[1:]))
            raise UserError(f"expected [steps, {wanted}], at least one step, got {list(x.shape)}.")
        check_starts(doc_starts, x)
        results, begin = [], 0
        with eval_mode(self.model):
            while begin < len(x):
                part = slice(begin, begin + self.config.segment_len - len(self.running))
                results.append(self.take_in(x[part], None if doc_starts is None else doc_starts[part]))
                begin = part.stop
        return torch.cat(results)

    def take_in(self, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. What is
        kept changes at the end, all at once, so that Ctrl-C leaves no half of a step."""
        doc_starts = joined_starts(self.doc_starts, self.running, new_starts, x)
        running, begin, finite = torch.cat((self.running, x)), len(self.running), self.finite
        if self.caches:
            seen: list[Tensor | None] = [None] * len(self.caches)
            if doc_starts is not None or self.past.valid is not None:
                seen = self.transformer.first_seen(running, self.past, doc_starts, None)
            output, inputs = self.encode(x), self.inputs.unbind()
            for cache, kept, first in zip(self.caches, inputs, seen, strict=True):
                kept[begin : len(running)] = output
                key_start = None if first is None else first[:, begin:]
                how = {"begin": cache.past + begin, "key_start": key_start, "alone": finite and len(x) == 1}
                output = cache.layer(x=output, cached=partial(cache.attend, **how))
            output = self.transformer.norm(output)
            finite = finite and is_finite(self.inputs[:, begin : len(running)])
        else:
            encoded = self.encode(running)
            output, inputs = read_features(self.transformer, self.config, encoded, self.past, doc_starts)
            output = output[begin:]
        result = self.decode(output)
        if len(running) == self.config.segment_len:
            self.end_segment(inputs, doc_starts)
        else:
            self.running, self.doc_starts, self.finite = running, doc_starts, finite
        return result

    def end_segment(self, inputs: Sequence[Tensor], doc_starts: Tensor | None) -> None:
        """Remember a full segment of these layer ``inputs [S, B, D]``, with ``doc_starts [S, B]``."""
        before = self.past
        memory, _ = self.transformer.after_segment(before, inputs, self.config, inputs[0], doc_starts)
        if isinstance(self.transformer, OwnMemory):
            caches = self.projected(memory)
        else:
            of_each = zip(before.lengths(len(inputs)), memory.lengths(len(inputs)), self.lengths, strict=True)
            caches = []
            for i, (cache, ((M, C), (new_M, new_C), own)) in enumerate(zip(self.caches, of_each, strict=True)):
                n = min(own.leaving(M + len(inputs[i])) // own.compression_rate, new_C)
                slots = memory.c_mem[i][new_C - n :] if n else None
                K = cache.key.shape[2]
                caches.append(cache.followed(slots, slice(C - new_C + n, C), slice(K - new_M, K)))
        self.begin(memory, self.running[:0], caches)


def empty_cache(
    layer: MemoryLayer, lengths: LayerLengths, window: int | None, segment_len: int, batch: int
) -> LayerCache:
    """The cache of a layer that remembers nothing yet, and at most its ``lengths``."""
    longest = lengths.c_mem_len + lengths.longest_memory + segment_len
    terms = dict(layer.self_attn.distance_terms(longest))
    terms |= {name: terms[name].flip(1) for name in ("r", "s") if name in terms}
    nothing = layer.norm_ff.weight.new_empty(segment_len, batch, layer.d_model)
    room = layer.self_attn.by_head(nothing)
    return LayerCache(layer, window, terms, room, room, segment_len)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers of ``x``, of any shape, are finite."""
    return not x.numel() or all(math.isfinite(bound) for bound in x.aminmax())


def joined_starts(
    before: Tensor | None, read_before: Tensor, new: Tensor | None, x: Tensor
) -> Tensor | None:
    """The starts ``[r + t, B]`` of what was ``read_before [r, B, …]`` and of ``x [t, B, …]`` after it; None
    where no document begins in either."""
    if before is None and new is None:
        return None
    each = ((before, read_before), (new, x))
    return torch.cat([x.new_zeros(x.shape[:2], dtype=torch.bool) if s is None else s for s, x in each])
