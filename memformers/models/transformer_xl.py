"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a transformer that remembers the last segments."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from memformers.models.base import MemoryStack
from memformers.models.config import NetworkConfig
from memformers.models.layers import TransformerXLLayer
from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes, Sizes
from memformers.models.memory_update import truncate_memory
from memformers.models.registry import REGISTRY


class TransformerXL(MemoryStack):
    """Transformer-XL (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)): ``n_layers``
    layers like ``layer``, each with fresh weights, or one for each, over memory and segment, and in pre-norm
    a final norm. Raises ValueError for a number of layers below 1.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, MemorySizes, ModelConfig, TransformerXL
        >>> layer = MemoryLM(ModelConfig(d_model=64)).transformer.layers[0]  # a TransformerXLLayer
        >>> stack, memory = TransformerXL(layer, n_layers=2), None
        >>> for _ in range(3):
        ...     output, inputs = stack(torch.randn(16, 2, 64), memory)
        ...     memory, _ = stack.remember(memory, inputs, [MemorySizes(32)] * 2)
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 64]), 32)
    """

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sizes:
        """The newest ``mem_len`` positions, and ``divided_len`` older ones."""
        lengths = map(config.of_layers, ("mem_len", "divided_len"))
        return [
            MemorySizes(M + N, window=M if config.same_length else None, heads=own, divided=N,
                        divided_by=config.heads)
            for M, N, own in zip(*lengths, config.sizes_by_head(slots=False), strict=True)
        ]  # fmt: skip

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "TransformerXL":
        """The network of ``config``, with layers of these ``parts``."""
        return cls(TransformerXLLayer(**parts), config.n_layers)

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], sizes: Sizes, doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The newest positions of ``memory`` and ``inputs [S, B, D]``, wherever documents start; no loss."""
        return truncate_memory(memory, inputs, sizes), inputs[0].new_zeros(())


class WithoutMemory(TransformerXL):
    """A transformer with no memory: a Transformer-XL that is never given one."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sizes:
        """Nothing."""
        return [MemorySizes(0)] * config.n_layers


REGISTRY["model", "transformer"], REGISTRY["model", "transformer-xl"] = WithoutMemory, TransformerXL
