"""Reading step by step, with keys and values kept.

In training, each segment projects its whole memory again, since weights change with each step. Here each
position is projected once. When a segment is full, the model's own step makes the next memory, so reading
step by step equals the forward pass. What stays keeps its keys, and only new slots are projected.
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
from memformers.models.base import eval_mode
from memformers.models.core import MemoryCore
from memformers.models.custom_memory import CustomMemory
from memformers.models.documents import check_starts
from memformers.models.language_model import MemoryLM
from memformers.models.layers import MemoryLayer
from memformers.models.linear import linear
from memformers.models.memory import Memory, check_memory


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of a layer in order of time: of compressed memory, memory and running segment.

    Keys and position terms are transposed, since the product of a row with a plain matrix is fast on every
    processor and in every precision."""

    layer: MemoryLayer
    window: int | None
    """How many of the newest keys a position sees, its own included; None for all."""
    terms: dict[str, Tensor]
    """The kernel's terms, but r ``[H, E, K]`` and s ``[H, 1, K]`` by descending distance, so that a shorter
    past takes the end of them."""
    key: Tensor
    """``[B, H, E, C + M + S]``."""
    value: Tensor
    """``[B, H, C + M + S, E]``."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys ``[B, H, E, t]`` and values ``[B, H, t, E]`` of what attention reads, ``x [t, B, D]``."""
        attention = self.layer.self_attn
        return attention.by_head(linear(attention.key, x)).mT, attention.by_head(linear(attention.value, x))

    def followed(self, x: Tensor, room: int, slots: slice, recent: slice) -> "LayerCache":
        """The cache of the next segment: the columns ``slots`` of this one, the keys of ``x [n, B, D]``, the
        columns ``recent``, and ``room`` for more."""
        empty = self.layer.self_attn.by_head(x.new_empty(room, *x.shape[1:]))  # [B, H, S, E]
        key, value = (
            self.project(self.layer.attention_input(x)) if len(x) else (empty.mT[..., :0], empty[:, :, :0])
        )
        key = torch.cat((self.key[..., slots], key, self.key[..., recent], empty.mT), dim=3)
        value = torch.cat((self.value[:, :, slots], value, self.value[:, :, recent], empty), dim=2)
        return replace(self, key=key, value=value)

    def attend(self, x: Tensor, begin: int, key_start: Tensor | None, alone: bool) -> Tensor:
        """Attention of the layer's next inputs ``x [t, B, D]``, which become the keys from ``begin`` on, over
        the keys from ``key_start [B, t]`` on, None for all: ``[t, B, D]``; ``alone`` says that t is 1 and
        that all keys are finite."""
        attention, z, end = self.layer.self_attn, self.layer.attention_input(x), begin + len(x)
        self.key[..., begin:end], self.value[:, :, begin:end] = self.project(z)
        query = attention.by_head(linear(attention.query, z))
        first = 0 if self.window is None else max(begin + 1 - self.window, 0)
        key, value = self.key[..., first:end], self.value[:, :, first:end]
        terms = {n: term[..., first - end :] if n in ("r", "s") else term for n, term in self.terms.items()}
        if key_start is not None and first:
            key_start = (key_start - first).clamp(min=0)
        if alone:
            context = attention_of_one(query, key, value, **terms, key_start=key_start)
        else:
            terms["r"] = terms["r"].mT.flip(1)
            if "s" in terms:
                terms["s"] = terms["s"].squeeze(1).flip(1)
            how = {"mask": None, "key_start": key_start, "dropout_prob": 0.0, "kernel": attention.kernel}
            context = relative_attention(query, key.mT, value, **terms, **how)  # type: ignore[arg-type]
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
    """[`memformers.kernels.naive.relative_attention`][] of the newest position, ``query [B, H, 1, E]``, with
    key ``[B, H, E, K]``, r ``[H, E, K]`` and s ``[H, 1, K]`` as in [`LayerCache`][]. A hidden key or value
    must be finite."""
    B, H, E, K = key.shape
    position = torch.bmm(
        (query if v is None else query + v[:, None])[:, :, 0].transpose(0, 1), r
    )  # [H, B, K]
    position = (position if s is None else position + s).transpose(0, 1).reshape(B * H, 1, K)
    with_u, scale = (query + u[:, None]).flatten(0, 1), 1 / math.sqrt(E)
    scores = torch.baddbmm(position, with_u, key.flatten(0, 1), beta=scale, alpha=scale).view(B, H, K)
    if key_start is not None:
        hidden = torch.arange(K, device=key.device) < key_start[:, :, None]  # [B, 1, K]
        scores = scores.masked_fill(hidden, -math.inf)
    probabilities = scores.softmax(-1).view(B * H, 1, K)
    return torch.bmm(probabilities, value.flatten(0, 1)).view(B, H, 1, E)


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values kept.

    It reads in eval mode and without gradient. The model must not be trained at the same time, since keys
    would belong to other weights. Documents, or episodes, begin where ``doc_starts`` say so, and are kept
    separate as in the forward pass ([`memformers.models.documents`][]).

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
        self.layers, self.sizes = self.transformer.memory_layers, self.config.memory_sizes
        self.weight = self.transformer.weight
        """``[D]``, which tells dtype and device."""
        self.encode: Callable[[Tensor], Tensor]
        if isinstance(model, MemoryLM):
            self.encode, self.decode = model.embed, lambda output: model.predict(output[-1:])
            nothing = self.weight.new_empty(0, batch, dtype=torch.int64)
        else:
            self.encode, self.decode = model.encoded, lambda output: output
            nothing = self.weight.new_empty(0, batch, model.config.d_input or model.config.d_model)
        self.slides = isinstance(model, MemoryLM) and self.config.model == "transformer"
        """Whether it reads the newest S tokens again for each one, since without a memory, a token would
        otherwise see less at the beginning of a segment."""
        like = self.weight.expand(1, batch, -1)
        memory = check_memory(memory, like, len(self.layers), self.sizes, complete=True).detach()
        self.caches: list[LayerCache] = []
        """Of each layer; none where the running segment is read again with each step."""
        if self.transformer.keeps_keys and not self.slides:
            for layer, own in zip(self.layers, self.sizes, strict=True):
                longest = own.c_mem_len + own.longest_memory + self.config.segment_len
                terms = dict(layer.self_attn.distance_terms(longest))
                terms["r"] = terms["r"].flip(1).mT.contiguous()
                if "s" in terms:
                    terms["s"] = terms["s"].flip(1)[:, None]
                none = layer.self_attn.by_head(self.weight.new_empty(0, batch, layer.d_model))
                self.caches.append(LayerCache(layer, own.window, terms, none.mT, none))
        self.begin(memory, nothing, self.projected(memory, nothing))

    def begin(self, memory: Memory, nothing: Tensor, caches: list[LayerCache]) -> None:
        """Begin a segment after ``memory``, whose keys the ``caches`` have; ``nothing`` is ``[0, B, …]``."""
        inputs = self.weight.new_empty(
            len(caches), self.config.segment_len, nothing.shape[1], len(self.weight)
        )
        finite = nothing.device.type == "cpu" and all(map(is_finite, (*memory.mem, *memory.c_mem)))
        self.past, self.caches, self.inputs, self.finite = memory, caches, inputs, finite
        self.running = nothing
        self.doc_starts: Tensor | None = None

    def projected(self, memory: Memory, nothing: Tensor) -> list[LayerCache]:
        """The caches after a ``memory`` of which no key is known."""
        start, found = self.weight.new_empty(0, nothing.shape[1], len(self.weight)), []
        for i, cache in enumerate(self.caches):
            past = torch.cat([start, *(parts[i] for parts in (memory.c_mem, memory.mem) if parts)])
            found.append(cache.followed(past, self.config.segment_len, slice(0), slice(0)))
        return found

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.past.map(torch.clone)

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
        results, begin, S = [], 0, self.config.segment_len
        with eval_mode(self.model):
            while begin < len(x):
                part = slice(begin, begin + (S if self.slides else S - len(self.running)))
                results.append(self.take_in(x[part], None if doc_starts is None else doc_starts[part]))
                begin = part.stop
        return torch.cat(results)

    def take_in(self, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. What is
        kept changes at the end, all at once, so that Ctrl-C leaves no half of a step."""
        t, S, finite = len(x), self.config.segment_len, self.finite
        running, doc_starts = torch.cat((self.running, x)), self.doc_starts
        if doc_starts is not None or new_starts is not None:
            none = torch.zeros(running.shape[:2], dtype=torch.bool, device=x.device)
            old, new = (
                none[:-t] if doc_starts is None else doc_starts,
                none[-t:] if new_starts is None else new_starts,
            )
            doc_starts = torch.cat((old, new))
        if self.slides:
            running, doc_starts = running[-S:], None if doc_starts is None else doc_starts[-S:]
        inputs: Sequence[Tensor] = self.inputs.unbind()
        if self.caches:
            output = self.with_keys(self.encode(x), running, doc_starts)
            finite = finite and is_finite(self.inputs[:, len(running) - t : len(running)])
        else:
            how = {"doc_starts": doc_starts, "sizes": self.sizes}
            output, inputs = self.transformer(self.encode(running), self.past, **how)
        result = self.decode(output[-t:])
        if len(running) == S and not self.slides:
            self.end_segment(inputs, doc_starts)
        else:
            self.running, self.doc_starts, self.finite = running, doc_starts, finite
        return result

    def with_keys(self, x: Tensor, running: Tensor, doc_starts: Tensor | None) -> Tensor:
        """The transformer's output ``[t, B, D]`` of its inputs ``x [t, B, D]``, the last of the ``running``
        segment ``[r, B, …]`` with ``doc_starts [r, B]``."""
        t, r = len(x), len(running)
        # One position reads its window alone; of several, each has its own.
        seen = self.transformer.first_seen(running, self.past, doc_starts, self.sizes if t > 1 else None)
        for cache, kept, first in zip(self.caches, self.inputs, seen, strict=True):
            kept[r - t : r] = x
            begin = cache.key.shape[3] - self.config.segment_len + r - t
            key_start, alone = None if first is None else first[:, -t:], self.finite and t == 1
            x = cache.layer(x=x, cached=partial(cache.attend, begin=begin, key_start=key_start, alone=alone))
        return self.transformer.norm(x)

    def end_segment(self, inputs: Sequence[Tensor], doc_starts: Tensor | None) -> None:
        """Remember a full segment of these layer ``inputs [S, B, D]``, with ``doc_starts [S, B]``."""
        before, n_layers, S = self.past, len(self.layers), self.config.segment_len
        after, _ = self.transformer.remember(before, inputs, self.sizes, doc_starts, S)
        if isinstance(self.transformer, CustomMemory):
            caches = self.projected(after, self.running)
        else:
            caches = []
            lengths = zip(before.lengths(n_layers), after.lengths(n_layers), self.sizes, strict=True)
            for i, (cache, ((M, C), (new_M, new_C), own)) in enumerate(
                zip(self.caches, lengths, strict=True)
            ):
                n = min(own.n_evicted(M + S) // own.compression_rate, new_C)
                new = after.c_mem[i][new_C - n :] if n else inputs[i][:0]
                slots, recent = slice(C + n - new_C, C), slice(C + M + S - new_M, C + M + S)
                caches.append(cache.followed(new, S, slots, recent))
        self.begin(after, self.running[:0], caches)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers of ``x``, of any shape, are finite."""
    return not x.numel() or all(map(math.isfinite, x.aminmax()))
