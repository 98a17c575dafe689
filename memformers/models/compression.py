"""Compression functions f_c (Rae et al. 2020, arXiv 1911.05507, section 3.2): each is a module that makes
slots of past positions, ``[n·c, B, D]`` to ``[n, B, D]``, and has a ``compression_rate``, c. One with
``needs_attention = True`` is also given how much attention each of them received, ``[n·c, B]``."""

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from memformers.common.errors import UserError

CompressionName = Literal["conv", "dilated", "mean", "max", "most-used"]
CompressionStart = Literal["random", "mean"]
CompressionLossName = Literal["attention", "auto-encoding", "none"]
WITHOUT_PARAMETERS: tuple[CompressionName, ...] = ("mean", "max", "most-used")
"""Compressions in which there is nothing to learn."""


class Conv1dCompression(nn.Module):
    """f_c as a 1D convolution whose kernel and stride are the compression rate (section 3.2): every
    ``compression_rate`` positions become one slot, ``[n·c, B, D]`` to ``[n, B, D]``.

    It starts as PyTorch draws a convolution, or with ``start="mean"`` as the mean of a slot's positions, from
    which it learns on. Raises ValueError for a rate below 1, or a length that is no multiple of it.
    """

    def __init__(self, compression_rate: int, d_model: int, start: CompressionStart = "random"):
        super().__init__()
        check_rate(compression_rate)
        self.compression_rate = compression_rate
        convolution = AveragingConv1d if start == "mean" else nn.Conv1d
        self.conv = convolution(d_model, d_model, kernel_size=compression_rate, stride=compression_rate)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        check_whole_slots(mem, self.compression_rate)
        # Kernels that don't overlap make the convolution one matrix product.
        slots = rearrange(mem, "(n c) b d -> n b (d c)", c=self.compression_rate)
        return F.linear(slots, self.conv.weight.flatten(1), self.conv.bias)  # [n, B, D]


class AveragingConv1d(nn.Conv1d):
    """A convolution that starts as the mean of what its kernel covers: I / c at each of c taps, no bias."""

    def reset_parameters(self) -> None:
        """Make the weight ``[D, D, c]`` and the bias ``[D]`` those of the mean."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.weight.diagonal(dim1=0, dim2=1).fill_(1 / self.kernel_size[0])
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DilatedConvCompression(nn.Module):
    """f_c as dilated convolutions (section 3.2), then a convolution whose kernel and stride are the
    compression rate, ``[n·c, B, D]`` to ``[n, B, D]``. The paper leaves layers and edges open; here:

    - For each of ``dilations``, position t becomes x_t + W₀·gelu(x_t) + W₁·gelu(x_{t + dilation}) + b.
    - A slot so depends on its own c positions and on the next ``sum(dilations)`` after them, never on an
      earlier one: nothing of a document comes into the slots of the next.
    - After the newest of the n·c positions there are zeros, before each of the dilated convolutions.

    It starts as PyTorch draws convolutions, or with ``start="mean"`` as the mean of a slot's own positions,
    from which it learns on. Raises ValueError for a rate or dilation below 1, or a length that is no multiple
    of the rate.
    """

    def __init__(
        self,
        compression_rate: int,
        d_model: int,
        start: CompressionStart = "random",
        dilations: Sequence[int] = (1, 2, 4),
    ):
        super().__init__()
        if any(dilation < 1 for dilation in dilations):
            raise UserError(
                f"dilations={tuple(dilations)} must be distances in positions; use at least 1 for each."
            )
        convolution = ZeroConv1d if start == "mean" else nn.Conv1d
        self.compression_rate = compression_rate
        self.dilations = tuple(dilations)
        self.dilated = nn.ModuleList(
            convolution(d_model, d_model, kernel_size=2, dilation=dilation) for dilation in dilations
        )
        self.slots = Conv1dCompression(compression_rate, d_model, start)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        x, convolutions = mem, cast(list[nn.Conv1d], list(self.dilated))
        for convolution, dilation in zip(convolutions, self.dilations, strict=True):
            here = F.gelu(x)  # [n·c, B, D]
            later = F.pad(here, (0, 0, 0, 0, 0, dilation))[dilation:]  # [n·c, B, D]
            # As one matrix product, which is faster than PyTorch's convolution.
            taps = torch.stack((here, later), dim=-1).flatten(2)  # [n·c, B, D·2]
            x = x + F.linear(taps, convolution.weight.flatten(1), convolution.bias)
        slots: Tensor = self.slots(x)
        return slots


class ZeroConv1d(nn.Conv1d):
    """A convolution that starts as 0."""

    def reset_parameters(self) -> None:
        """Make weight and bias 0."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class MeanCompression(nn.Module):
    """f_c as mean pooling (section 3.2): the mean of every ``compression_rate`` positions becomes one slot,
    ``[n·c, B, D]`` to ``[n, B, D]``. There is nothing in it to learn.

    Raises ValueError for a rate below 1, or a length that is no multiple of it.
    """

    def __init__(self, compression_rate: int):
        super().__init__()
        check_rate(compression_rate)
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        check_whole_slots(mem, self.compression_rate)
        return reduce(mem, "(n c) b d -> n b d", "mean", c=self.compression_rate)


