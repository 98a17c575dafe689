"""Reading step by step, which equals the forward pass: keys and values are kept, each projected once. When a
segment is full, the model's own step makes the next memory; what stays keeps its keys."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.kernels.dispatch import KernelName, relative_attention
from memformers.models import base, custom_memory, documents, layers
from memformers.models.attention import (
    BY_DISTANCE,
    Divided,
    Heads,
    RelativeMultiHeadAttention,
    grouped,
    in_order,
)
from memformers.models.core import MemoryCore
from memformers.models.language_model import MemoryLM
from memformers.models.linear import is_plain, linear, stacked
from memformers.models.memory import Memory, check_memory


@dataclass(frozen=True)
class HeadCache:
    """Keys and values that some heads of a layer read, of compressed memory (or of the positions that heads
    divide), memory and running segment, in order of time. Keys and distances are transposed, since a row
    times a plain matrix is fast everywhere, in every precision."""

    heads: Heads
    terms: dict[str, Any]
    """The kernel's, but r ``[h, E, K]`` and s ``[h, K]`` by falling distance: a shorter past is their end."""
    key: Tensor  # [B, h, E, C + M + S]
    value: Tensor  # [B, h, C + M + S, E]
    hidden: int = 0  # how many older keys the layer has, which other heads read
    divided: Callable[[Tensor], Tensor] | None = None  # from an index of the layer's keys to that of these

    def attend(
        self,
        projected: Tensor,
        left: int,
        window: int | None,
        key_start: Tensor | None,
        alone: bool,
        kernel: KernelName,
    ) -> Tensor:
        """[`LayerCache.attend`][] of queries, keys and values ``[3, B, h, t, E]``: ``[B, h, t, E]``."""
        query, key, value = projected
        begin = self.value.shape[2] - left
        end = begin + query.shape[2]
        self.key[..., begin:end], self.value[:, :, begin:end] = key.mT, value
        first = 0 if window is None else max(begin + 1 - window, 0)
        key, value = self.key[..., first:end], self.value[:, :, first:end]
        terms = {n: x[..., first - end :] if n in BY_DISTANCE else x for n, x in self.terms.items()}
        key_start = self.divided(key_start) if self.divided and key_start is not None else key_start
        key_start = None if key_start is None else (key_start - self.hidden - first).clamp(min=0)
        if alone:  # what the naive kernel computes, by products of rows with plain matrices
            (B, H, E, K), u, v, s = key.shape, terms["u"], terms.get("v"), terms.get("s")
            with_v = query if v is None else query + v[:, None]
            position = torch.bmm(with_v[:, :, 0].transpose(0, 1), terms["r"])  # [h, B, K]
            position = (position if s is None else position + s[:, None]).transpose(0, 1).reshape(B * H, 1, K)
            with_u, scale = (query + u[:, None]).flatten(0, 1), 1 / math.sqrt(E)
            scores = torch.baddbmm(position, with_u, key.flatten(0, 1), beta=scale, alpha=scale).view(B, H, K)
            if key_start is not None:
                unseen = torch.arange(K, device=key.device) < key_start[:, :, None]  # [B, 1, K]
                scores = scores.masked_fill(unseen, -math.inf)
            return torch.bmm(scores.softmax(-1).view(B * H, 1, K), value.flatten(0, 1)).view(B, H, 1, E)
        terms |= {name: terms[name].flip(-1) for name in BY_DISTANCE if name in terms}
        terms |= {"r": terms["r"].mT, "key_start": key_start, "kernel": kernel}
        return relative_attention(query, key.mT, value, **terms)


