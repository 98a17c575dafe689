"""Compression functions f_c, ``[n·c, B, D]`` to ``[n, B, D]`` with a ``compression_rate``, c (Rae et al.
2020, section 3.2). With ``needs_attention = True``, also given what attention each received, ``[n·c, B]``."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments, check_value
from memformers.kernels.naive import attention_probabilities, causal_mask, from_key_start
from memformers.models.attention import Heads
from memformers.models.config import CompressionStart
from memformers.models.layers import MemoryLayer
from memformers.models.linear import is_plain
from memformers.models.parts import check_returned

QUERIES = 64
"""How many queries are looked at together, so that a long segment never has S x K probabilities at once."""


class Conv1dCompression(nn.Module):
    """f_c as a convolution whose kernel and stride are ``compression_rate``, first drawn as PyTorch draws
    one, or with ``start="mean"`` the mean (Rae et al. 2020, arXiv 1911.05507, section 3.2). Raises ValueError
    for a rate below 1, or a length that is no multiple of it.

    Examples:
        >>> import torch
        >>> from memformers import Conv1dCompression
        >>> Conv1dCompression(4, d_model=64)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    @check_arguments
    def __init__(self, compression_rate: Count, d_model: Count, start: CompressionStart = "random"):
        super().__init__()
        self.compression_rate = compression_rate
        convolution = MeanConv1d if start == "mean" else nn.Conv1d
        self.conv = convolution(d_model, d_model, kernel_size=compression_rate, stride=compression_rate)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        # Kernels that don't overlap make the convolution one matrix product.
        slots = rearrange(by_slot(mem, self.compression_rate), "n c b d -> n b (d c)")
        return convolved(self.conv, mem, slots)


def convolved(convolution: nn.Module, x: Tensor, kernels: Tensor) -> Tensor:
    """``convolution(x)`` for ``x [t, B, D]``, sequence first, ``[n, B, ·]``: one matrix product with what its
    ``kernels`` cover, ``[n, B, D·taps]``, which is faster, unless its weights may not be read."""
    if isinstance(convolution, nn.Conv1d) and is_plain(convolution, nn.Conv1d, MeanConv1d):
        return F.linear(kernels, convolution.weight.flatten(1), convolution.bias)
    return convolution(x.permute(1, 2, 0)).permute(2, 0, 1)


class MeanConv1d(nn.Conv1d):
    """A convolution that starts as the mean of what its kernel covers where that doesn't overlap, I / c at
    each of c taps; and as 0 where it does, since [`DilatedConvCompression`][] adds its output."""

    def reset_parameters(self) -> None:
        """Make the weight ``[D, D, c]`` and the bias ``[D]`` those of the mean, or 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.stride == self.kernel_size:
            nn.init.constant_(self.weight.detach().diagonal(dim1=0, dim2=1), 1 / self.kernel_size[0])


class DilatedConvCompression(nn.Module):
    """f_c as dilated convolutions, then a [`Conv1dCompression`][], whose ``compression_rate``, ``d_model``,
    ``start`` and errors it has (Rae et al. 2020, section 3.2, which leaves layers and edges open). For each
    of ``dilations``, position t becomes x_t + W₀·gelu(x_t) + W₁·gelu(x_{t + dilation}) + b, with zeros after
    the newest: a slot depends on its own positions and the next ``sum(dilations)``, so nothing of a document
    comes into the slots of the next.

    Examples:
        >>> import torch
        >>> from memformers import DilatedConvCompression
        >>> DilatedConvCompression(4, d_model=64)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        compression_rate: Count,
        d_model: Count,
        start: CompressionStart = "random",
        dilations: Sequence[int] = (1, 2, 4),
    ):
        super().__init__()
        check_value("dilations", tuple(dilations), tuple[Count, ...])
        convolution = MeanConv1d if start == "mean" else nn.Conv1d
        self.compression_rate, self.dilations = compression_rate, tuple(dilations)
        self.dilated = nn.ModuleList(convolution(d_model, d_model, 2, dilation=step) for step in dilations)
        self.slots = Conv1dCompression(compression_rate, d_model, start)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        for convolution, dilation in zip(self.dilated, self.dilations, strict=True):
            padded = F.pad(F.gelu(mem), (0, 0, 0, 0, 0, dilation))  # [n·c + dilation, B, D]
            taps = torch.stack((padded[: len(mem)], padded[dilation:]), dim=-1).flatten(2)  # [n·c, B, D·2]
            mem = mem + convolved(convolution, padded, taps)
        return self.slots(mem)