class MaxCompression(nn.Module):
    """f_c as max pooling (section 3.2): of every ``compression_rate`` positions, each feature's largest value
    goes into one slot, ``[n·c, B, D]`` to ``[n, B, D]``. There is nothing in it to learn.

    Raises ValueError for a rate below 1, or a length that is no multiple of it.
    """

    def __init__(self, compression_rate: int):
        super().__init__()
        check_rate(compression_rate)
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        check_whole_slots(mem, self.compression_rate)
        return reduce(mem, "(n c) b d -> n b d", "max", c=self.compression_rate)


def slots_of(compress: Callable[..., Tensor], mem: Tensor, n: int, received: Tensor | None = None) -> Tensor:
    """The ``n`` slots ``[n, B, D]`` that f_c makes of ``mem [n·c, B, D]``, and of the attention
    ``received [n·c, B]`` where it needs that, in the dtype of ``mem``, whatever autocast made of it. Raises
    ValueError where they are of another number or width."""
    slots = compress(mem) if received is None else compress(mem, received)
    expected = (n, *mem.shape[1:])
    if slots.shape != expected:
        raise UserError(
            f"{type(compress).__name__} made {list(slots.shape)} of memories {list(mem.shape)}; "
            f"{list(expected)} was expected, one slot for every compression_rate={len(mem) // n} memories, "
            f"of the same width. Return that shape from its forward method."
        )
    return slots.to(mem.dtype)


def rate_of(compress: nn.Module) -> int:
    """How many positions f_c makes one slot of. Raises ValueError for a module that doesn't say so."""
    rate = getattr(compress, "compression_rate", None)
    if rate is None:
        raise UserError(
            f"{type(compress).__name__} has no compression_rate, the number of positions that a slot "
            f"represents. Boundaries of documents and decoders need it; give the module this attribute."
        )
    return int(rate)


def needs_attention(compress: object) -> bool:
    """Whether f_c is to be given how much attention each position received."""
    return bool(getattr(compress, "needs_attention", False))


def check_rate(compression_rate: int) -> None:
    """Raise ValueError for a rate that makes no slots."""
    if compression_rate < 1:
        raise UserError(
            f"compression_rate={compression_rate} is the number of positions in a slot; use at least 1."
        )


def check_whole_slots(mem: Tensor, compression_rate: int) -> None:
    """Raise ValueError unless the positions of ``mem [·, B, D]`` fill whole slots."""
    if len(mem) % compression_rate:
        raise UserError(
            f"{len(mem)} memories don't fill whole slots of compression_rate={compression_rate}; compress a "
            f"multiple of it and keep the rest."
        )