@dataclass(frozen=True)
class LayerCache:
    """What a layer keeps: keys and values, for all heads together or for those that read as many."""

    layer: layers.MemoryLayer
    maps: Sequence[nn.Module]  # to query, key and value: as one, where nobody changed them
    window: int | None  # how many of the newest keys a position sees, its own included; None for all
    groups: tuple[HeadCache, ...]

    def project(self, x: Tensor) -> Tensor:
        """What attention reads, ``x [t, B, D]``, to queries, keys and values, ``[3, B, H, t, E]``."""
        (t, B, D), H = x.shape, self.layer.self_attn.heads
        maps = [linear(each, x) for each in self.maps]  # [t, B, 3D], or three of [t, B, D]
        each = maps[0] if len(maps) == 1 else torch.cat(maps, dim=-1)
        return each.view(t, B, 3, H, D // H).permute(2, 1, 3, 0, 4)

    def attend(self, x: Tensor, left: int, key_start: Tensor | None, alone: bool) -> Tensor:
        """Attention of the next inputs ``x [t, B, D]``, which begin ``left`` places before the end, to the
        keys from ``key_start [B, t]`` on, None for all: ``[t, B, D]``. ``alone``: t is 1, all keys finite."""
        attention, projected = self.layer.self_attn, self.project(self.layer.attention_input(x))
        how = left, self.window, key_start, alone, attention.kernel
        if len(self.groups) == 1:
            context = self.groups[0].attend(projected, *how)
        else:
            found = [group.attend(projected[:, :, group.heads], *how) for group in self.groups]
            context = in_order(found, [group.heads for group in self.groups])
        return linear(attention.output, context.permute(2, 0, 1, 3).flatten(2))  # [t, B, H, E] to [t, B, D]


def joined(parts: tuple[Tensor, ...], dim: int, spare: Tensor) -> Tensor:
    """``parts [B, H, ·, ·]`` along ``dim``, in ``spare`` if that is as long: new memory costs a copy more."""
    fits = spare.shape[dim] == sum(part.shape[dim] for part in parts)
    return torch.cat(parts, dim, out=spare if fits else None)


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values kept. It reads in
    eval mode and without gradient; the model must not be trained or changed at the same time.

    Args:
        model: A core, which reads features ``[t, B, F]`` to its outputs ``[t, B, D]``; or a language model,
            which reads tokens ``[t, B]`` to the logits ``[1, B, vocab_size]`` after the last of each segment.
        batch: The number of streams, B.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.

    Raises:
        ValueError: For a memory of another model or batch, and for fewer learned positions than it needs.

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
        self.model: Any = model
        self.transformer, self.config = model.transformer, model.config
        each, self.sizes = self.transformer.memory_layers, self.config.memory_sizes
        like = self.transformer.weight.expand(1, batch, -1)
        self.past = check_memory(memory, like, len(each), self.sizes, complete=True).detach()
        if isinstance(model, MemoryCore):
            self.encode: Callable[[Tensor], Tensor] = model.encoded
            self.running = like.new_empty(0, batch, model.config.d_input or model.config.d_model)
        else:
            self.encode, self.running = model.embed, like.new_empty(0, batch, dtype=torch.int64)
        self.slides = isinstance(model, MemoryLM) and self.config.model == "transformer"
        """Whether it reads the newest S tokens again for each, so that each sees as many without a memory."""
        self.last: Tensor | None = None
        """The newest result, ``[B, …]``; None before the first step."""
        self.finite, self.doc_starts = True, cast(Tensor | None, None)
        self.none = like.new_empty(batch, self.config.heads, 0, self.config.d_model // self.config.heads)
        self.caches: list[LayerCache] = []  # none where the segment is read again with each step
        with base.eval_mode(model):
            plain = all(is_plain(layer.self_attn, RelativeMultiHeadAttention) for layer in each)
            # With segments of another length, each divides the positions anew.
            plain = plain and not any(
                x.divided and self.config.segment_len % x.divided_by for x in self.sizes
            )
            keeps_keys = plain and self.transformer.keeps_keys and not self.slides
            for layer, own in zip(each if keeps_keys else (), self.sizes, strict=keeps_keys):
                attention = layer.self_attn
                maps = stacked([attention.query, attention.key, attention.value])
                longest = own.most_keys + own.longest_memory - own.mem_len + self.config.segment_len
                terms, none, groups = attention.distance_terms(longest), attention.by_head(like[:0]), []
                terms = {n: term.flip(1) if n in BY_DISTANCE else term for n, term in terms.items()}
                terms["r"] = terms["r"].mT.contiguous()
                for heads, _ in grouped(own.heads or [(0, 0)] * attention.heads):
                    of_heads = {name: term[heads] for name, term in terms.items()}
                    groups.append(HeadCache(heads, of_heads, none[:, heads].mT, none[:, heads]))
                self.caches.append(LayerCache(layer, maps, own.window, tuple(groups)))
            self.spare = self.caches
            self.begin(self.past)

    def begin(self, memory: Memory, inputs: Sequence[Tensor] = ()) -> None:
        """Begin a segment after ``memory``. What that has of the past and of the ``inputs [S, B, D]`` before
        it keeps its keys; without inputs, no key is known."""
        S, like = self.config.segment_len, self.transformer.weight
        caches, checked = list[LayerCache](), list[Tensor]()
        room = like.new_empty(len(self.caches), S, self.running.shape[1], len(like))
        keeps = bool(inputs) and not isinstance(self.transformer, custom_memory.CustomMemory)
        for i, cache in enumerate(self.caches):
            (M, C), (new_M, new_C) = (each.lengths(len(room))[i] for each in (self.past, memory))
            own, n = self.sizes[i], 0
            if keeps:
                n = min(own.n_evicted(M + S) // own.compression_rate, new_C)
                new = memory.c_mem[i][new_C - n :] if n else room[i, :0]
            else:
                new = torch.cat([room[i, :0], *(parts[i] for parts in (memory.c_mem, memory.mem) if parts)])
            _, key, value = cache.project(cache.layer.attention_input(new)) if len(new) else [self.none] * 3
            groups = []
            for group, spare in zip(cache.groups, self.spare[i].groups, strict=True):
                m, c = own.of_group(group.heads, M, C)
                new_m, new_c = own.of_group(group.heads, new_M, new_C)
                projected, hidden, first = (key, value), new_M + new_C - new_m - new_c, None
                if own.divided:  # what heads divide is read as slots are, but made of keys
                    reads, H = Divided(own.newest), own.divided_by
                    (m, c), (new_m, new_c) = (
                        (min(x, reads.newest), reads.split(x, H)[1]) for x in (M, new_M)
                    )
                    hidden, first = 0, partial(reads.first_seen, before=new_M, heads=H)
                    if keeps:
                        left = slice(c, c + m + S - new_m)
                        projected, reads = (group.key[..., left].mT, group.value[:, :, left]), Divided(0)
                    before = projected[0].shape[2]
                    projected = reads.of_heads(projected[0], before), reads.of_heads(projected[1], before)
                    n = projected[0].shape[2]
                made = min(n, new_c) if keeps else new_c + new_m  # the newest of what is projected
                old_slots, old_positions = (new_c - made, new_m) if keeps else (0, 0)
                slots, recent = slice(c - old_slots, c), slice(c + m + S - old_positions, c + m + S)
                newest = tuple(x[:, group.heads, x.shape[2] - made :] for x in projected)
                rest = value.new_zeros(1).expand(*group.value.shape[:2], S, group.value.shape[3])
                keys = group.key[..., slots], newest[0].mT, group.key[..., recent], rest.mT
                values = group.value[:, :, slots], newest[1], group.value[:, :, recent], rest
                cached = joined(keys, 3, spare.key), joined(values, 2, spare.value)
                groups.append(replace(group, key=cached[0], value=cached[1], hidden=hidden, divided=first))
                # Of the caches and not of the memory, which has lost what is hidden and not finite.
                checked += newest if self.finite else cached
            caches.append(replace(cache, groups=tuple(groups)))
        self.finite = like.device.type == "cpu" and all(math.isfinite(x.sum()) for x in checked)
        self.past, self.caches, self.spare, self.inputs = memory, caches, self.caches, room
        self.running, self.doc_starts = self.running[:0], None

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.past.map(torch.clone)

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` to its result ``[B, …]``, with ``doc_starts [B]``, as [`read`][] does."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

    @torch.no_grad()
    def read(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``x [T, B, …]``, T ≥ 1, to its results, in order. Where boolean ``doc_starts [T, B]`` is true a new
        document begins, which sees nothing before it; segments stay. UserError for what doesn't fit."""
        wanted = list(self.running.shape[1:])
        if isinstance(self.model, MemoryLM):
            self.model.check_tokens(x, wanted[0])
        elif list(x.shape[1:]) != wanted or not len(x):
            raise UserError(f"expected [steps, {str(wanted)[1:]}, at least one step, got {list(x.shape)}.")
        documents.check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        results, begin, S = [], 0, self.config.segment_len
        with base.eval_mode(self.model):
            while begin < len(x):
                part = slice(begin, begin + (S if self.slides else S - len(self.running)))
                results.append(self.take_in(x[part], None if doc_starts is None else doc_starts[part]))
                begin = part.stop
        return torch.cat(results)

    def take_in(self, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. What is
        kept changes at the end, all at once, so that Ctrl-C leaves no half of a step."""
        t, S, doc_starts, finite = len(x), self.config.segment_len, self.doc_starts, self.finite
        running = torch.cat((self.running, x))[-S:]
        if doc_starts is not None or new_starts is not None:
            none = torch.zeros(len(self.running) + t, x.shape[1], dtype=torch.bool, device=x.device)
            old = none[:-t] if doc_starts is None else doc_starts
            doc_starts = torch.cat((old, none[-t:] if new_starts is None else new_starts))[-S:]
        inputs: Sequence[Tensor] = self.inputs.unbind()
        if self.caches:
            output, end, alone = self.encode(x), len(running), self.finite and t == 1
            # One position reads its window alone; of several, each has its own.
            seen = self.transformer.first_seen(running, self.past, doc_starts, self.sizes if t > 1 else None)
            for cache, kept, first in zip(self.caches, inputs, seen, strict=True):
                kept[end - t : end] = output
                key_start = None if first is None else first[:, -t:]
                attend = partial(cache.attend, left=S - end + t, key_start=key_start, alone=alone)
                output = cache.layer(output, cached=attend)
            output = self.transformer.norm(output)
            finite = finite and math.isfinite(self.inputs[:, end - t : end].sum())
        else:
            x = self.encode(running)
            output, inputs = self.transformer(x, self.past, doc_starts=doc_starts, sizes=self.sizes)
        result = self.model.predict(output[-1:]) if isinstance(self.model, MemoryLM) else output[-t:]
        if len(running) == S and not self.slides:
            after, _ = self.transformer.remember(self.past, inputs, self.sizes, doc_starts, S)
            self.finite = finite
            self.begin(after, inputs)
        else:
            self.running, self.doc_starts, self.finite = running, doc_starts, finite
        self.last = result[-1]
        return result
