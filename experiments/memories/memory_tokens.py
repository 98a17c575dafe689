"""The memory tokens of the Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881): vectors that
are read with each segment, and whose last layer's outputs are read with the next.

    memformers train --model experiments/memories/memory_tokens.py:MemoryTokens

A segment of a decoder is [memory; segment; memory] (section 3 of the paper). All positions of the segment
see the memory at its left, which is read; the memory at its right sees the whole segment, and what comes out
there is the next memory. The first segment of a document reads none. The paper's gradient goes through
several segments; ``memformers train`` cuts it after each, so what the model writes is learned only in a
training loop that calls it with ``through_memory=True``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from memformers import (
    CustomMemory,
    Memory,
    MemorySizes,
    NetworkConfig,
    Range,
    RelativeMultiHeadAttention,
)


@dataclass(frozen=True)
class Settings:
    """The settings of the memory."""

    tokens_of_memory: Annotated[int, Range(1)] = 8
    """The number of memory tokens, m."""


class MemoryTokens(CustomMemory):
    """m vectors ``[m, B, D]``, the slots of the first layer; no other layer has a memory."""

    Config = Settings

    def __init__(self, config: NetworkConfig, self_attn: RelativeMultiHeadAttention, feed_forward: nn.Module):
        super().__init__(config, self_attn, feed_forward)
        self.start = nn.Parameter(torch.randn(config.memory_config.tokens_of_memory, 1, config.d_model))
        """What is written over in the first segment of a document, ``[m, 1, D]``."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """m slots, in the first layer, which stand for at least the last segment."""
        rate = -(-config.segment_len // config.memory_config.tokens_of_memory)
        first = MemorySizes(0, config.memory_config.tokens_of_memory, rate)
        return [first, *[MemorySizes(0)] * (config.n_layers - 1)]

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> list[tuple[int, int]]:
        """In each layer, the segment with m memory tokens at its left and m at its right."""
        whole = config.segment_len + 2 * config.memory_config.tokens_of_memory
        return [(whole, whole)] * config.n_layers

    @classmethod
    def more_operations(cls, config: NetworkConfig) -> int:
        """The feed-forward network, 4·D·d_ff by layer, and the GRU gates, 24·D², of the 2·m memory tokens,
        which a segment's tokens share."""
        D, tokens = config.d_model, 2 * config.memory_config.tokens_of_memory * config.n_layers
        of_one = 4 * D * config.d_ff + (24 * D * D if config.gate == "gru" else 0)
        return tokens * of_one // config.segment_len

    def read(
        self, x: Tensor, memory: Memory, mask: Tensor | None = None, doc_starts: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Read ``x [S, B, D]`` after ``memory``, with ``doc_starts [S, B]``; returns the output of the
        segment, and the next memory as the input of the first layer that is to be remembered."""
        c_mem, valid = memory.c_mem, memory.valid
        (S, B, _), m = x.shape, len(self.start)
        start = self.start.expand(m, B, -1)
        read = c_mem[0] if c_mem else start
        goes_on = torch.full((B,), bool(c_mem), device=x.device) if valid is None else valid > 0
        begins = torch.zeros(m + S + m, B, dtype=torch.bool, device=x.device)
        begins[m] = ~goes_on  # which hides the memory at the left
        if doc_starts is not None:
            begins[m : m + S] |= doc_starts
        write = read.where(~begins.any(0)[:, None], start)
        output, _ = super().read(torch.cat([read, x, write]), Memory(), mask, begins)
        return output[m : m + S], [output[m + S :], *[x[:0]] * (len(self.layers) - 1)]

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        return Memory((), tuple(inputs)), inputs[0].new_zeros(())