class WeightedCompression(nn.Module):
    """f_c as a mean with learned weights: feature d of a slot is Σᵢ pᵢ xᵢ over its ``compression_rate``
    positions i, where p is the softmax over i of (W xᵢ + bᵢ) at d. With ``start="mean"`` W is 0 at first, and
    p = 1/c. So DeepSeek-V4 (2026) pools keys and values. Raises ValueError as [`Conv1dCompression`][].

    Examples:
        >>> import torch
        >>> from memformers import WeightedCompression
        >>> WeightedCompression(4, d_model=64)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    @check_arguments
    def __init__(self, compression_rate: Count, d_model: Count, start: CompressionStart = "random"):
        super().__init__()
        self.compression_rate, self.start = compression_rate, start
        self.score = nn.Linear(d_model, d_model, bias=False)  # W
        self.place = nn.Parameter(torch.empty(compression_rate, d_model))  # b
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Prefer no place; ``score`` draws its weight itself, if it isn't to be 0."""
        nn.init.zeros_(self.place)
        if self.start == "mean":
            nn.init.zeros_(self.score.weight)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        positions = by_slot(mem, self.compression_rate)  # [n, c, B, D]
        shares = (self.score(positions) + self.place[:, None]).softmax(dim=1)
        return (shares * positions).sum(1)


class PoolingCompression(nn.Module):
    """f_c that makes one slot of every ``compression_rate`` positions, c, with nothing to learn (Rae et al.
    2020, section 3.2). Raises ValueError for a rate below 1, or a length that is no multiple of it."""

    how: Literal["mean", "max"] = "mean"

    @check_arguments
    def __init__(self, compression_rate: Count):
        super().__init__()
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        return reduce(by_slot(mem, self.compression_rate), "n c b d -> n b d", self.how)


class MeanCompression(PoolingCompression):
    """A [`PoolingCompression`][] by the mean.

    Examples:
        >>> import torch
        >>> from memformers import MeanCompression
        >>> MeanCompression(4)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """


class MaxCompression(PoolingCompression):
    """A [`PoolingCompression`][] by each feature's largest value.

    Examples:
        >>> import torch
        >>> from memformers import MaxCompression
        >>> MaxCompression(4)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    how = "max"


class StridedCompression(PoolingCompression):
    """A [`PoolingCompression`][] that keeps the newest of every c positions and forgets the others.

    Examples:
        >>> import torch
        >>> from memformers import StridedCompression
        >>> StridedCompression(4)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        return by_slot(mem, self.compression_rate)[:, -1].clone()  # a view would keep all


