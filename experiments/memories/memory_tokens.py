"""The memory tokens of the Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881): vectors that
are read with each segment, and whose last layer's outputs are read with the next.

    memformers train --model experiments/memories/memory_tokens.py:MemoryTokens

A segment of a decoder is [memory; segment; memory] (section 3 of the paper). All positions of the segment
see the memory at its left, which is read; the memory at its right sees the whole segment, and what comes out
there is the next memory. The first segment of a document reads none. The paper's gradient goes through
several segments; ``memformers train`` cuts it after each, so what the model writes is learned only in a
training loop that calls it with ``through_memory=True``.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from memformers import LayerMemory, Memory, MemoryRule, MemorySizes, MemoryStack, NetworkConfig, Range


@dataclass(frozen=True)
class Settings:
    tokens_of_memory: Annotated[int, Range(1)] = 8
    """The number of memory tokens, m."""


class MemoryTokenStack(MemoryStack):
    """Reads m vectors ``[m, B, D]``, the slots of the first layer, at both ends of a segment."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        m = self.sizes[0].c_mem_len
        self.start = nn.Parameter(torch.randn(m, 1, self.memory_layers[0].d_model))
        """What is written over in the first segment of a document, ``[m, 1, D]``."""

    def forward(
        self, x: Tensor, memory: Memory | None = None, mask: Tensor | None = None, *,
        doc_starts: Tensor | None = None, through_memory: bool = False,
    ) -> tuple[Tensor, Memory, Tensor]:  # fmt: skip
        memory = self.checked(x, memory, mask, doc_starts)
        S, B, _ = x.shape
        m = len(self.start)
        # What is read: the slots, or nothing yet.
        past = memory.layers[0]
        start = self.start.expand(m, B, -1)
        read = past.slots if past.n_slots else start
        goes_on = memory.valid_positions() > 0 if past.n_slots else x.new_zeros(B, dtype=torch.bool)
        # [memory; segment; memory], in which documents start as in the segment, and with it in new streams.
        starts = x.new_zeros(m + S + m, B, dtype=torch.bool)
        starts[m] = ~goes_on  # which hides the memory at the left
        if doc_starts is not None:
            starts[m : m + S] |= doc_starts
        write = read.where(~starts.any(0)[:, None], start)
        output, _, no_loss = super().forward(torch.cat([read, x, write]), None, mask, doc_starts=starts)
        # What comes out at the right is the next memory.
        first = replace(past, slots=output[m + S :])
        after = self.with_documents(memory, [first, *memory.layers[1:]], doc_starts, S)
        return output[m : m + S], after if through_memory else after.detach(), no_loss


class MemoryTokens(MemoryRule):
    """m slots in the first layer, which stand for at least the last segment; no other layer has a memory."""

    Config = Settings
    stack = MemoryTokenStack

    def update(self, past: LayerMemory, *_: Any) -> tuple[LayerMemory, None]:
        """As it was: the network writes the slots."""
        return past, None

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """The 2·m memory tokens are keys of every layer, and pass its maps, too: 4·D² for attention and 6·D a
        key, 4·D·d_ff for the feed-forward network, 24·D² for GRU gates; a segment's tokens share them."""
        m = config.memory_config.tokens_of_memory
        D = config.d_model
        gates = 24 * D * D if config.gate == "gru" else 0
        operations = 4 * D * D + 6 * D * (config.segment_len + 2 * m) + 4 * D * config.d_ff + gates
        others = MemorySizes(n_keys=2 * m, extra_operations=2 * m * operations // config.segment_len)
        first = replace(others, c_mem_len=m, compression_rate=-(-config.segment_len // m))
        return [first] + [others] * (config.n_layers - 1)
