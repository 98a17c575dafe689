"""Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): the oldest memories are compressed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from memformers.common.fields import check_arguments
from memformers.common.text import UserError
from memformers.models import compression
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.base import MemoryStack
from memformers.models.config import CompressionLossName, MemorySizes, NetworkConfig
from memformers.models.layers import CompressiveTransformerLayer
from memformers.models.memory import Memory, compress_memory, slots_of
from memformers.models.registry import MODELS


class CompressiveTransformer(MemoryStack):
    """Compressive Transformer (Rae et al. 2020, [arXiv 1911.05507](https://arxiv.org/abs/1911.05507)): layers
    over compressed memory, memory and segment, and in pre-norm a final norm. ``layer`` is as in
    [`TransformerXL`][]. With ``bptt`` in the layers' sizes, f_c also learns from the language model's loss
    ([`read`][]), and then needs no other. Raises ValueError for ``compression_loss="none"`` if f_c would
    learn nothing.

    Args:
        compression_loss: What each f_c learns from: [`AttentionReconstructionLoss`][] (attention), or nothing
            but the language model's loss (none).

    Examples:
        >>> import torch
        >>> from memformers import CompressiveTransformer, CompressiveTransformerLayer, Conv1dCompression
        >>> from memformers import FeedForward, MemorySizes, RelativeMultiHeadAttention
        >>> layer = CompressiveTransformerLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1, compress=Conv1dCompression(4, d_model=64), size=MemorySizes(16, 8, 4))
        >>> stack, memory = CompressiveTransformer(layer, n_layers=2), None
        >>> for _ in range(4):
        ...     output, memory, auxiliary_loss = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
        >>> memory.mem_len, memory.c_mem_len
        (16, 8)
    """

    @check_arguments
    def __init__(
        self,
        layer: CompressiveTransformerLayer | Sequence[CompressiveTransformerLayer],
        n_layers: int,
        compression_loss: CompressionLossName = "attention",
    ):
        super().__init__(layer, n_layers)
        if not all(isinstance(layer, CompressiveTransformerLayer) for layer in self.layers):
            raise UserError("a CompressiveTransformer needs layers of class CompressiveTransformerLayer.")
        self.compression_loss = compression_loss
        for f_c, size in zip(self.compressions, self.sizes, strict=True):
            learns = any(parameter.requires_grad for parameter in f_c.parameters())
            if compression_loss == "none" and learns and not size.bptt:
                name = type(f_c).__name__
                raise UserError(
                    f"compression_loss='none' would not train {name}; use 'attention', bptt=1, or an f_c "
                    f"without parameters."
                )

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions, and ``c_mem_len`` slots of older ones."""
        lengths = map(config.per_layer, ("mem_len", "c_mem_len", "compression_rate"))
        return [
            MemorySizes(M, C, c, config.bptt, config.segment_len) for M, C, c in zip(*lengths, strict=True)
        ]

    @classmethod
    def build(
        cls, config: NetworkConfig, self_attn: RelativeMultiHeadAttention, feed_forward: nn.Module
    ) -> "CompressiveTransformer":
        sizes = config.memory_sizes
        alike = len({size.compression_rate for size in sizes}) == 1
        f_cs = [build_compression(config, size.compression_rate) for size in (sizes[:1] if alike else sizes)]
        layers = [
            CompressiveTransformerLayer(
                d_model=config.d_model, self_attn=self_attn, feed_forward=feed_forward, compress=f_c,
                dropout_prob=config.dropout, norm=config.norm, gate=config.gate, size=size,
                token_shift=config.token_shift,
            )
            for f_c, size in zip(f_cs, sizes, strict=False)
        ]  # fmt: skip
        return cls(layers[0] if alike else layers, config.n_layers, config.compression_loss)

    def read(
        self, x: Tensor, memory: Memory, mask: Tensor | None = None, doc_starts: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """[`MemoryStack.read`][memformers.models.base.MemoryStack.read] of ``x [S, B, D]``; in training with
        ``bptt``, each f_c computes its newest slots again from ``memory.slot_inputs``, so that the language
        model's loss reaches it (section 3.2.1, backpropagation through time)."""
        if any(map(len, memory.slot_inputs)) and self.training and torch.is_grad_enabled():
            by_layer = zip(self.layers, memory.c_mem, memory.slot_inputs, strict=True)
            memory = replace(memory, c_mem=tuple(recompute_newest_slots(*parts) for parts in by_layer))
        return super().read(x, memory, mask, doc_starts)

    def update(
        self, memory: Memory, inputs: Sequence[Tensor], shifted: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with these layer inputs, ``[S, B, D]``, and the loss of what was
        compressed, a scalar, whose queries are the ``inputs``."""
        layers = cast(Iterable[CompressiveTransformerLayer], self.layers)
        f_cs = [partial(layer.compute, layer.compress) for layer in layers]
        after, compressed = compress_memory(memory, shifted, f_cs, self.sizes, doc_starts)
        if compressed is None or self.compression_loss == "none":
            return after, inputs[0].new_zeros(())
        loss = compression.AttentionReconstructionLoss(self.layers)
        return after, loss(inputs, compressed.old, compressed.new, compressed.n_masked)

    @property
    def compressions(self) -> list[nn.Module]:
        return [cast(CompressiveTransformerLayer, layer).compress for layer in self.layers]


def build_compression(config: NetworkConfig, rate: int) -> nn.Module:
    if config.compression in ("mean", "max"):
        pooling = {"mean": compression.MeanCompression, "max": compression.MaxCompression}
        return pooling[config.compression](rate)
    learned = {"conv": compression.Conv1dCompression, "dilated": compression.DilatedConvCompression}
    return learned[config.compression](rate, config.d_model, config.compression_start)


def recompute_newest_slots(layer: Any, slots: Tensor, slot_inputs: Tensor) -> Tensor:
    """A layer's ``slots [C, B, D]``, of which f_c computes the newest m again from their inputs,
    ``slot_inputs [m·c, B, D]``."""
    c, of_segment = layer.size.compression_rate, layer.size.slots_per_segment
    m = len(slot_inputs) // c
    # Slots may depend on where a compression ends, so each segment's are computed apart, as the first time.
    pieces = [n for n in (m % of_segment, *[of_segment] * (m // of_segment)) if n]
    f_c = partial(layer.compute, layer.compress)
    new = [slots_of(f_c, x, c) for x in slot_inputs.split([n * c for n in pieces])]
    return torch.cat([slots[: len(slots) - m], *new])


MODELS["compressive"] = CompressiveTransformer