class MostUsedCompression(PoolingCompression):
    """A [`PoolingCompression`][] that keeps of every c positions the one that received the most attention
    from the newest segment, the oldest of equals, so no slot mixes documents; the paper keeps the most-used
    of all, and leaves the queries open. Raises ValueError also for attention of another shape.

    Examples:
        >>> import torch
        >>> from memformers import MostUsedCompression
        >>> MostUsedCompression(4)(torch.randn(32, 2, 64), torch.rand(32, 2)).shape  # and received, [n·c, B]
        torch.Size([8, 2, 64])
    """

    needs_attention = True

    def forward(self, mem: Tensor, received: Tensor | None = None) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, which ``received [n·c, B]`` attention, to ``[n, B, D]``."""
        positions = by_slot(mem, self.compression_rate)  # [n, c, B, D]
        if received is None or received.shape != mem.shape[:2]:
            wanted, came = [*mem.shape[:2]], "none" if received is None else [*received.shape]
            raise UserError(f"expected received {wanted}, got {came}; compute it with attention_received.")
        most_used = rearrange(received, "(n c) b -> n c b", c=self.compression_rate).argmax(1)  # [n, B]
        return positions.gather(1, most_used[:, None, :, None].expand(-1, 1, -1, mem.shape[-1])).squeeze(1)


class CompressionAutoEncoder(nn.Module):
    """f_c, ``encode``, which makes the slots, and a linear decoder, for [`AutoEncodingLoss`][] (Rae et al.
    2020, section 3.2.1). Raises ValueError for an f_c without ``compression_rate``, or that needs attention.

    Examples:
        >>> import torch
        >>> from memformers import CompressionAutoEncoder, Conv1dCompression
        >>> f_c = CompressionAutoEncoder(Conv1dCompression(4, d_model=64), d_model=64)
        >>> f_c.decode(f_c(torch.randn(32, 2, 64))).shape  # [n·c, B, D] to [n, B, D] and back
        torch.Size([32, 2, 64])
    """

    def __init__(self, encode: nn.Module, d_model: int):
        super().__init__()
        if needs_attention(encode):
            name = type(encode).__name__
            raise UserError(f"{name} needs attention, which a decoder can't restore; leave the decoder out.")
        self.encode, self.compression_rate = encode, rate_of(encode)
        # A transposed convolution with kernel and stride c: one slot at a time becomes its c positions.
        self.decoder = nn.Conv1d(d_model, self.compression_rate * d_model, kernel_size=1)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to the slots ``[n, B, D]``."""
        return slots_of(self.encode, mem, len(mem) // self.compression_rate)

    def decode(self, c_mem: Tensor) -> Tensor:
        """Slots ``c_mem [n, B, D]`` to what they may have been, ``[n·c, B, D]``."""
        positions = convolved(self.decoder, c_mem, c_mem)  # [n, B, c·D]
        return rearrange(positions, "n b (c d) -> (n c) b d", c=self.compression_rate)


@torch.no_grad()
def attention_received(
    layer: MemoryLayer, context: Tensor, S: int, key_start: Tensor | None = None, heads: Heads = slice(None)
) -> Tensor:
    """How much attention each key of ``context [K, B, D]``, a ``layer``'s inputs, receives from the ``S``
    last: the mean over ``heads`` and the queries that may see it, from ``key_start [B, S]`` on or all,
    ``[K, B]``; 0 where none may. No kernel tells its probabilities: scores are computed once more."""
    attention, K = layer.self_attn, len(context)
    z = layer.attention_input(context)
    key, query = (attention.by_head(x)[:, heads] for x in (attention.key(z), attention.query(z[K - S :])))
    terms = {name: term[heads] for name, term in attention.distance_terms(K).items()}
    total = seen = query.new_zeros((), dtype=torch.promote_types(context.dtype, torch.float32))
    for begin in range(0, S, QUERIES):
        end = min(begin + QUERIES, S)
        k = K - S + end  # the last of these queries sees no later key
        nearer = {name: term[:, :k] if name in ("r", "s") else term for name, term in terms.items()}
        visible = causal_mask(end - begin, k, context.device)
        if key_start is not None:
            visible = visible & from_key_start(key_start[:, begin:end], k)  # [B, 1, s, k]
        looks = attention_probabilities(query[:, :, begin:end], key[:, :, :k], **nearer, mask=visible)
        total = total + F.pad(looks.to(total.dtype).mean(1).sum(-2), (0, K - k))  # [B, K]
        seen = seen + F.pad(visible.sum(-2).to(total.dtype), (0, K - k)).view(-1, K)  # [B, K] or [1, K]
    return (total / seen.clamp(min=1)).T


def slots_of(compress: Callable[..., Tensor], mem: Tensor, n: int, received: Tensor | None = None) -> Tensor:
    """The ``n`` slots ``[n, B, D]`` that f_c makes of ``mem [n·c, B, D]``, with ``received [n·c, B]`` if
    given, in the dtype of ``mem`` under autocast too. Raises ValueError for slots of another shape."""
    slots = compress(mem) if received is None else compress(mem, received)
    check_returned(type(compress), "forward", slots, (n, *mem.shape[1:]))
    return slots.to(mem.dtype)


def rate_of(compress: nn.Module) -> int:
    """How many positions f_c makes one slot of. Raises ValueError for a module that doesn't say so."""
    if (rate := getattr(compress, "compression_rate", None)) is None:
        raise UserError(f"{type(compress).__name__} has no compression_rate, positions per slot; add it.")
    return int(rate)


def needs_attention(compress: object) -> bool:
    """Whether f_c is to be given how much attention each position received."""
    return bool(getattr(compress, "needs_attention", False))


def by_slot(mem: Tensor, c: int) -> Tensor:
    """``mem [n·c, B, D]`` by slot, ``[n, c, B, D]``. Raises ValueError unless it fills whole slots."""
    if len(mem) % c:
        raise UserError(f"{len(mem)} memories don't fill slots of compression_rate={c}; take a multiple.")
    return rearrange(mem, "(n c) b d -> n c b d", c=c)
