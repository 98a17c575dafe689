"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a transformer that remembers the last segments."""

from collections.abc import Sequence

from torch import Tensor

from memformers.models.base import MemoryStack
from memformers.models.config import NO_MEMORY, MemorySizes, NetworkConfig
from memformers.models.memory import Memory, truncate_memory
from memformers.models.registry import MODELS


class TransformerXL(MemoryStack):
    """Transformer-XL (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)): layers
    over memory and segment, and in pre-norm a final norm. ``layer`` is copied ``n_layers`` times with fresh
    weights, or is a list with one layer each. Raises ValueError for a number of layers below 1.

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, MemorySizes, RelativeMultiHeadAttention
        >>> from memformers import TransformerXL, TransformerXLLayer
        >>> layer = TransformerXLLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1, size=MemorySizes(mem_len=32))
        >>> stack, memory = TransformerXL(layer, n_layers=2), None
        >>> for _ in range(3):
        ...     output, memory, _ = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 64]), 32)
    """

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions of each layer."""
        lengths = config.per_layer("mem_len")
        return [MemorySizes(M, window=M if config.same_length else None) for M in lengths]

    def update(
        self, memory: Memory, inputs: Sequence[Tensor], shifted: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The newest positions of ``memory`` and ``shifted [S, B, D]``, wherever documents start (section
        3.2); no loss."""
        return truncate_memory(memory, shifted, self.sizes), inputs[0].new_zeros(())


class WithoutMemory(TransformerXL):
    """A transformer with no memory: a Transformer-XL whose memory is always empty."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        return [NO_MEMORY] * config.n_layers


MODELS["transformer"], MODELS["transformer-xl"] = WithoutMemory, TransformerXL
