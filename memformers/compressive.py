"""Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): the oldest memories are compressed,
not forgotten, and each layer learns to compress so that attention notices little."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.func import functional_call

from memformers.attention import RelativeMultiHeadAttention
from memformers.layers import FeedForward, MemoryLayer, Norm, final_norm, sparing, stack
from memformers.memory import check_memory


class Conv1dCompression(nn.Module):
    """f_c as a 1D convolution whose kernel and stride are the compression rate (section 3.2): every
    ``compression_rate`` positions become one slot, ``[n·c, B, D]`` to ``[n, B, D]``.

    Raises ValueError for a rate below 1, or a length that is no multiple of it.
    """

    def __init__(self, compression_rate: int, d_model: int):
        super().__init__()
        if compression_rate < 1:
            raise ValueError(
                f"compression_rate={compression_rate}: each slot stands for so many positions; "
                f"use at least 1."
            )
        self.compression_rate = compression_rate
        self.conv = nn.Conv1d(d_model, d_model, kernel_size=compression_rate, stride=compression_rate)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to ``[n, B, D]``."""
        if len(mem) % self.compression_rate:
            raise ValueError(
                f"{len(mem)} memories don't fill whole slots of compression_rate="
                f"{self.compression_rate}; compress a multiple of it and keep the rest."
            )
        # Kernels that don't overlap make the convolution one matrix product.
        slots = rearrange(mem, "(n c) b d -> n b (d c)", c=self.compression_rate)
        return F.linear(slots, self.conv.weight.flatten(1), self.conv.bias)  # [n, B, D]


class CompressiveTransformerLayer(MemoryLayer):
    """The shared layer, attending over compressed memory, memory and segment; ``compress``
    is its own f_c, ``[n·c, B, D]`` to ``[n, B, D]``."""

    def __init__(
        self,
        *,
        d_model: int,
        self_attn: RelativeMultiHeadAttention,
        feed_forward: FeedForward,
        dropout_prob: float,
        compress: nn.Module,
        norm: Norm = "pre",
    ):
        super().__init__(
            d_model=d_model,
            self_attn=self_attn,
            feed_forward=feed_forward,
            dropout_prob=dropout_prob,
            norm=norm,
        )
        self.compress = compress

    def forward(
        self, *, x: Tensor, mem: Tensor | None, c_mem: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """``x [S, B, D]``, ``mem [M, B, D]`` and ``c_mem [C, B, D]`` (or None) to ``[S, B, D]``;
        ``mask`` is ``[S, C + M + S, B]`` or ``[S, C + M + S, 1]``, None for causal."""
        past = [memory for memory in (c_mem, mem) if memory is not None]
        return self.attend_and_transform(x, past, mask)


class CompressiveTransformer(nn.Module):
    """``n_layers`` layers built like ``layer``, each with fresh weights, and in pre-norm a final norm.

    Both memories are passed in; growing and compressing them is the business of
    :mod:`memformers.memory`.
    """

    def __init__(self, layer: CompressiveTransformerLayer, n_layers: int):
        super().__init__()
        self.layers = stack(layer, n_layers)
        self.norm = final_norm(layer)
        self.recompute = False
        """Whether layers are computed again in the backward pass, to save memory."""

    def forward(
        self,
        x: Tensor,
        mem: Sequence[Tensor] | None,
        c_mem: Sequence[Tensor] | None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """``x [S, B, D]``; ``mem`` and ``c_mem``: None, empty, or a tensor ``[M, B, D]`` and
        ``[C, B, D]`` a layer.

        Returns the output ``[S, B, D]`` and ``new_mem``: the detached input ``[S, B, D]`` of each
        layer. Raises ValueError for a memory of another depth, batch, width, dtype or device.
        """
        mem, c_mem = mem or [], c_mem or []
        check_memory("mem", mem, x, len(self.layers))
        check_memory("c_mem", c_mem, x, len(self.layers))
        new_mem = []
        for i, layer in enumerate(self.layers):
            new_mem.append(x.detach())
            x = sparing(layer, self.recompute)(
                x=x,
                mem=mem[i] if mem else None,
                c_mem=c_mem[i] if c_mem else None,
                mask=mask,
            )
        return self.norm(x), new_mem


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
    ) -> Tensor:
        """``h [S, B, D]``, the inputs of each layer; ``mem [n·c, B, D]``, what each compresses;
        ``c_mem [n, B, D]``, f_c of those where it is already at hand. Returns a scalar.

        Raises ValueError unless there is one tensor a layer.
        """
        if not len(self.layers) == len(h) == len(mem):
            raise ValueError(
                f"one h and one mem for each of {len(self.layers)} layers were expected; "
                f"{len(h)} and {len(mem)} came."
            )
        if c_mem is None:
            c_mem = [layer.compress(old.detach()) for layer, old in zip(self.layers, mem, strict=True)]
        losses = [layer_loss(*one) for one in zip(self.layers, h, mem, c_mem, strict=True)]
        return torch.stack(losses).sum()


def layer_loss(layer: CompressiveTransformerLayer, h: Tensor, mem: Tensor, c_mem: Tensor) -> Tensor:
    """One layer's term: ‖attention(h, mem) − attention(h, c_mem)‖², averaged over all elements, a scalar;
    of ``h [S, B, D]``, ``mem [n·c, B, D]`` and ``c_mem [n, B, D]``."""
    norm, attention = frozen(layer.norm_before_attention or nn.Identity()), layer.self_attn
    query = project(attention, attention.query, norm(h.detach()))  # [B, H, S, E]
    whole = content_attention(attention, query, norm(mem.detach()))  # [B, H, S, E]
    compressed = content_attention(attention, query, norm(c_mem))  # [B, H, S, E]
    return F.mse_loss(compressed, whole)


def content_attention(attention: RelativeMultiHeadAttention, query: Tensor, context: Tensor) -> Tensor:
    """Softmax(q·k / √E) of ``query [B, H, S, E]`` over all of ``context [·, B, D]``: ``[B, H, S, E]``,
    with no positions, no mask, no output projection and frozen weights."""
    key, value = (project(attention, linear, context) for linear in (attention.key, attention.value))
    return F.scaled_dot_product_attention(query, key, value)


def project(attention: RelativeMultiHeadAttention, linear: nn.Linear, z: Tensor) -> Tensor:
    """``z [t, B, D]`` through one of the attention's maps, frozen, by heads: ``[B, H, t, E]``."""
    return rearrange(frozen(linear)(z), "t b (h e) -> b h t e", h=attention.heads)


def frozen(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module as a function, of the same shapes ``[…, D]``, whose weights take no gradient, though its
    input may."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda x: functional_call(module, weights, (x,))
