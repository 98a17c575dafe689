"""One token at a time through layers of the usual kind, in place of their modules: 16 operations for a layer
instead of 24, in buffers of which each view is made once. In a model with D = 128, what lies between two
products takes longer than the products."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.fast_linear import StackedMap, as_function, map_of_rows, takes_vector
from memformers.models.hooks import is_unmodified
from memformers.models.layers import FeedForward, MemoryLayer, TokenShift

if TYPE_CHECKING:
    from memformers.generation.cache import LayerCache

MAX_VIEWS = 512
"""The most tokens of which a layer keeps its views, 4 KiB each."""


def is_usual(layer: MemoryLayer) -> bool:
    """Whether ``layer`` computes what its weights say, in pre-norm without gates."""
    attention = layer.self_attn
    network = layer.feed_forward
    if type(layer) is not MemoryLayer or layer.norm != "pre" or layer.gate_self_attn is not None:
        return False
    if layer.shift is not None and not is_unmodified(layer.shift, TokenShift):
        return False
    if not is_unmodified(attention, RelativeMultiHeadAttention) or not is_unmodified(network, FeedForward):
        return False
    maps = (attention.query, attention.key, attention.value, attention.output, network.layer1, network.layer2)
    norms = (layer.norm_self_attn, layer.norm_ff)
    return all(is_unmodified(linear, nn.Linear) for linear in maps) and all(
        is_unmodified(norm, nn.LayerNorm) for norm in norms
    )


class TokenPath:
    """The layers of a cache, all of which are [usual][memformers.generation.one_token.is_usual], for one
    token of each of its streams."""

    def __init__(self, caches: Sequence["LayerCache"]):
        self.layers = [TokenLayer(cache) for cache in caches]

    def read(
        self,
        x: Tensor,
        inputs: Tensor,
        previous: Tensor | None,
        key_starts: Sequence[Tensor | None],
    ) -> Tensor:
        """The output ``[1, B, D]`` of the last layer for the next token ``x [1, B, D]``, which sees the keys
        from each layer's ``key_starts [B, 1]`` on, None for all. Writes each layer's input to ``inputs
        [n_layers, B, D]``; those of the last token are ``previous``, which only a token shift needs."""
        # Layers write their outputs where the next one's inputs are kept.
        rows = [*self.rows(inputs), self.rows(torch.empty_like(x))[0]]
        rows[0].copy_(x.view_as(rows[0]))
        previous_rows: Sequence[Tensor | None] = [None] * len(self.layers)
        if previous is not None:
            previous_rows = self.rows(previous)
        for i, layer in enumerate(self.layers):
            layer.read(rows[i], rows[i + 1], previous_rows[i], key_starts[i])
        return rows[-1].view_as(x)

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """``x [n, B, D]`` as layers take it: n matrices ``[B, D]`` or vectors ``[D]``."""
        return x.squeeze(1).unbind() if self.layers[0].takes_vector else x.unbind()


class Views(NamedTuple):
    """Parts of a layer's buffers for its next token, which sees K keys, its own included."""

    new_key: Tensor
    """``[B, H, E]``: where the token's key is written."""
    new_value: Tensor
    """``[B, H, E]``."""
    keys: Tensor
    """``[B·H, E, K]``."""
    values: Tensor
    """``[B·H, K, E]``."""
    r: Tensor
    """``[H, E, K]``, by descending distance."""
    bias: Tensor
    """``[H, 1, K]``: what scores depend on besides the query, by descending distance."""
    first: int
    """The index of the first key, 0 without a window."""


