"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): each layer remembers its newest inputs."""

from collections.abc import Sequence

from torch import Tensor

from memformers.common.fields import Count, check_arguments
from memformers.models.config import NetworkConfig
from memformers.models.layers import MemoryLayer
from memformers.models.memory import LayerMemory, cut
from memformers.models.rules.base import MemoryRule, UpdateContext
from memformers.models.sizes import Length, MemorySizes
from memformers.models.stack import MemoryStack


class TransformerXLRule(MemoryRule):
    """Remember the newest M inputs of a layer (section 3.2).

    Examples:
        >>> import torch
        >>> from memformers import LayerMemory, MemorySizes, TransformerXLRule, UpdateContext
        >>> rule = TransformerXLRule(MemorySizes(mem_len=24))
        >>> x = torch.randn(16, 2, 64)  # [S, B, D]
        >>> past = LayerMemory.nothing(x)
        >>> for _ in range(2):
        ...     past, _ = rule.update(past, x, UpdateContext(layer=None, x=x, n_valid=None))
        >>> past.mem.shape  # [M, B, D]
        torch.Size([24, 2, 64])
    """

    append_only = True

    @classmethod
    def sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions of each layer."""
        return [MemorySizes(M, slot_positions=1) for M in config.per_layer("mem_len")]

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        """The newest M of ``past`` and ``x [S, B, D]``, wherever documents start; no loss."""
        # h̃ = [SG(past); x], of which the next segment sees the newest M (section 3.2).
        n_forgotten = max(past.mem_len + len(x) - self.mem_len, 0)
        return LayerMemory(cut((past.mem, x), n_forgotten), past.slots), None


class TransformerXL(MemoryStack):
    """Transformer-XL (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)): layers
    over memory and segment, and in pre-norm a final norm. ``layer`` is copied ``n_layers`` times with fresh
    weights, or is a list with one layer each, which remember ``mem_len`` positions. Raises ValueError for a
    number of layers below 1.

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, MemoryLayer, RelativeMultiHeadAttention, TransformerXL
        >>> layer = MemoryLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1)
        >>> stack = TransformerXL(layer, n_layers=2, mem_len=32)
        >>> memory = None
        >>> for _ in range(3):
        ...     output, memory, _ = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 64]), 32)
    """

    @check_arguments
    def __init__(self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: Count, mem_len: Length):
        size = MemorySizes(mem_len, slot_positions=1)
        super().__init__(layer, n_layers, [TransformerXLRule(size) for _ in range(n_layers)])
