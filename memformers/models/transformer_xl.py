"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a transformer that remembers the last segments."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from memformers.models.config import NetworkConfig
from memformers.models.layers import TransformerXLLayer
from memformers.models.lengths import ByLayer, LayerLengths
from memformers.models.memory import Memory
from memformers.models.stack import MemoryStack


class TransformerXL(MemoryStack):
    """Transformer-XL (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)): layers that
    attend over memory and segment, and in pre-norm a final norm.

    Args:
        layer: The layer that all are built like, each with fresh weights.
        n_layers: The number of layers.

    Raises:
        ValueError: For a number of layers below 1.

    Examples:
        >>> import torch
        >>> from memformers import (
        ...     FeedForward, Memory, RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer,
        ... )
        >>> parts = {
        ...     "d_model": 64, "self_attn": RelativeMultiHeadAttention(heads=4, d_model=64),
        ...     "feed_forward": FeedForward(64, 256), "dropout_prob": 0.1,
        ... }
        >>> from memformers.models.lengths import LayerLengths
        >>> stack, memory = TransformerXL(TransformerXLLayer(**parts), n_layers=2), Memory(())
        >>> for _ in range(3):
        ...     output, inputs = stack(torch.randn(16, 2, 64), memory.mem)
        ...     memory, _ = stack.remember(memory, inputs, [LayerLengths(32)] * 2)
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 64]), 32)
    """

    def __init__(self, layer: TransformerXLLayer, n_layers: int):
        super().__init__(layer, n_layers)

    @classmethod
    def layer_lengths(cls, config: NetworkConfig) -> list[LayerLengths]:
        """The newest ``mem_len`` positions."""
        return [LayerLengths(mem_len) for mem_len in config.of_layers("mem_len")]

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "TransformerXL":
        """The network of ``config``, with layers of these ``parts``."""
        return cls(TransformerXLLayer(**parts), config.n_layers)

    def forward(
        self,
        x: Tensor,
        mem: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        valid: Tensor | None = None,
        window: ByLayer | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read a segment.

        Args:
            x: ``[S, B, D]``.
            mem: None, empty, or a tensor ``[M, B, D]`` per layer; M may differ by layer.
            mask: ``[S, M + S, B]`` or ``[S, M + S, 1]``, true where a query may look, None for causal.
            doc_starts: ``[S, B]``, true where a new document begins; a query sees no other document.
            valid: ``[B]``, how many of the newest positions of ``mem`` belong to the running document; None
                for all.
            window: How many of the newest positions a query sees, its own included; None for all.
            through_memory: Whether ``new_mem`` keeps its gradient.

        Returns:
            The output ``[S, B, D]`` and ``new_mem``, the detached input ``[S, B, D]`` of each layer, which is
            what this segment adds to the memory.

        Raises:
            ValueError: For a memory of another depth, batch, width, dtype or device, and for starts or valid
                that don't fit.
        """
        return self.read(x, Memory(tuple(mem or ()), valid=valid), mask, doc_starts, window, through_memory)


class WithoutMemory(TransformerXL):
    """A transformer with no memory: a Transformer-XL that is never given one."""

    @classmethod
    def layer_lengths(cls, config: NetworkConfig) -> list[LayerLengths]:
        """Nothing."""
        return [LayerLengths(0)] * config.n_layers
