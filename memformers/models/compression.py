"""Compression functions f_c, ``[n·c, B, D]`` to ``[n, B, D]``, and the loss that trains them (Rae et al.
2020, arXiv 1911.05507, sections 3.2 and 3.2.1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.func import functional_call

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments, check_value
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import CompressionStart, NetworkConfig
from memformers.models.hooks import is_unmodified
from memformers.models.layers import MemoryLayer


class Conv1dCompression(nn.Module):
    """f_c as a convolution whose kernel size and stride are ``compression_rate``, initialized as PyTorch
    does, or with ``start="mean"`` as the mean (Rae et al. 2020, arXiv 1911.05507, section 3.2). Raises
    ValueError for a rate below 1, or a length that is no multiple of it.

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
    """``convolution(x)`` for ``x [t, B, D]``, sequence first, ``[n, B, ·]``. If the weights may be read, one
    matrix product with the inputs of its ``kernels``, ``[n, B, D·taps]``, computes it faster."""
    is_plain = is_unmodified(convolution, nn.Conv1d) or is_unmodified(convolution, MeanConv1d)
    if is_plain and isinstance(convolution, nn.Conv1d):
        return F.linear(kernels, convolution.weight.flatten(1), convolution.bias)
    return convolution(x.permute(1, 2, 0)).permute(2, 0, 1)


class MeanConv1d(nn.Conv1d):
    """A convolution that starts as a mean, with I / c at each of c taps, if its kernels don't overlap; and as
    0 if they do, since [`DilatedConvCompression`][] adds its output."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.stride == self.kernel_size:
            nn.init.constant_(self.weight.detach().diagonal(dim1=0, dim2=1), 1 / self.kernel_size[0])


class DilatedConvCompression(nn.Module):
    """f_c as dilated convolutions followed by a [`Conv1dCompression`][], with the same ``compression_rate``,
    ``d_model``, ``start`` and errors (Rae et al. 2020, section 3.2, which leaves layers and edges open). For
    each of ``dilations``, position t becomes x_t + W₀·gelu(x_t) + W₁·gelu(x_{t + dilation}) + b, with zeros
    after the newest: a slot depends on its own positions and the next ``sum(dilations)``, so nothing of a
    document comes into the slots of the next.

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
        self.compression_rate = compression_rate
        self.dilations = tuple(dilations)
        self.dilated = nn.ModuleList(convolution(d_model, d_model, 2, dilation=step) for step in dilations)
        self.slots = Conv1dCompression(compression_rate, d_model, start)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        # x_t + W₀·gelu(x_t) + W₁·gelu(x_{t + dilation}) + b: the two taps side by side, one matrix product.
        for convolution, dilation in zip(self.dilated, self.dilations, strict=True):
            padded = F.pad(F.gelu(mem), (0, 0, 0, 0, 0, dilation))  # [n·c + dilation, B, D]
            taps = torch.stack((padded[: len(mem)], padded[dilation:]), dim=-1).flatten(2)  # [n·c, B, D·2]
            mem = mem + convolved(convolution, padded, taps)
        return self.slots(mem)


class PoolingCompression(nn.Module):
    """f_c that pools every ``compression_rate`` positions into a slot, without parameters (Rae et al. 2020,
    section 3.2). Raises ValueError for a rate below 1, or a length that is no multiple of it."""

    reduction: Literal["mean", "max"]

    @check_arguments
    def __init__(self, compression_rate: Count):
        super().__init__()
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        return reduce(by_slot(mem, self.compression_rate), "n c b d -> n b d", self.reduction)


