"""Compression functions f_c, and the loss that they learn from (Rae et al. 2020, arXiv 1911.05507)."""

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.func import functional_call

from memformers.common.errors import UserError
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.layers import CompressiveTransformerLayer

CompressionName = Literal["conv", "mean"]
CompressionStart = Literal["random", "mean"]


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


def check_rate(compression_rate: int) -> None:
    """Raise ValueError for a rate that makes no slots."""
    if compression_rate < 1:
        raise UserError(
            f"compression_rate={compression_rate}: each slot stands for so many positions; use at least 1."
        )


def check_whole_slots(mem: Tensor, compression_rate: int) -> None:
    """Raise ValueError unless the positions of ``mem [·, B, D]`` fill whole slots."""
    if len(mem) % compression_rate:
        raise UserError(
            f"{len(mem)} memories don't fill whole slots of compression_rate={compression_rate}; compress a "
            f"multiple of it and keep the rest."
        )


class AttentionReconstructionLoss:
    """How much attention changes when memories give way to their compressions (section 3.2.1,
    algorithm 2), summed over ``layers``; its gradient reaches each layer's f_c and nothing else.

    For each layer, mean squared error between two content attentions (no positions) of the segment:
    over the memories being compressed, and over their compressions.
    """

    def __init__(self, layers: Sequence[CompressiveTransformerLayer] | nn.ModuleList):
        self.layers = cast(list[CompressiveTransformerLayer], list(layers))

    def __call__(
        self,
        h: Sequence[Tensor],
        mem: Sequence[Tensor],
        c_mem: Sequence[Tensor] | None = None,
        left_out: Tensor | None = None,
    ) -> Tensor:
        """``h [S, B, D]``, the inputs of each layer; ``mem [n·c, B, D]``, what each compresses;
        ``c_mem [n, B, D]``, f_c of those where it is already at hand. ``left_out [B]`` says how many of the
        oldest slots, with their positions, don't count in each stream; a stream without any that counts
        is left out of the mean, which is 0 without streams. Returns a scalar.

        Raises ValueError unless there is one tensor a layer.
        """
        if not len(self.layers) == len(h) == len(mem):
            raise UserError(
                f"one h and one mem for each of {len(self.layers)} layers were expected; "
                f"{len(h)} and {len(mem)} came."
            )
        if c_mem is None:
            c_mem = [layer.compress(old.detach()) for layer, old in zip(self.layers, mem, strict=True)]
        losses = [layer_loss(*one, left_out) for one in zip(self.layers, h, mem, c_mem, strict=True)]
        return torch.stack(losses).sum()


def layer_loss(
    layer: CompressiveTransformerLayer,
    h: Tensor,
    mem: Tensor,
    c_mem: Tensor,
    left_out: Tensor | None = None,
) -> Tensor:
    """One layer's term: ‖attention(h, mem) − attention(h, c_mem)‖², averaged over all elements, a scalar;
    of ``h [S, B, D]``, ``mem [n·c, B, D]`` and ``c_mem [n, B, D]``, without the ``left_out [B]`` oldest slots
    and their positions."""
    norm, attention = frozen(layer.norm_before_attention or nn.Identity()), layer.self_attn
    query = project(attention, attention.query, norm(h.detach()))  # [B, H, S, E]
    if left_out is None:
        whole = content_attention(attention, query, norm(mem.detach()))  # [B, H, S, E]
        compressed = content_attention(attention, query, norm(c_mem))  # [B, H, S, E]
        return F.mse_loss(compressed, whole)
    counts = left_out < len(c_mem)  # [B]
    first = left_out * counts  # a softmax over nothing has no value
    whole = content_attention(attention, query, norm(mem.detach()), first * (len(mem) // len(c_mem)))
    compressed = content_attention(attention, query, norm(c_mem), first)
    errors = F.mse_loss(compressed, whole, reduction="none").where(counts[:, None, None, None], 0.0)
    return errors.sum() / (counts.sum() * errors[0].numel()).clamp(min=1)


def content_attention(
    attention: RelativeMultiHeadAttention, query: Tensor, context: Tensor, first: Tensor | None = None
) -> Tensor:
    """Softmax(q·k / √E) of ``query [B, H, S, E]`` over ``context [·, B, D]``, from ``first [B]`` on or all:
    ``[B, H, S, E]``, with no positions, not causal, no output projection and frozen weights."""
    key, value = (project(attention, linear, context) for linear in (attention.key, attention.value))
    visible = None
    if first is not None:
        visible = torch.arange(len(context), device=first.device) >= first[:, None, None, None]
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, visible)
    # In bfloat16, which autocast would choose, the backward pass takes several times as long on a CPU.
    query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(query, key, value, visible)


def project(attention: RelativeMultiHeadAttention, linear: nn.Linear, z: Tensor) -> Tensor:
    """``z [t, B, D]`` through one of the attention's maps, frozen, by heads: ``[B, H, t, E]``."""
    return rearrange(frozen(linear)(z), "t b (h e) -> b h t e", h=attention.heads)


def frozen(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module as a function, of the same shapes ``[…, D]``, whose weights take no gradient, though its
    input may."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda x: functional_call(module, weights, (x,))
