"""Reading step by step, which equals the forward pass: keys and values are cached, each projected once. When
a segment is full, the model makes the next memory, and what stays in it keeps its keys."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.fields import Count, check_value
from memformers.common.text import UserError
from memformers.generation.fingerprint import Fingerprint
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.base import MemoryStack, all_modules, eval_mode
from memformers.models.core import MemoryCore
from memformers.models.fast_linear import linear, product
from memformers.models.fused_norm import folded
from memformers.models.hooks import is_hooked, is_unmodified
from memformers.models.language_model import MemoryLM
from memformers.models.layers import MemoryLayer
from memformers.models.memory import Memory, check_memory, check_streams


@dataclass
class LayerCache:
    """Keys and values of a layer's compressed memory, memory and running segment, in order of time. Keys and
    distances are transposed, since a row times a plain matrix is fast everywhere, in every precision."""

    layer: MemoryLayer
    maps: Sequence[Callable[[Tensor], Tensor]]  # to query, key and value, as one or two if possible
    terms: dict[str, Tensor]  # r [H, K, E] and the kernel's others, for the longest attention
    r_descending: Tensor  # [H, E, K], by descending distance: a shorter past needs its end
    key: Tensor  # [B, H, E, C + M + S]
    value: Tensor  # [B, H, C + M + S, E]

    def project(self, z: Tensor, m: Tensor) -> Tensor:
        """What queries, and keys and values are made of, ``[t, B, D]`` each, to all: ``[3, B, H, t, E]``."""
        (t, B, D), H = z.shape, self.layer.self_attn.heads
        outputs = [project(m if i else z) for i, project in enumerate(self.maps)]  # [t, B, 3D] in all
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
        key = self.key[..., first:end]  # [B, H, E, K]
        value = self.value[:, :, first:end]  # [B, H, K, E]
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


@dataclass
class KeyCache:
    """The caches of all layers, in one segment."""

    fingerprint: Fingerprint  # of the model that computed them
    layers: list[LayerCache]
    past: Memory  # before the segment
    inputs: Tensor  # [n_layers, S, B, D]: each layer's inputs in the segment, as far as it was read
    n_read: int = 0
    """How many tokens of the segment were read into it."""

    @classmethod
    def build(cls, model: Any, past: Memory, batch: int) -> "KeyCache":
        """A cache of what ``model`` computes now, for the segment after ``past``."""
        transformer, S = model.transformer, model.config.segment_len
        fingerprint, layers = Fingerprint(model), []
        for layer in transformer.memory_layers:
            attention = layer.self_attn
            size = layer.size
            terms = attention.distance_terms(size.c_mem_len + size.longest_memory + S)
            query, *others = attention.query, attention.key, attention.value
            groups = [[query, *others]] if layer.shift is None else [[query], others]
            maps = [project for group in groups for project in stacked(group)]
            r_descending = terms["r"].flip(1).mT.contiguous()  # [H, E, K]
            H, E = r_descending.shape[:2]
            nothing = r_descending.new_empty(batch, H, 0, E)
            layers.append(LayerCache(layer, maps, terms, r_descending, nothing.mT, nothing))
        nothing = empty_inputs(transformer, batch)
        cache = cls(fingerprint, layers, past, nothing.expand(len(layers), *nothing.shape))
        cache.begin(past, S, reuse=False)
        return cache

    def begin(self, memory: Memory, S: int, *, reuse: bool) -> None:
        """Start a segment of length S after ``memory``. With ``reuse``, the keys of all that it has of the
        past and of the last segment are kept, and only new slots are projected."""
        n_layers, (_, _, *width) = len(self.layers), self.inputs.shape
        nothing = self.inputs.new_empty(0, *width)  # [0, B, D]
        for i, layer in enumerate(self.layers):
            (M, C), (new_M, new_C) = (m.lengths(n_layers)[i] for m in (self.past, memory))
            slots, positions = (xs[i] if xs else nothing for xs in (memory.c_mem, memory.mem))
            if reuse:
                size = layer.layer.size
                n = min(size.n_evicted(M + S) // size.compression_rate, new_C)
                layer.restart(slots[new_C - n :], C, new_C - n, new_M, S)
            else:
                layer.restart(torch.cat((slots, positions)), 0, 0, 0, S)
        self.past, self.n_read = memory, 0
        # A new tensor, since the memory may have views of the last segment's.
        self.inputs = nothing.new_empty(n_layers, S, *width)

    def hide_past(self, streams: Tensor) -> None:
        """Clear the keys and values of ``streams``, boolean ``[B]``, whose document begins with the segment.
        What it hides may not be finite, and would meet a bias of −∞ or a probability of 0."""
        for layer in self.layers:
            for tensor in (layer.key, layer.value):
                tensor.masked_fill_(streams[:, None, None, None], 0)


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values cached. It reads in
    eval mode and without gradient.

    Each result is that of the model's forward pass for the running segment after [`memory`][], with the
    modules and weights that the model has in that call. If they differ from those of the last call, keys and
    values are computed again. A new module, hook, attribute or tensor is always noticed, and so is a change
    of a weight that PyTorch counts (``_version``). It doesn't count fused optimizers and operations on
    ``.data``: these are noticed if they change one of 37 numbers, one in each 37th of a parameter or buffer.
    So a step of an optimizer and a moving average are noticed; an operation on ``.data`` that changes less
    than a 37th of a weight may not be.

    A model with hooks, a replaced ``forward`` or sharded weights (FSDP2) is called with the whole running
    segment in each step, which takes longer.

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

    def __init__(self, model: MemoryCore | MemoryLM, batch: int, memory: Memory | None = None):
        check_value("batch", batch, Count)
        if not isinstance(model, MemoryCore | MemoryLM):
            raise UserError(
                f"expected a MemoryLM or a MemoryCore, got a {type(model).__name__}; pass the model in it."
            )
        self.model: Any = model
        self.config = model.config
        self.cache: KeyCache | None = None
        self.doc_starts: Tensor | None = None
        self.slides = isinstance(model, MemoryLM) and self.config.model == "transformer"
        """Whether it reads the newest S tokens again for each token, as a model without memory must."""
        self.last: Tensor | None = None
        """The newest result, ``[B, …]``; None before the first step."""
        # Outside of inference mode, so that what is kept can be used in it and outside.
        with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
            like = empty_inputs(model.transformer, batch)  # [0, B, D]
            self.past = check_memory(memory, like, model.transformer.sizes).detach()
            if isinstance(model, MemoryCore):
                self.running = like.new_empty(0, batch, model.config.d_input or model.config.d_model)
            else:
                self.running = like.new_empty(0, batch, dtype=torch.int64)
            self._current_cache()

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        with torch.inference_mode(False), torch.no_grad():
            return self.past.map(torch.clone)

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` to its result ``[B, …]``, with ``doc_starts [B]``, as [`read`][] does."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

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
        # Outside of inference mode, so that what is kept can be used in it and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_current():
                return self._read_segments(self.cache, x, doc_starts)
            with eval_mode(self.model):
                return self._read_segments(self._current_cache(), x, doc_starts)

    def _read_segments(self, cache: KeyCache | None, x: Tensor, doc_starts: Tensor | None) -> Tensor:
        """[`read`][] with the current cache, or without one."""
        results = []
        begin = 0
        while begin < len(x):
            room = self.config.segment_len - (0 if self.slides else len(self.running))
            part = slice(begin, begin + room)
            starts = None if doc_starts is None else doc_starts[part]
            results.append(self._read_within_segment(cache, x[part], starts))
            begin = part.stop
        return torch.cat(results)

    def _read_within_segment(self, cache: KeyCache | None, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. What is
        kept changes at the end, all at once, so that Ctrl-C leaves no half of a step."""
        t, S = len(x), self.config.segment_len
        running, doc_starts = torch.cat((self.running, x))[-S:], self.doc_starts
        if doc_starts is not None or new_starts is not None:
            none = torch.zeros(len(self.running) + t, x.shape[1], dtype=torch.bool, device=x.device)
            old = none[:-t] if doc_starts is None else doc_starts
            doc_starts = torch.cat((old, none[-t:] if new_starts is None else new_starts))[-S:]
        is_full = len(running) == S and not self.slides
        memory: Any = None

        # The result, and after a full segment the next memory.
        if cache is None and must_be_called(self.model):
            output, memory, _ = self.model(running, self.past, doc_starts=doc_starts)
            result = output[-1:] if isinstance(self.model, MemoryLM) else output[-t:]
        else:
            transformer = self.model.transformer
            past = self.past if doc_starts is None else self.past.reset(doc_starts[0])
            if cache is None:
                output, inputs = transformer.read(self._encode(running), past, doc_starts=doc_starts)
            else:
                output = self._read_newest(cache, x, running, doc_starts)
                inputs = cache.inputs.unbind()
            result = self.model.predict(output[-1:]) if isinstance(self.model, MemoryLM) else output[-t:]
            if is_full:
                memory, _ = transformer.remember(past, inputs, doc_starts, S)

        # What the next step continues from.
        if is_full:
            self.cache = None  # until all of its layers are in the next segment
            if cache is not None:
                cache.begin(memory, S, reuse=transformer.only_appends)
            self.past = memory
            self.running = running[:0]
            self.doc_starts = None
        else:
            self.running = running
            self.doc_starts = doc_starts
            if cache is not None:
                cache.n_read = len(running)
        if cache is not None:
            self.cache = cache
        self.last = result[-1]
        return result

    def _is_current(self) -> bool:
        """Whether the cache has the running segment, and the model is in eval mode and as it was for it."""
        cache = self.cache
        return (
            cache is not None
            and cache.past is self.past
            and cache.n_read >= len(self.running)
            and not is_hooked(self.model)  # which also sees a hook of all modules
            and cache.fingerprint.matches()
        )

    def _current_cache(self) -> KeyCache | None:
        """The cache of the running segment for the model, in eval mode, as it is now; None if it can't have
        one."""
        transformer = self.model.transformer
        if self.slides or must_be_called(self.model) or not attends_to_keys(transformer):
            return None
        cache = self.cache
        if cache is None or cache.past is not self.past or not cache.fingerprint.matches():
            batch = self.running.shape[1]
            check_memory(self.past, empty_inputs(transformer, batch), transformer.sizes)
            cache = KeyCache.build(self.model, self.past, batch)
        n = len(self.running)
        if cache.n_read < n:
            self._read_newest(cache, self.running[cache.n_read :], self.running, self.doc_starts)
            cache.n_read = n
        self.cache = cache
        return cache

    def _read_newest(self, cache: KeyCache, x: Tensor, running: Tensor, doc_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]``, the newest of ``running``, into ``cache``: outputs ``[t, B, D]``."""
        t, end = len(x), len(running)
        if end == t and doc_starts is not None:
            self.cache = None  # until the step is complete
            cache.hide_past(doc_starts[0])
        output, transformer = self._encode(x), self.model.transformer
        first = transformer.first_visible_keys(running, self.past, doc_starts, windows=t > 1)
        starts = None if doc_starts is None else doc_starts[-t:]
        befores = cache.inputs[:, end - t - 1 : end - t] if end > t else self.past.before or repeat(None)
        for layer, inputs, key_start, before in zip(cache.layers, cache.inputs, first, befores, strict=False):
            inputs[end - t : end] = output
            keys = layer.layer.shifted(output, before, starts)
            begin = layer.value.shape[2] - self.config.segment_len + end - t
            key_start = None if key_start is None else key_start[:, -t:]
            output = layer.layer(
                output, cached=lambda x, c=layer, m=keys, b=begin, k=key_start: c.attend(x, m, b, k)
            )
        return transformer.norm(output)

    def _encode(self, x: Tensor) -> Tensor:
        return self.model.encoded(x) if isinstance(self.model, MemoryCore) else self.model.embed(x)


def must_be_called(model: nn.Module) -> bool:
    """Whether only a call of ``model`` itself is right, since something sees or changes the calls of a module
    in it, or gathers sharded weights before them."""
    for module in all_modules(model):
        if is_hooked(module) or any(hasattr(x, "full_tensor") for x in module._parameters.values()):
            return True
    return False


def attends_to_keys(transformer: MemoryStack) -> bool:
    """Whether all that layers do with past positions is to attend to their keys, which then can be kept."""
    return transformer.keeps_keys and all(
        is_unmodified(layer.self_attn, RelativeMultiHeadAttention)
        and type(layer).attend is MemoryLayer.attend
        for layer in transformer.memory_layers
    )


def empty_inputs(transformer: MemoryStack, batch: int) -> Tensor:
    """``[0, B, D]`` in the dtype and on the device of the weights, which may be sharded."""
    weight = transformer.weight
    return torch.empty(0, batch, weight.shape[0], dtype=weight.dtype, device=weight.device)


def stacked(maps: Sequence[nn.Module]) -> list[Callable[[Tensor], Tensor]]:
    """``maps`` as functions of ``[·, in]``: as one, ``[·, out of all]``, where nobody changed them."""
    linear_maps = [module for module in maps if is_unmodified(module, nn.Linear)]
    if len(linear_maps) < len(maps):
        return [partial(linear, module) for module in maps]
    weights, biases = zip(*(folded(None, module) for module in linear_maps), strict=True)
    return [partial(product, weight=torch.cat(weights), bias=torch.cat(biases))]
