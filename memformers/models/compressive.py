"""Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): the oldest memories are compressed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from memformers.common.fields import NonNegativeInt, check_arguments
from memformers.models import compression, reconstruction
from memformers.models.attention import Heads
from memformers.models.base import MemoryStack
from memformers.models.config import CompressionLossName, NetworkConfig
from memformers.models.layers import CompressiveTransformerLayer
from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes, Sizes
from memformers.models.memory_update import compress_memory
from memformers.models.parts import build_part
from memformers.models.registry import REGISTRY


class CompressiveTransformer(MemoryStack):
    """Compressive Transformer (Rae et al. 2020, [arXiv 1911.05507](https://arxiv.org/abs/1911.05507)): layers
    like ``layer``, or one for each, over compressed memory, memory and segment, and in pre-norm a final norm.
    Raises ValueError for a loss that can't train all of f_c.

    Args:
        compression_loss: What each f_c learns from: [`AttentionReconstructionLoss`][] (attention); with a
            [`CompressionAutoEncoder`][], [`AutoEncodingLoss`][] (auto-encoding); no loss (none); or one of
            your own (FILE.py:Class).
        bptt: With 1 or more, which must be that of the [`MemorySizes`][], f_c also learns from the language
            model's loss ([`recompute_slots`][]), and then needs no other.

    Examples:
        >>> import torch
        >>> from memformers import CompressiveTransformer, MemoryLM, ModelConfig
        >>> config = ModelConfig("compressive", d_model=64, mem_len=16, c_mem_len=8, n_layers=2)
        >>> layer = MemoryLM(config).transformer.layers[0]  # a CompressiveTransformerLayer
        >>> stack, memory = CompressiveTransformer(layer, n_layers=2), None
        >>> for _ in range(4):
        ...     output, inputs = stack(torch.randn(16, 2, 64), memory)
        ...     memory, auxiliary_loss = stack.remember(memory, inputs, config.memory_sizes)
        >>> memory.mem_len, memory.c_mem_len
        (16, 8)
    """

    @check_arguments
    def __init__(
        self,
        layer: CompressiveTransformerLayer | Sequence[CompressiveTransformerLayer],
        n_layers: int,
        compression_loss: CompressionLossName | str = "attention",
        bptt: NonNegativeInt = 0,
    ):
        super().__init__(layer, n_layers)
        self.compression_loss = compression_loss
        for f_c in self.compressions:
            reconstruction.check_compression_loss(compression_loss, f_c, bptt)
        own_losses = (
            build_part("compression_loss", compression_loss, compression.rate_of(one.compress), one.d_model)
            for one in self.compressive_layers
        )
        self.own_losses = nn.ModuleList(own_losses) if ":" in compression_loss else None

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sizes:
        """The newest ``mem_len`` positions, and ``c_mem_len`` slots of older ones."""
        lengths = map(config.of_layers, ("mem_len", "c_mem_len", "compression_rate"))
        each = zip(*lengths, config.sizes_by_head(slots=True), strict=True)
        return [MemorySizes(M, C, c, config.bptt, config.segment_len, heads=own) for M, C, c, own in each]

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "CompressiveTransformer":
        """The network of ``config``, with layers of these ``parts`` and an f_c each."""
        rates = config.of_layers("compression_rate")
        f_cs = [build_compression(config, rate) for rate in (rates if len(set(rates)) > 1 else rates[:1])]
        layers = [CompressiveTransformerLayer(**parts, compress=f_c) for f_c in f_cs]
        layer = layers if len(layers) > 1 else layers[0]
        return cls(layer, config.n_layers, config.compression_loss, config.bptt)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Memory | Sequence[Tensor] | None = None,
        c_mem: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """[`MemoryStack.forward`][memformers.models.base.MemoryStack.forward] of ``x [S, B, D]``; ``memory``
        may also be positions ``[M, B, D]``, beside slots ``c_mem [C, B, D]``, a tensor per layer each."""
        if c_mem:
            memory = Memory(tuple(cast(Sequence[Tensor], memory or ())), tuple(c_mem))
        return super().forward(x, memory, mask, **options)

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], sizes: Sizes, doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """Both memories after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``doc_starts
        [S, B]``; and the loss of what was compressed, a scalar."""
        layers, f_cs, past = self.compressive_layers, self.compressions, memory

        def received(layer: int, positions: int) -> Tensor | None:
            # A mask or window of the forward pass is not known here.
            if not compression.needs_attention(f_cs[layer]):
                return None
            x, slots = inputs[layer], len(past.c_mem[layer]) if past.c_mem else 0
            context = torch.cat([*(parts[layer] for parts in (past.c_mem, past.mem) if parts), x])
            key_start = self.first_seen(x, past, doc_starts)[layer]
            heads = heads_with_slots(sizes[layer])
            looks = compression.attention_received(layers[layer], context, len(x), key_start, heads)
            return looks[slots : slots + positions]

        memory, compressed = compress_memory(past, inputs, f_cs, sizes, doc_starts, received)
        if compressed is None or self.compression_loss == "none":
            return memory, inputs[0].new_zeros(())
        both = compressed.old, compressed.new, compressed.n_masked
        if self.compression_loss == "auto-encoding":
            decoded = cast(list[compression.CompressionAutoEncoder], f_cs)
            return memory, reconstruction.AutoEncodingLoss(decoded)(*both)
        if self.own_losses is None:
            heads = list(map(heads_with_slots, sizes))
            return memory, reconstruction.AttentionReconstructionLoss(layers, heads)(inputs, *both)
        each = zip(self.own_losses, layers, inputs, strict=True)
        terms = [partial(reconstruction.own_loss, *of_layer) for of_layer in each]
        return memory, reconstruction.summed(terms, f_cs, *both)

    def recompute_slots(self, memory: Memory, sizes: Sizes) -> Memory:
        """``memory`` whose newest slots ``[m, B, D]`` f_c computes again from ``slot_inputs [m·c, B, D]``, in
        training: so a later language-model loss reaches f_c (section 3.2.1, backpropagation through time)."""
        if not any(map(len, memory.slot_inputs)) or not (self.training and torch.is_grad_enabled()):
            return memory
        each = zip(self.compressions, memory.c_mem, memory.slot_inputs, sizes, strict=True)
        return replace(memory, c_mem=tuple(newest_anew(*of_layer) for of_layer in each))

    @property
    def compression_rates(self) -> list[int]:
        """How many positions each layer's f_c makes one slot of; ValueError where it doesn't say so."""
        return list(map(compression.rate_of, self.compressions))

    @property
    def compressions(self) -> list[nn.Module]:
        """Each layer's f_c."""
        return [layer.compress for layer in self.compressive_layers]

    @property
    def compressive_layers(self) -> list[CompressiveTransformerLayer]:
        """The layers, by their type."""
        return cast(list[CompressiveTransformerLayer], list(self.layers))


def heads_with_slots(sizes: MemorySizes) -> Heads:
    """The heads of a layer that read slots, and so those whose attention they must preserve."""
    return [head for head, (_, C) in enumerate(sizes.heads) if C] if sizes.heads else slice(None)


def build_compression(config: NetworkConfig, rate: int) -> nn.Module:
    """An f_c, ``[n·c, B, D]`` to ``[n, B, D]``, with a decoder where its loss needs one."""
    pooling = {
        "mean": compression.MeanCompression,
        "max": compression.MaxCompression,
        "strided": compression.StridedCompression,
        "most-used": compression.MostUsedCompression,
    }
    learned = {
        "conv": compression.Conv1dCompression,
        "dilated": compression.DilatedConvCompression,
        "weighted": compression.WeightedCompression,
    }
    f_c: nn.Module
    if ":" in config.compression:
        f_c = build_part("compression", config.compression, rate, config.d_model)
        f_c.compression_rate = rate  # type: ignore[assignment]
    elif config.compression in pooling:
        f_c = pooling[config.compression](rate)
    else:
        f_c = learned[config.compression](rate, config.d_model, config.compression_start)
    decoded = config.compression_loss == "auto-encoding"
    return compression.CompressionAutoEncoder(f_c, config.d_model) if decoded else f_c


def newest_anew(f_c: nn.Module, slots: Tensor, slot_inputs: Tensor, sizes: MemorySizes) -> Tensor:
    """A layer's ``slots [C, B, D]``, of which f_c computes the newest m again from ``slot_inputs
    [m·c, B, D]``, what they stand for."""
    c, of_segment = sizes.compression_rate, sizes.slots_a_segment
    m = len(slot_inputs) // c
    # Slots may depend on where a compression ends, so each segment's are computed apart, as the first time.
    pieces = [n for n in (m % of_segment, *[of_segment] * (m // of_segment)) if n]
    old = slot_inputs.split([n * c for n in pieces])
    new = [compression.slots_of(f_c, x, n) for x, n in zip(old, pieces, strict=True)]
    return torch.cat([slots[: len(slots) - m], *new])


REGISTRY["model", "compressive"] = CompressiveTransformer
