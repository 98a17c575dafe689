"""What a layer keeps while a text is read token by token: its past inputs with their keys and values,
in buffers that are allocated once."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.kernels.dispatch import relative_attention
from memformers.layers import PreNormLayer


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