class TokenLayer:
    """A layer that [is usual][memformers.generation.one_token.is_usual], with its ``cache``, for one token of
    each stream."""

    def __init__(self, cache: "LayerCache"):
        layer = cache.layer
        network = layer.feed_forward
        assert isinstance(network, FeedForward)
        self.cache = cache
        B, H, _, E = cache.value.shape
        self.batch = B

        # Scores (q + u)·k + (q + v)·r + s are q'·k + q'·r + (v − u)·r + s for q' = q + u, of which u is a
        # bias: what does not depend on the query is known for each distance.
        u = cache.terms["u"]
        v = cache.terms.get("v", torch.zeros_like(u))
        self.distance_bias = torch.bmm((v - u)[:, None], cache.r_descending)  # [H, 1, K]
        if "s" in cache.terms:
            self.distance_bias = self.distance_bias + cache.terms["s"].flip(1)[:, None]
        self.scale = 1 / math.sqrt(E)

        # Query, key and value are written to one buffer, by one map or, with a token shift, by two.
        qkv_map = cache.maps[0]
        assert isinstance(qkv_map, StackedMap)
        query_bias = qkv_map.bias[: H * E] + u.flatten()
        self.takes_vector = takes_vector(qkv_map.weight, B)
        rows = () if self.takes_vector else (B,)
        self.projected = qkv_map.weight.new_empty(*rows, 3 * H * E)
        self.query, self.key, self.value = self.projected.view(B, 3, H, E).unbind(1)  # [B, H, E]
        self.query_by_head = self.query.transpose(0, 1)  # [H, B, E]
        self.shift = layer.shift
        if layer.shift is None:
            bias = torch.cat((query_bias, qkv_map.bias[H * E :]))  # [3D]
            self.project = map_of_rows(qkv_map.weight, bias, B)
        else:
            kv_map = cache.maps[1]
            assert isinstance(kv_map, StackedMap)
            self.project = map_of_rows(qkv_map.weight, query_bias, B)
            self.project_shifted = map_of_rows(kv_map.weight, kv_map.bias, B)
            self.projected, self.projected_shifted = self.projected.split((H * E, 2 * H * E), dim=-1)

        # The other functions of the layer.
        self.normalize = as_function(layer.norm_self_attn)
        self.output = map_of_rows(layer.self_attn.output.weight, layer.self_attn.output.bias, B)
        self.normalize_again = as_function(layer.norm_ff)
        self.layer1 = map_of_rows(network.layer1.weight, network.layer1.bias, B)
        self.layer2 = map_of_rows(network.layer2.weight, network.layer2.bias, B)
        self.attended = qkv_map.weight.new_empty(B * H, 1, E)
        self.attended_rows = self.attended.view(*rows, H * E)
        self.views: dict[int, Views] = {}
        self.viewed = cache.key
        """The buffer that ``views`` are of."""

    def read(self, x: Tensor, output: Tensor, previous: Tensor | None, key_start: Tensor | None) -> None:
        """Write the layer's output for ``x`` to ``output``, both ``[B, D]``, or ``[D]`` if it takes vectors,
        like its input for the ``previous`` token; the token sees keys from ``key_start [B, 1]`` on, None for
        all."""
        views = self.next_views()
        # Query, key and value; key and value are appended to the others.
        self.project(self.normalize(x), out=self.projected)
        if self.shift is not None:
            kv_input = x if previous is None else torch.addcmul(x, self.shift.w, previous)
            self.project_shifted(self.normalize(kv_input), out=self.projected_shifted)
        views.new_key.copy_(self.key)
        views.new_value.copy_(self.value)
        self.cache.n_keys += 1

        # Attention. With several streams, query and scores are copied from the order of heads and streams.
        scores = torch.baddbmm(views.bias, self.query_by_head, views.r)  # [H, B, K]
        query = self.query_by_head
        if self.batch > 1:
            query = self.query.reshape(len(self.attended), 1, -1)  # [B·H, 1, E]
            scores = scores.transpose(0, 1).reshape(len(self.attended), 1, -1)  # [B·H, 1, K]
        scores.baddbmm_(query, views.keys, beta=self.scale, alpha=self.scale)
        if key_start is not None:  # [B, 1]
            is_hidden = torch.arange(views.first, self.cache.n_keys, device=x.device) < key_start  # [B, K]
            scores.view(self.batch, -1, is_hidden.shape[1]).masked_fill_(is_hidden[:, None], -math.inf)
        torch.bmm(scores.softmax(-1), views.values, out=self.attended)
        x = x + self.output(self.attended_rows)

        # Feed-forward network.
        hidden = self.layer1(self.normalize_again(x)).relu_()
        torch.add(x, self.layer2(hidden), out=output)

    def next_views(self) -> Views:
        """The parts of the buffers for the next token."""
        cache = self.cache
        # A new segment has the same buffers, unless it needs longer ones.
        if self.viewed is not cache.key or len(self.views) >= MAX_VIEWS:
            self.views.clear()
            self.viewed = cache.key
        n_keys = cache.n_keys
        if n_keys not in self.views:
            end = n_keys + 1
            window = cache.layer.window
            first = 0 if window is None else max(end - window, 0)
            self.views[n_keys] = Views(
                new_key=cache.key[..., n_keys],
                new_value=cache.value[:, :, n_keys],
                keys=cache.key[..., first:end].flatten(0, 1),
                values=cache.value[:, :, first:end].flatten(0, 1),
                r=cache.r_descending[..., first - end :],
                bias=self.distance_bias[..., first - end :],
                first=first,
            )
        return self.views[n_keys]