class MeanCompression(PoolingCompression):
    """A [`PoolingCompression`][] by the mean.

    Examples:
        >>> import torch
        >>> from memformers import MeanCompression
        >>> MeanCompression(4)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    reduction = "mean"


class MaxCompression(PoolingCompression):
    """A [`PoolingCompression`][] by each feature's largest value.

    Examples:
        >>> import torch
        >>> from memformers import MaxCompression
        >>> MaxCompression(4)(torch.randn(32, 2, 64)).shape  # [n·c, B, D] to [n, B, D]
        torch.Size([8, 2, 64])
    """

    reduction = "max"


def by_slot(mem: Tensor, c: int) -> Tensor:
    """``mem [n·c, B, D]`` by slot, ``[n, c, B, D]``. Raises ValueError unless it fills whole slots."""
    if len(mem) % c:
        raise UserError(f"{len(mem)} memories don't fill slots of compression_rate={c}; use a multiple.")
    return rearrange(mem, "(n c) b d -> n c b d", c=c)


def build_compression(config: NetworkConfig, rate: int) -> nn.Module:
    """The f_c of ``config`` for slots of ``rate`` positions."""
    if config.compression == "mean":
        return MeanCompression(rate)
    if config.compression == "max":
        return MaxCompression(rate)
    learned = {"conv": Conv1dCompression, "dilated": DilatedConvCompression}
    return learned[config.compression](rate, config.d_model, config.compression_start)


@dataclass(frozen=True)
class AttentionReconstructionLoss:
    """The mean squared error between the segment's content attention to the memories that are compressed and
    to their slots, summed over ``layers`` (Rae et al. 2020, section 3.2.1, algorithm 2). It trains only f_c.

    Examples:
        >>> import torch
        >>> from memformers import AttentionReconstructionLoss, MemoryLM, ModelConfig
        >>> stack = MemoryLM(ModelConfig(model="compressive", d_model=64, n_layers=2)).transformer
        >>> h = torch.randn(2, 16, 3, 64)  # two layers of [S, B, D]
        >>> mem = torch.randn(2, 32, 3, 64)  # and of [M, B, D]
        >>> c_mem = [rule.f_c(old) for rule, old in zip(stack.rules, mem)]  # [n, B, D]
        >>> AttentionReconstructionLoss(stack.layers)(list(h), list(mem), c_mem).shape
        torch.Size([])
    """

    layers: Sequence[nn.Module] | nn.ModuleList

    def __call__(
        self,
        h: Sequence[Tensor],
        mem: Sequence[Tensor],
        c_mem: Sequence[Tensor],
        n_masked: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The loss, a scalar, of each layer's inputs ``h [S, B, D]``, the memories that it compresses, ``mem
        [n·c, B, D]``, and ``c_mem [n, B, D]``, f_c of ``mem``. ``n_masked [B]``, or one per layer, is how
        many of the oldest slots don't count in each stream; the mean is over streams in which some do, and
        0 without any. Raises ValueError unless there is one tensor per layer."""
        n = len(self.layers)
        if not n == len(h) == len(mem) == len(c_mem):
            got = f"{len(h)}, {len(mem)} and {len(c_mem)}"
            raise UserError(f"expected an h, a mem and a c_mem for each of {n} layers, got {got}.")
        n_masked_by_layer = n_masked if isinstance(n_masked, Sequence) else [n_masked] * n
        losses = []
        by_layer = zip(self.layers, h, mem, c_mem, n_masked_by_layer, strict=True)
        for layer, x, old, new, masked in by_layer:
            if len(old):
                compute = cast(MemoryLayer, layer).compute
                losses.append(compute(reconstruction_loss, layer, x, old, new, masked))
        return torch.stack(losses).sum() if losses else mem[0].new_zeros(())


def reconstruction_loss(
    layer: MemoryLayer, h: Tensor, mem: Tensor, c_mem: Tensor, n_masked: Tensor | None
) -> Tensor:
    """One layer's term: ‖attention(h, mem) − attention(h, c_mem)‖², averaged over all elements, a scalar; of
    ``h [S, B, D]``, ``mem [n·c, B, D]``, ``c_mem [n, B, D]`` and ``n_masked [B]`` (algorithm 2)."""
    attention = layer.self_attn
    norm = nn.Identity() if layer.norm == "post" else layer.norm_self_attn
    # Weights are frozen (stop_gradient of algorithm 2): the gradient reaches only c_mem, and so f_c.
    query = attention.by_head(frozen(attention.query)(frozen(norm)(h.detach())))  # [B, H, S, E]
    if n_masked is None:
        wanted = content_attention(attention, query, frozen(norm)(mem.detach()))  # [B, H, S, E]
        compressed = content_attention(attention, query, frozen(norm)(c_mem))  # [B, H, S, E]
        return F.mse_loss(compressed, wanted)

    # Average over streams with slots of the current document, and over those slots.
    counts = n_masked < len(c_mem)  # [B]
    first_slot = n_masked * counts  # a softmax over no keys has no value
    c = len(mem) // len(c_mem)
    wanted = content_attention(attention, query, frozen(norm)(mem.detach()), first_slot * c)
    compressed = content_attention(attention, query, frozen(norm)(c_mem), first_slot)
    errors = F.mse_loss(compressed, wanted, reduction="none").sum((1, 2, 3))  # [B]
    return errors.where(counts, 0.0).sum() / (counts.sum() * wanted[0].numel()).clamp(min=1)


def content_attention(
    attention: RelativeMultiHeadAttention, query: Tensor, context: Tensor, first_key: Tensor | None = None
) -> Tensor:
    """Softmax(q·k / √E) of ``query [B, H, S, E]`` over ``context [·, B, D]``, from ``first_key [B]`` on or
    all: ``[B, H, S, E]``, without positions, not causal, no output projection and frozen weights."""
    # attn(h, m) = softmax(σ(h Q) (m K)ᵀ) m V of algorithm 2, without positions.
    key, value = (attention.by_head(frozen(m)(context)) for m in (attention.key, attention.value))
    visible = None
    if first_key is not None:
        visible = torch.arange(len(context), device=first_key.device) >= first_key[:, None, None, None]
    if query.device.type == "cpu":  # in bfloat16, which autocast would choose, a backward pass takes longer
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(query, key, value, visible)


def frozen(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module as a function of ``[…, D]`` with frozen weights; its input may have a gradient."""
    # Use detached copies: a parameter frozen in the module would be frozen for all losses.
    if not torch.is_grad_enabled():
        return module
    # The usual maps as functions: functional_call takes 20 µs more.
    if is_unmodified(module, nn.Linear):
        bias = None if module.bias is None else module.bias.detach()
        return partial(F.linear, weight=module.weight.detach(), bias=bias)
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda x: functional_call(module, weights, (x,))
