"""Losses that compression functions f_c learn from (Rae et al. 2020, arXiv 1911.05507, section 3.2.1)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from memformers.common.errors import UserError
from memformers.models.attention import Heads, RelativeMultiHeadAttention
from memformers.models.compression import CompressionAutoEncoder
from memformers.models.config import CompressionLossName, check_choice
from memformers.models.layers import CompressiveTransformerLayer, MemoryLayer
from memformers.models.parts import output_of

ByLayer = Sequence[Tensor]
Slots = ByLayer | None
Masked = Tensor | ByLayer | None
Term = Callable[..., Tensor]


class AttentionReconstructionLoss:
    """The mean squared error between the segment's content attention over what is compressed and over its
    slots, summed over ``layers`` (Rae et al. 2020, section 3.2.1, algorithm 2). It trains only f_c. With
    ``heads``, some of each layer, only these count.

    Examples:
        >>> import torch
        >>> from memformers import AttentionReconstructionLoss, MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(model="compressive", d_model=64, n_layers=2))
        >>> h, mem = torch.randn(2, 16, 3, 64), torch.randn(2, 32, 3, 64)  # layers, then [S, B, D]
        >>> AttentionReconstructionLoss(model.transformer.layers)(list(h), list(mem)).shape
        torch.Size([])
    """

    def __init__(
        self,
        layers: Sequence[CompressiveTransformerLayer] | nn.ModuleList,
        heads: Sequence[Heads] | None = None,
    ):
        self.layers = cast(list[CompressiveTransformerLayer], list(layers))
        self.heads = heads or [slice(None)] * len(self.layers)

    def __call__(self, h: ByLayer, mem: ByLayer, c_mem: Slots = None, n_masked: Masked = None) -> Tensor:
        """The loss, a scalar, of each layer's inputs ``h [S, B, D]``, what it compresses, ``mem [n·c, B,
        D]``, and ``c_mem [n, B, D]``, f_c of ``mem`` if it is at hand. ``n_masked [B]``, or one per layer, is
        how many of the oldest slots don't count in each stream; the mean is over streams in which some do,
        and 0 without any. Raises ValueError unless there is one tensor per layer."""
        n = len(self.layers)
        if not n == len(h) == len(mem):
            raise UserError(f"expected an h and a mem for each of {n} layers, got {len(h)} and {len(mem)}.")
        each = zip(self.layers, h, self.heads, strict=True)
        terms = [partial(layer_loss, layer, x, heads=heads) for layer, x, heads in each]
        return summed(terms, [layer.compress for layer in self.layers], mem, c_mem, n_masked)


class AutoEncodingLoss:
    """The mean squared error of decoders that restore the memories from their compressions, summed over
    layers (Rae et al. 2020, section 3.2.1, L_ae). Its gradient reaches only f_c and its decoder.

    Examples:
        >>> import torch
        >>> from memformers import AutoEncodingLoss, CompressionAutoEncoder, Conv1dCompression
        >>> f_c = CompressionAutoEncoder(Conv1dCompression(4, d_model=64), d_model=64)
        >>> AutoEncodingLoss([f_c])([torch.randn(32, 2, 64)]).shape  # a layer's [n·c, B, D]
        torch.Size([])
    """

    def __init__(self, compressions: Sequence[CompressionAutoEncoder]):
        self.compressions = list(compressions)

    def __call__(self, mem: ByLayer, c_mem: Slots = None, n_masked: Masked = None) -> Tensor:
        """The loss, a scalar, of ``mem [n·c, B, D]``, ``c_mem [n, B, D]`` and ``n_masked [B]`` as in
        [`AttentionReconstructionLoss`][]; with the same errors."""
        if len(self.compressions) != len(mem):
            raise UserError(f"expected one mem for each of {len(self.compressions)} layers, got {len(mem)}.")
        terms = [partial(auto_encoding, f_c) for f_c in self.compressions]
        return summed(terms, self.compressions, mem, c_mem, n_masked)


def summed(
    terms: Sequence[Term], f_cs: Sequence[nn.Module], mem: ByLayer, c_mem: Slots, n_masked: Masked
) -> Tensor:
    """The sum of each layer's term for its ``mem [n·c, B, D]``, ``c_mem [n, B, D]`` and ``n_masked [B]``."""
    if c_mem is None:
        c_mem = [f_c(old.detach()) for f_c, old in zip(f_cs, mem, strict=True)]
    of_layers = n_masked if isinstance(n_masked, Sequence) else [n_masked] * len(mem)
    each = zip(terms, mem, c_mem, of_layers, strict=True)
    losses = [term(old, new, own) for term, old, new, own in each if len(old)]
    return torch.stack(losses).sum() if losses else mem[0].new_zeros(())


def auto_encoding(
    compress: CompressionAutoEncoder, mem: Tensor, c_mem: Tensor, n_masked: Tensor | None = None
) -> Tensor:
    """One layer's term: ‖mem − g(c_mem)‖², averaged over all elements, a scalar; of ``mem [n·c, B, D]``,
    ``c_mem [n, B, D]`` and ``n_masked [B]``."""
    mem, made = mem.detach(), compress.decode(c_mem)
    if n_masked is None:
        return F.mse_loss(made, mem)
    positions = torch.arange(len(mem), device=mem.device)
    counts = positions[:, None] >= n_masked * compress.compression_rate  # [n·c, B]
    mem, made = (x.where(counts[..., None], 0.0) for x in (mem, made))
    errors = F.mse_loss(made, mem, reduction="none").mean(-1)  # [n·c, B]
    of_streams = errors.sum(0) / counts.sum(0).clamp(min=1)  # [B]
    return of_streams.sum() / counts.any(0).sum().clamp(min=1)


