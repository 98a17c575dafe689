"""Reading step by step, which equals the forward pass: keys and values are cached, each projected once. When
a segment is full, the model makes the next memory, and what stays in it keeps its keys."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.fields import Count, check_value
from memformers.common.text import UserError
from memformers.models.attention import RelativeMultiHeadAttention, folded, is_unmodified, linear
from memformers.models.base import eval_mode
from memformers.models.core import MemoryCore
from memformers.models.language_model import MemoryLM
from memformers.models.layers import MemoryLayer
from memformers.models.memory import Memory, check_memory, check_streams


@dataclass
class LayerCache:
    """Keys and values of a layer's compressed memory, memory and running segment, in order of time. Keys and
    distances are transposed, since a row times a plain matrix is fast everywhere, in every precision."""

    layer: MemoryLayer
    maps: Sequence[nn.Module]  # to query, key and value: as one, where nobody changed them
    terms: dict[str, Tensor]  # r [H, K, E] and the kernel's others, for the longest attention
    r_descending: Tensor  # [H, E, K], by descending distance: a shorter past needs its end
    key: Tensor  # [B, H, E, C + M + S]
    value: Tensor  # [B, H, C + M + S, E]

    def project(self, z: Tensor, m: Tensor) -> Tensor:
        """What queries, and keys and values are made of, ``[t, B, D]`` each, to all: ``[3, B, H, t, E]``."""
        (t, B, D), H = z.shape, self.layer.self_attn.heads
        outputs = [linear(module, m if i else z) for i, module in enumerate(self.maps)]  # [t, B, 3D] in all
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return joined.view(t, B, 3, H, D // H).permute(2, 1, 3, 0, 4)

    def restart(self, new: Tensor, C: int, kept: int, n: int, S: int) -> None:
        """Keep the newest ``kept`` of C slots and the newest n positions, with what is ``new [·, B, D]``
        between them, and make room for S keys after them."""
        B, H, K, E = self.value.shape
        room = self.value.new_zeros(B, H, S, E)
        key = value = room[:, :, :0]
        if len(new):
            z = self.layer.attention_input(new)
            _, key, value = self.project(z, z)
        slots, recent = slice(C - kept, C), slice(K - n, K)
        self.key = torch.cat((self.key[..., slots], key.mT, self.key[..., recent], room.mT), dim=3)
        self.value = torch.cat((self.value[:, :, slots], value, self.value[:, :, recent], room), dim=2)

    def attend(self, x: Tensor, keys: Tensor, begin: int, key_start: Tensor | None) -> Tensor:
        """Attention of the next inputs ``x [t, B, D]``, whose keys, made of ``keys``, have the indices from
        ``begin`` on, to the keys from ``key_start [B, t]`` on, None for all: ``[t, B, D]``."""
        attention, z = self.layer.self_attn, self.layer.attention_input(x)
        query, key, value = self.project(z, z if keys is x else self.layer.attention_input(keys))
        end = begin + len(x)
        self.key[..., begin:end], self.value[:, :, begin:end] = key.mT, value
        window, first = self.layer.size.window, 0
        if window is not None:  # of several positions, each has its own, in key_start
            first = max(begin + 1 - window, 0)
            key_start = None if key_start is None else (key_start - first).clamp(min=0)
        key, value = self.key[..., first:end], self.value[:, :, first:end]
        if len(x) == 1:
            attended = self.attend_one(query, key, value, key_start)
        else:
            attended = attention.attend_by_head(query, key.mT, value, key_start=key_start)
        return linear(attention.output, attended.permute(2, 0, 1, 3).flatten(2))  # [t, B, D]

    def attend_one(self, query: Tensor, key: Tensor, value: Tensor, key_start: Tensor | None) -> Tensor:
        """What the naive kernel computes for ``query [B, H, 1, E]`` over ``key [B, H, E, K]`` and ``value
        [B, H, K, E]``, by products of rows with plain matrices: ``[B, H, 1, E]``."""
        (B, H, E, K), u, v, s = key.shape, *map(self.terms.get, ("u", "v", "s"))
        assert u is not None
        with_v = query if v is None else query + v[:, None]
        position = torch.bmm(with_v[:, :, 0].transpose(0, 1), self.r_descending[..., -K:])  # [H, B, K]
        if s is not None:
            position = position + s[:, :K].flip(1)[:, None]
        position = position.transpose(0, 1).reshape(B * H, 1, K)
        with_u, scale = (query + u[:, None]).flatten(0, 1), 1 / math.sqrt(E)
        scores = torch.baddbmm(position, with_u, key.flatten(0, 1), beta=scale, alpha=scale).view(B, H, K)
        if key_start is not None:
            hidden = torch.arange(K, device=key.device) < key_start[:, :, None]  # [B, 1, K]
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.bmm(scores.softmax(-1).view(B * H, 1, K), value.flatten(0, 1)).view(B, H, 1, E)


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values cached. It reads in
    eval mode and without gradient. If weights change between two steps, it computes the cache again.

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
        if not isinstance(model, MemoryCore | MemoryLM):
            raise UserError(
                f"expected a MemoryLM or a MemoryCore, got a {type(model).__name__}; pass the model in it."
            )
        self.model: Any = model
        self.transformer, self.config = model.transformer, model.config
        like = self.transformer.weight.expand(1, batch, -1)
        self.past = check_memory(memory, like, self.transformer.sizes).detach()
        if isinstance(model, MemoryCore):
            self.encode: Callable[[Tensor], Tensor] = model.encoded
            self.running = like.new_empty(0, batch, model.config.d_input or model.config.d_model)
        else:
            self.encode, self.running = model.embed, like.new_empty(0, batch, dtype=torch.int64)
        self.doc_starts: Tensor | None = None
        self.slides = isinstance(model, MemoryLM) and self.config.model == "transformer"
        """Whether it reads the newest S tokens again for each token, as a model without memory must."""
        self.last: Tensor | None = None
        """The newest result, ``[B, …]``; None before the first step."""
        with eval_mode(model):
            self._build_caches()

    def _build_caches(self) -> None:
        """Start the segment with caches of the current weights; there are none where layers do more than
        attend to memory and segment: then each step reads the running segment again."""
        layers = self.transformer.memory_layers
        plain = all(
            is_unmodified(layer.self_attn, RelativeMultiHeadAttention)
            and type(layer).attend is MemoryLayer.attend
            for layer in layers
        )
        self.caches: list[LayerCache] = []
        self.weights = [(m._parameters, n, p) for m in self.model.modules() for n, p in m._parameters.items()]
        self.versions = [(x.data_ptr(), x._version) for *_, x in self.weights if x is not None]
        for layer in layers if plain and self.transformer.keeps_keys and not self.slides else ():
            attention, size = layer.self_attn, layer.size
            longest = size.c_mem_len + size.longest_memory + self.config.segment_len
            terms = attention.distance_terms(longest)
            query, *others = attention.query, attention.key, attention.value
            groups = [[query, *others]] if layer.shift is None else [[query], others]
            maps = [module for group in groups for module in stacked(group)]
            r_descending = terms["r"].flip(1).mT.contiguous()  # [H, E, K]
            H, E = r_descending.shape[:2]
            nothing = r_descending.new_empty(self.running.shape[1], H, 0, E)
            self.caches.append(LayerCache(layer, maps, terms, r_descending, nothing.mT, nothing))
        self._begin(self.past)

    def _is_stale(self) -> bool:
        """Whether a weight has changed, or another one has taken its place, since the cache was built."""
        if any(parameters[name] is not weight for parameters, name, weight in self.weights):
            return True
        return [(x.data_ptr(), x._version) for *_, x in self.weights if x is not None] != self.versions

    def _begin(self, memory: Memory, *, reuse: bool = False) -> None:
        """Start a segment after ``memory``. With ``reuse``, the keys of all that it has of the past and of
        the last segment are kept, and only new slots are projected."""
        S, n_layers = self.config.segment_len, len(self.caches)
        nothing = self.transformer.weight.expand(0, self.running.shape[1], -1)  # [0, B, D]
        for i, cache in enumerate(self.caches):
            (M, C), (new_M, new_C) = (m.lengths(n_layers)[i] for m in (self.past, memory))
            slots, positions = (xs[i] if xs else nothing for xs in (memory.c_mem, memory.mem))
            if reuse:
                n = min(cache.layer.size.n_evicted(M + S) // cache.layer.size.compression_rate, new_C)
                cache.restart(slots[new_C - n :], C, new_C - n, new_M, S)
            else:
                cache.restart(torch.cat((slots, positions)), 0, 0, 0, S)
        self.past, self.running, self.doc_starts = memory, self.running[:0], None
        self.inputs = nothing.new_empty(n_layers, S, *nothing.shape[1:])

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.past.map(torch.clone)

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` to its result ``[B, …]``, with ``doc_starts [B]``, as [`read`][] does."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

    @torch.no_grad()
    def read(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``x [T, B, …]``, T ≥ 1, to its results, in order. Where boolean ``doc_starts [T, B]`` is true a new
        document begins, which sees nothing before it; segment boundaries don't move. UserError for what
        doesn't fit."""
        expected = list(self.running.shape[1:])
        if isinstance(self.model, MemoryLM):
            self.model.check_tokens(x, expected[0])
        elif list(x.shape[1:]) != expected or not len(x):
            raise UserError(f"expected [steps, {str(expected)[1:]}, at least one step, got {list(x.shape)}.")
        check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        results, begin, S = [], 0, self.config.segment_len
        with eval_mode(self.model):
            if self._is_stale():
                running, starts = self.running, self.doc_starts
                self._build_caches()
                if len(running):
                    self._read_within_segment(running, starts)
            while begin < len(x):
                part = slice(begin, begin + (S if self.slides else S - len(self.running)))
                results.append(
                    self._read_within_segment(x[part], None if doc_starts is None else doc_starts[part])
                )
                begin = part.stop
        return torch.cat(results)

    def _read_within_segment(self, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. What is
        kept changes at the end, all at once, so that Ctrl-C leaves no half of a step."""
        t, S = len(x), self.config.segment_len
        if new_starts is not None and not len(self.running):
            # What the document hides may not be finite, and would meet a bias of −∞ or a probability of 0.
            for cache in self.caches:
                for tensor in (cache.key, cache.value):
                    tensor.masked_fill_(new_starts[0][:, None, None, None], 0)
        running, doc_starts = torch.cat((self.running, x))[-S:], self.doc_starts
        if doc_starts is not None or new_starts is not None:
            none = torch.zeros(len(self.running) + t, x.shape[1], dtype=torch.bool, device=x.device)
            old = none[:-t] if doc_starts is None else doc_starts
            doc_starts = torch.cat((old, none[-t:] if new_starts is None else new_starts))[-S:]
        if self.caches:
            output, end = self.encode(x), len(running)
            first = self.transformer.first_visible_keys(running, self.past, doc_starts, windows=t > 1)
            starts = None if doc_starts is None else doc_starts[-t:]
            befores = self.inputs[:, end - t - 1 : end - t] if end > t else self.past.before or repeat(None)
            for cache, inputs, key_start, before in zip(
                self.caches, self.inputs, first, befores, strict=False
            ):
                inputs[end - t : end] = output
                keys = cache.layer.shifted(output, before, starts)
                begin = cache.value.shape[2] - S + end - t
                key_start = None if key_start is None else key_start[:, -t:]
                output = cache.layer(
                    output, cached=lambda x, c=cache, m=keys, b=begin, k=key_start: c.attend(x, m, b, k)
                )
            output, inputs = self.transformer.norm(output), self.inputs.unbind()
        else:
            past = self.past if doc_starts is None else self.past.reset(doc_starts[0])
            output, inputs = self.transformer.read(self.encode(running), past, doc_starts=doc_starts)
        result = self.model.predict(output[-1:]) if isinstance(self.model, MemoryLM) else output[-t:]
        if len(running) == S and not self.slides:
            past = self.past if doc_starts is None else self.past.reset(doc_starts[0])
            memory, _ = self.transformer.remember(past, inputs, doc_starts, S)
            self._begin(memory, reuse=self.transformer.only_appends)
        else:
            self.running, self.doc_starts = running, doc_starts
        self.last = result[-1]
        return result


def stacked(maps: Sequence[nn.Module]) -> list[nn.Module]:
    linear_maps = [module for module in maps if is_unmodified(module, nn.Linear)]
    if len(linear_maps) < len(maps):
        return list(maps)
    weights, biases = zip(*(folded(None, module) for module in linear_maps), strict=True)
    weight, bias = torch.cat(weights), torch.cat(biases)
    size = weight.shape[1], len(weight)  # without first weights, which would draw from everybody's generator
    one = nn.utils.skip_init(nn.Linear, *size, device=weight.device, dtype=weight.dtype)
    one.weight.copy_(weight)
    one.bias.copy_(bias)
    return [one]
