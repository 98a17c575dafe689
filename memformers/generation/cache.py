"""Cached keys and values: a value beside the memory, for reading a segment a few tokens at a time."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memformers.generation.fingerprint import Fingerprint
from memformers.generation.one_token import TokenPath, is_usual
from memformers.kernels.one_query import attend_one_query
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.fast_linear import StackedMap, as_function, by_columns, linear
from memformers.models.fused_norm import folded
from memformers.models.hooks import is_unmodified
from memformers.models.layers import FeedForward, MemoryLayer
from memformers.models.memory import LayerMemory, Memory
from memformers.models.stack import MemoryStack


@dataclass
class LayerCache:
    """Keys and values of a layer's slots, memory and running segment, in order of time, and what attention
    to them needs. Keys and distances are transposed, since a row times a plain matrix is fast everywhere, in
    every precision."""

    layer: MemoryLayer
    normalize: Callable[[Tensor], Tensor]
    """The layer's ``attention_input``."""
    maps: Sequence[Callable[[Tensor], Tensor]]
    """The maps to query, key and value: one, two or three functions."""
    output: Callable[[Tensor], Tensor]
    """The output map of attention."""
    feed_forward: Callable[[Tensor], Tensor]
    """The feed-forward network after its norm, for pre-norm."""
    terms: dict[str, Tensor]
    """The kernel's r ``[H, K, E]``, u, and s or v, for the longest attention."""
    r_descending: Tensor
    """r by descending distance, ``[H, E, K]``: a shorter past needs its end."""
    key: Tensor
    """``[B, H, E, K]``, with room for the whole segment."""
    value: Tensor
    """``[B, H, K, E]``."""
    n_keys: int = 0
    """How many of the keys are there: C + M + i before token i of the segment."""
    n_slots: int = 0
    """C, the number of slots among them."""

    @classmethod
    def build(cls, layer: MemoryLayer, longest: int, batch: int) -> "LayerCache":
        """An empty cache of ``batch`` streams, for attention over at most ``longest`` keys."""
        attention = layer.self_attn
        terms = attention.distance_terms(longest)
        r_descending = terms["r"].flip(1).mT.contiguous()  # [H, E, K]
        H, E, _ = r_descending.shape
        none = r_descending.new_empty(batch, H, 0, E)
        if layer.shift is None:
            maps = stacked([attention.query, attention.key, attention.value])
        else:  # keys and values are projected from other inputs than queries
            maps = [*stacked([attention.query]), *stacked([attention.key, attention.value])]
        return cls(
            layer,
            normalize=layer.attention_input if layer.norm == "post" else as_function(layer.norm_self_attn),
            maps=maps,
            output=as_function(attention.output),
            feed_forward=feed_forward_function(layer),
            terms=terms,
            r_descending=r_descending,
            key=none.mT,
            value=none,
        )

    def restart(self, past: LayerMemory, segment_len: int, kept_slots: int, n_kept: int) -> None:
        """Begin a segment of S tokens after ``past``, of which the first ``kept_slots`` and the newest
        ``n_kept`` positions have their keys here: the newest slots so far, and the newest keys."""
        # Project only what has no keys yet: new slots, or everything if the rule changes old slots.
        new = torch.cat((past.slots[kept_slots:], past.mem[: past.mem_len - n_kept]))  # [·, B, D]
        B, H, _, E = self.value.shape
        key = value = self.value[:, :, :0]
        if len(new):
            z = self.layer.attention_input(new)
            _, key, value = self.project(z, z)
        # In order of time: slots that stay, new ones, positions that stay.
        slots = slice(self.n_slots - kept_slots, self.n_slots)
        recent = slice(self.n_keys - n_kept, self.n_keys)
        keys = torch.cat((self.key[..., slots], key.mT, self.key[..., recent]), dim=3)
        values = torch.cat((self.value[:, :, slots], value, self.value[:, :, recent]), dim=2)
        self.n_slots = past.n_slots
        self.n_keys = past.n_slots + past.mem_len
        # The same buffers as before, if there is room for the segment.
        length = self.n_keys + segment_len
        if self.key.shape[3] < length:
            self.key = keys.new_zeros(B, H, E, length)
            self.value = by_columns(values.new_zeros(B, H, length, E))
        self.key[..., : self.n_keys] = keys
        self.value[:, :, : self.n_keys] = values

    def project(self, z: Tensor, kv_input: Tensor) -> Tensor:
        """Queries, keys and values, ``[3, B, H, t, E]``, of two normalized inputs ``[t, B, D]``: one for
        queries, one for keys and values."""
        t, B, D = z.shape
        H = self.layer.self_attn.n_heads
        outputs = [self.maps[0](z), *(project(kv_input) for project in self.maps[1:])]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)  # [t, B, 3D]
        return joined.view(t, B, 3, H, D // H).permute(2, 1, 3, 0, 4)

    def attend(self, x: Tensor, kv_input: Tensor, key_start: Tensor | None) -> Tensor:
        """Append the keys of the next inputs, made of ``kv_input [t, B, D]``, and attend from ``x [t, B, D]``
        to all keys from ``key_start [B, t]`` on, None for all: ``[t, B, D]``."""
        z = self.normalize(x)
        query, key, value = self.project(z, z if kv_input is x else self.normalize(kv_input))
        # Append: buffers have room for the whole segment.
        begin = self.n_keys
        end = begin + len(x)
        self.key[..., begin:end] = key.mT
        self.value[:, :, begin:end] = value
        self.n_keys = end

        # A single query needs only the keys of its window.
        first = 0
        window = self.layer.window
        if window is not None:  # several queries have their windows in key_start
            first = max(begin + 1 - window, 0)
            key_start = None if key_start is None else (key_start - first).clamp(min=0)
        keys = self.key[..., first:end]  # [B, H, E, K]
        values = self.value[:, :, first:end]  # [B, H, K, E]
        if len(x) == 1:
            attended = self._attend_one_query(query, keys, values, key_start)
            return self.output(attended.reshape(x.shape))  # [1, B, D]
        attention = self.layer.self_attn
        attended = attention.attend_by_head(query, keys.mT, values, key_start=key_start)
        return self.output(attention.join_heads(attended))  # [t, B, D]

    def _attend_one_query(
        self, query: Tensor, key: Tensor, value: Tensor, key_start: Tensor | None
    ) -> Tensor:
        """Attention of ``query [B, H, 1, E]`` to ``key [B, H, E, K]`` and ``value [B, H, K, E]``."""
        K = key.shape[3]
        s = self.terms.get("s")
        return attend_one_query(
            query, key, value, self.r_descending[..., -K:], u=self.terms["u"], v=self.terms.get("v"),
            s=None if s is None else s[:, :K], key_start=key_start,
        )  # fmt: skip


@dataclass
class KeyCache:
    """The caches of all layers in a running segment, and what the segment's end needs."""

    fingerprint: Fingerprint
    """The fingerprint of the model that computed them."""
    autocast_dtype: torch.dtype | None
    """The dtype of the autocast under which they were computed."""
    layers: list[LayerCache]
    past: Memory
    """The memory before the segment."""
    inputs: Tensor
    """``[n_layers, S, B, D]``: each layer's inputs in the segment, as far as it was read."""
    n_read: int = 0
    """How many tokens of the segment have been read."""
    token_path: TokenPath | None = None
    """A faster way for single tokens, if all layers are usual ones."""

    def matches(self) -> bool:
        """Whether the model is in eval mode and unchanged, and autocast is the same."""
        return self.autocast_dtype == autocast_dtype(self.inputs.device) and self.fingerprint.matches()

    @classmethod
    def build(cls, model: Any, past: Memory, batch: int) -> "KeyCache":
        """A cache for the segment after ``past``, of ``model`` in its current state."""
        transformer: MemoryStack = model.transformer
        S = model.config.segment_len
        layers = [
            LayerCache.build(layer, size.most_keys + S, batch)
            for layer, size in zip(transformer.memory_layers, transformer.sizes, strict=True)
        ]
        none = empty_inputs(transformer, batch)
        inputs = none.new_empty(len(layers), S, *none.shape[1:])
        cache = cls(Fingerprint(model), autocast_dtype(inputs.device), layers, past, inputs)
        is_autocast = cache.autocast_dtype is not None
        if not is_autocast and all(is_usual(layer) for layer in transformer.memory_layers):
            cache.token_path = TokenPath(layers)
        cache.begin(transformer, past, S, has_read=False)
        return cache

    def begin(
        self, transformer: MemoryStack, memory: Memory, segment_len: int, *, has_read: bool = True
    ) -> None:
        """Begin a segment of S tokens after ``memory``. If the last segment ``has_read``, keys of what it has
        of the past and of that segment are kept, as far as rules only append."""
        by_layer = zip(self.layers, transformer.memory_rules, self.past.layers, memory.layers, strict=True)
        for layer, rule, old, new in by_layer:
            # A rule that only appends leaves keys valid: those of all but the new slots, and of M positions.
            kept_slots = 0
            n_kept = 0
            if has_read and rule.append_only:
                n_new_slots = rule.size.n_evicted(old.mem_len + segment_len) // rule.size.group
                n_old_slots = new.n_slots - min(n_new_slots, new.n_slots)
                # Missing keys are computed, so rules that fill up their slots are handled, too.
                if rule.size.slot_positions is not None and n_old_slots <= layer.n_slots:
                    kept_slots = n_old_slots
                    n_kept = new.mem_len
            layer.restart(rule.recall(new), segment_len, kept_slots, n_kept)
        self.past = memory
        self.n_read = 0
        self.inputs = torch.empty_like(self.inputs)  # the memory may have views of the last segment's

    def hide_past(self, streams: Tensor) -> None:
        """Clear the keys and values of ``streams``, boolean ``[B]``, whose document begins with the segment.
        Hidden values may not be finite: with a bias of −∞ or a probability of 0, they would become NaN."""
        for layer in self.layers:
            for tensor in (layer.key, layer.value):
                tensor.masked_fill_(streams[:, None, None, None], 0)


def attends_to_keys(transformer: MemoryStack) -> bool:
    """Whether layers only attend to the keys of past positions, so that these keys can be kept."""
    if type(transformer).forward is not MemoryStack.forward:
        return False
    for layer in transformer.memory_layers:
        # A user's layer may override forward, if it passes the cache on.
        takes_cache = "cache" in inspect.signature(type(layer).forward).parameters
        attends_as_usual = takes_cache and type(layer).attend is MemoryLayer.attend
        if not attends_as_usual or not is_unmodified(layer.self_attn, RelativeMultiHeadAttention):
            return False
        if has_replaced_methods(layer):
            return False
    return True


def has_replaced_methods(layer: MemoryLayer) -> bool:
    """Whether this ``layer`` has methods that replace those of its class, which paths beside its
    ``forward`` may not call."""
    return any(callable(getattr(type(layer), name, None)) for name in vars(layer))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on ``device``; None if it is off, or there is none, as on the meta device."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def empty_inputs(transformer: MemoryStack, batch: int) -> Tensor:
    """``[0, B, D]`` in the dtype and on the device of the weights, which may be sharded."""
    weight = transformer.weight
    return torch.empty(0, batch, weight.shape[0], dtype=weight.dtype, device=weight.device)


def feed_forward_function(layer: MemoryLayer) -> Callable[[Tensor], Tensor]:
    """The feed-forward network of ``layer`` after its norm, in pre-norm, as a function of ``[·, B, D]``:
    of its modules, or of their weights where these are unmodified."""
    norm = as_function(layer.norm_ff)
    network = layer.feed_forward
    if not is_unmodified(network, FeedForward) or not is_unmodified(network.layer1, nn.Linear):
        return lambda x: network(norm(x))
    layer1 = as_function(network.layer1)
    layer2 = as_function(network.layer2)
    return lambda x: layer2(layer1(norm(x)).relu_())


def stacked(maps: Sequence[nn.Module]) -> list[Callable[[Tensor], Tensor]]:
    """``maps`` as functions of ``[·, in]``: as one, ``[·, out of all]``, if they are unmodified."""
    linear_maps = [module for module in maps if is_unmodified(module, nn.Linear)]
    if len(linear_maps) < len(maps):
        return [partial(linear, module) for module in maps]
    weights, biases = zip(*(folded(None, module) for module in linear_maps), strict=True)
    return [StackedMap(by_columns(torch.cat(weights)), torch.cat(biases))]