def check_compression_loss(loss: CompressionLossName | str, compress: nn.Module, bptt: int = 0) -> None:
    """Raise ValueError for a loss that doesn't train all of this f_c. With ``bptt`` ≥ 1, f_c also learns from
    the language model's loss."""
    check_choice("compression_loss", loss, CompressionLossName, "attention")
    name, decodes, wrong = type(compress).__name__, isinstance(compress, CompressionAutoEncoder), ""
    if loss == "auto-encoding" and not decodes:
        wrong = f"needs a decoder beside f_c, got {name}; use compress=CompressionAutoEncoder(f_c, d_model)"
    elif loss != "auto-encoding" and decodes:
        wrong = f"would not train the decoder of {name}; use 'auto-encoding', or f_c without the decoder"
    elif loss == "none" and not bptt and any(parameter.requires_grad for parameter in compress.parameters()):
        wrong = f"would not train {name}; use 'attention', bptt=1 or an f_c without parameters"
    if wrong:
        raise UserError(f"compression_loss={loss!r} {wrong}.")


def layer_loss(
    layer: MemoryLayer, h: Tensor, mem: Tensor, c_mem: Tensor, n_masked: Tensor | None = None,
    heads: Heads = slice(None),
) -> Tensor:  # fmt: skip
    """One layer's term: ‖attention(h, mem) − attention(h, c_mem)‖², averaged over all elements of ``heads``,
    a scalar; of ``h [S, B, D]``, ``mem [n·c, B, D]``, ``c_mem [n, B, D]`` and ``n_masked [B]``."""
    attend = frozen_attention(layer, h, heads)
    if n_masked is None:
        whole = attend(mem.detach())  # [B, H, S, E]
        compressed = attend(c_mem)  # [B, H, S, E]
        return F.mse_loss(compressed, whole)
    counts = n_masked < len(c_mem)  # [B]
    key_start = n_masked * counts  # a softmax over no keys has no value
    whole = attend(mem.detach(), key_start * (len(mem) // len(c_mem)))
    compressed = attend(c_mem, key_start)
    errors = F.mse_loss(compressed, whole, reduction="none").sum((1, 2, 3))  # [B]
    return errors.where(counts, 0.0).sum() / (counts.sum() * whole[0].numel()).clamp(min=1)


def own_loss(
    loss: nn.Module, layer: MemoryLayer, h: Tensor, mem: Tensor, c_mem: Tensor, n_masked: Tensor | None = None
) -> Tensor:
    """One layer's term by a ``loss`` of one's own, a scalar, of what [`layer_loss`][] takes; streams that
    leave out as many slots are given to it together."""
    n, c, total = len(c_mem), len(mem) // len(c_mem), c_mem.new_zeros(())
    groups: list[tuple[int, Any, int]] = [(0, slice(None), 1)]  # slots left out, streams and their weight
    if n_masked is not None:
        numbers = [k for k in n_masked.unique().tolist() if k < n]
        groups = [(k, n_masked == k, int((n_masked == k).sum())) for k in numbers]
    for k, streams, size in groups:
        attend = frozen_attention(layer, h[:, streams])
        parts = mem[k * c :, streams].detach(), c_mem[k:, streams]
        total = total + size * output_of(loss, (), *parts, attend)
    return total / max(sum(size for *_, size in groups), 1)


def frozen_attention(layer: MemoryLayer, h: Tensor, heads: Heads = slice(None)) -> Callable[..., Tensor]:
    """[`content_attention`][] of the inputs ``h [S, B, D]`` of a layer, with frozen weights: from a context
    ``[·, B, D]``, and the first keys ``[B]`` if not all count, to ``[B, H, S, E]``, of all ``heads``."""
    norm, attention = frozen(layer.norm_before_attention or nn.Identity()), layer.self_attn
    query = attention.by_head(frozen(attention.query)(norm(h.detach())))[:, heads]  # [B, H, S, E]
    return lambda context, first=None: content_attention(attention, query, norm(context), first, heads)


def content_attention(
    attention: RelativeMultiHeadAttention, query: Tensor, context: Tensor, key_start: Tensor | None = None,
    heads: Heads = slice(None),
) -> Tensor:  # fmt: skip
    """Softmax(q·k / √E) of ``query [B, H, S, E]`` over ``context [·, B, D]``, from ``key_start [B]`` on or
    all: ``[B, H, S, E]``, with no positions, not causal, no output projection and frozen weights."""
    key, value = (attention.by_head(frozen(m)(context))[:, heads] for m in (attention.key, attention.value))
    visible = None
    if key_start is not None:
        visible = torch.arange(len(context), device=key_start.device) >= key_start[:, None, None, None]
        key, value = (x.where(visible.mT, 0.0) for x in (key, value))  # what is hidden may not be finite
    if query.device.type == "cpu":  # in bfloat16, which autocast would choose, a backward pass takes longer
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(query, key, value, visible)


def frozen(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module, as a function of ``[…, D]`` whose weights take no gradient, though its input may."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda x: functional_call(module, weights, (x,))
