"""What a layer keeps while a text is read token by token: its past inputs with their keys and values,
in buffers that are allocated once."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from memformers.attention import nearest_mask
from memformers.kernels.dispatch import relative_attention
from memformers.layers import MemoryLayer
from memformers.projection import Affine, fold, standardized

ALIGNED = 16
"""Rooms are multiples of so many columns: rows that begin at a cache line are read faster."""


class Stretch:
    """The columns of a layer's buffers that hold one stretch of its past, oldest first.

    New positions are written behind the last, the oldest are dropped by moving the beginning on; when
    the end of its room is reached, what is left moves to the front. There is room for an eighth more
    than ``capacity``, so that this copies eight positions for one that comes.
    """

    def __init__(self, low: int, capacity: int):
        self.low = self.start = self.end = low
        self.high = low + (ALIGNED * -(-(capacity + capacity // 8 + 1) // ALIGNED) if capacity else 0)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def columns(self) -> slice:
        """Where it is."""
        return slice(self.start, self.end)

    def drop(self, positions: int) -> None:
        """Forget the oldest ones."""
        self.start += positions


class LayerCache:
    """What one layer remembers: compressed slots, and then memory and running segment together.

    Both lie in the same buffers, so that a token attends to all with one product; the columns between
    and around them get no weight. Weights are those of the layer when this is made, with the scale and
    shift of a norm before attention in them (:func:`memformers.projection.fold`), and 1/√E in the queries'.

    With a ``span``, each position sees so many of the newest, its own among them, and not all.
    """

    def __init__(
        self, layer: MemoryLayer, batch: int, c_mem_len: int, recent_len: int, span: int | None = None
    ):
        self.span = span
        self.layer, self.attention = layer, layer.self_attn
        heads, norm = self.attention.heads, layer.norm_before_attention
        d_head = layer.d_model // heads
        self.scale = 1 / math.sqrt(d_head)
        maps = [fold(norm, m) for m in (self.attention.query, self.attention.key, self.attention.value)]
        (w_query, b_query), *_ = maps
        maps[0] = w_query * self.scale, b_query * self.scale
        self.projections = torch.cat([w for w, _ in maps]), torch.cat([b for _, b in maps])

        self.compressed = Stretch(0, c_mem_len)
        self.recent = Stretch(self.compressed.high, recent_len)
        room = self.recent.high
        self.inputs = w_query.new_zeros(batch, room, layer.d_model)
        self.key = w_query.new_zeros(batch, heads, room, d_head)
        # Transposed: so a sum over positions reads it the faster.
        self.value = w_query.new_zeros(batch, heads, d_head, room)
        self.position = w_query.new_empty(batch, heads, room)  # scores, −∞ where nothing is

        # By descending distance, K−1 … 0, so that a shorter past takes the end of it.
        terms = self.attention.distance_terms(c_mem_len + recent_len)
        self.r = terms["r"].flip(1).contiguous()  # [H, K, E]
        self.s = terms["s"].flip(1)[..., None] * self.scale if "s" in terms else None  # [H, K, 1]
        self.u, self.v = (terms[n][:, None] * self.scale if n in terms else None for n in ("u", "v"))

    def remember(self, inputs: Tensor, stretch: Stretch) -> None:
        """Append ``inputs [t, B, D]`` to memory or compressed memory, with their keys and values."""
        _, key, value = self.project(inputs)
        self.append(inputs, key, value, stretch)

    def project(self, x: Tensor) -> Tensor:
        """Queries over √E, keys and values of ``x [t, B, D]``: ``[3, B, H, t, E]``."""
        z = standardized(self.layer.norm_before_attention, x)
        projected = few_rows(self.projections, z)  # [t, B, 3 D]
        return rearrange(projected, "t b (three h e) -> three b h t e", three=3, h=self.attention.heads)

    def append(self, inputs: Tensor, key: Tensor, value: Tensor, stretch: Stretch) -> None:
        """Take in ``inputs [t, B, D]`` and their ``key`` and ``value [B, H, t, E]``."""
        if stretch.end + len(inputs) > stretch.high:
            self.move_to_front(stretch)
        new = slice(stretch.end, stretch.end + len(inputs))
        self.inputs[:, new] = inputs.transpose(0, 1)
        self.key[:, :, new] = key
        self.value[..., new] = value.mT
        stretch.end = new.stop

    def move_to_front(self, stretch: Stretch) -> None:
        """Make room behind a stretch."""
        old, new = stretch.columns, slice(stretch.low, stretch.low + len(stretch))
        for buffer in (self.inputs.mT, self.key.mT, self.value):  # positions last
            buffer[..., new] = buffer[..., old].clone()  # the old place and the new one overlap
        stretch.start, stretch.end = new.start, new.stop

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output ``[t, B, D]`` for the stream's next inputs ``x [t, B, D]``."""
        layer = self.layer
        query, key, value = self.project(x)
        self.append(x, key, value, self.recent)
        context = self.one(query) if len(x) == 1 else self.several(query)  # [B, H, t, E]
        x = x + few_rows(weights(self.attention.output), rearrange(context, "b h t e -> t b (h e)"))
        if layer.norm == "post":
            x = layer.norm_self_attn(x)
            return layer.norm_ff(x + self.feed_forward(x))
        return x + self.feed_forward(layer.norm_ff(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The layer's feed-forward network, ``[t, B, D]`` to the same."""
        network = self.layer.feed_forward
        return few_rows(weights(network.layer2), few_rows(weights(network.layer1), x).relu_())

    def one(self, query: Tensor) -> Tensor:
        """Attention of a single position, ``query [B, H, 1, E]``, which sees all that there is."""
        by_head = query if self.v is None else query + self.v
        position = torch.bmm(self.r, by_head.squeeze(2).permute(1, 2, 0))  # [H, K and more, B]
        position = (position if self.s is None else position + self.s).permute(2, 0, 1)
        recent = len(self.recent) if self.span is None else min(len(self.recent), self.span)
        seen = recent + len(self.compressed)
        self.position.fill_(-math.inf)
        self.position[..., self.recent.end - recent : self.recent.end] = position[..., -recent:]
        if seen > recent:
            self.position[..., self.compressed.columns] = position[..., -seen:-recent]
        content = query if self.u is None else query + self.u
        scores = torch.baddbmm(
            self.position.flatten(0, 1)[..., None], self.key.flatten(0, 1), content.flatten(0, 1).mT
        )  # [B·H, room, 1]
        probabilities = scores.mT.softmax(-1)  # [B·H, 1, room]
        context = torch.bmm(self.value.flatten(0, 1), probabilities.mT)  # [B·H, E, 1]
        return context.view_as(query)

    def several(self, query: Tensor) -> Tensor:
        """Causal attention of several positions, ``query [B, H, t, E]``."""
        stretches = [s.columns for s in (self.compressed, self.recent) if len(s)]
        key = torch.cat([self.key[:, :, columns] for columns in stretches], dim=2)
        value = torch.cat([self.value[..., columns].mT for columns in stretches], dim=2)
        S, K = query.shape[2], key.shape[2]
        mask = None if self.span is None else nearest_mask(S, K, self.span, query.device)
        return relative_attention(
            query / self.scale,
            key,
            value,
            **self.attention.distance_terms(K),
            mask=mask,
            dropout_prob=0.0,
            kernel="auto",
        )


def weights(linear: torch.nn.Linear) -> Affine:
    """Weight and bias of ``linear``."""
    return linear.weight, linear.bias


def few_rows(affine: Affine, x: Tensor) -> Tensor:
    """The affine map of ``x [t, B, in]``, at the speed of memory where there are one or two rows.

    PyTorch gives a matrix of one row to one core; as a batch of matrices, the weight is read by all.
    """
    weight, bias = affine
    rows, features = x.shape[:-1].numel(), len(weight)
    parts = math.gcd(features, 4)
    if rows > 2 or parts == 1 or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    columns = x.reshape(rows, -1).t().expand(parts, -1, -1)  # [parts, in, rows]
    out = torch.bmm(weight.view(parts, features // parts, -1), columns)
    return out.view(features, rows).t().reshape(*x.shape[:-1], features) + bias
