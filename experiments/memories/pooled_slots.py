"""Pooled slots, as in DeepSeek-V4's heavily compressed attention (DeepSeek-AI 2026): c positions become
one by a softmax for each feature, which the language model's loss trains.

    memformers train --model experiments/memories/pooled_slots.py:PooledSlots

For the c inputs h_j of a group, j its offset in it:

    v_j = W_v h_j                                         what is pooled
    z_j = W_z h_j + b_j                                   scores [D], with a learned bias [c, D] by offset
    slot = Σ_j softmax_j(z_j) ⊙ v_j                       for each feature on its own

It is the Compressive Transformer with another f_c and another loss. V4's slots are keys and values at once,
normalized, shared by all heads, and of 128 positions each. Here a slot stands for an input, which the layer
normalizes and projects to keys and values as it does all others, and c is ``compression_rate``. At first, it
is the mean.

A memory has no gradient, so the slots of the newest ``learned_segments`` segments are computed again where
they are read, from their inputs, which the memory keeps (``CompressiveRule.recall``). Older slots stay as
they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from memformers import CompressiveRule, MemoryRule, MemorySizes, NetworkConfig, Range


@dataclass(frozen=True)
class Settings:
    learned_segments: Annotated[int, Range(1)] = 1
    """How many segments back the pooling learns from the language model's loss."""


class SoftmaxPooling(nn.Module):
    """f_c, from inputs ``[n·c, B, D]`` to slots ``[n, B, D]``."""

    def __init__(self, compression_rate: int, d_model: int):
        super().__init__()
        self.compression_rate = compression_rate
        self.value = nn.Linear(d_model, d_model, bias=False)  # W_v
        self.score = nn.Linear(d_model, d_model, bias=False)  # W_z
        self.bias = nn.Parameter(torch.empty(compression_rate, 1, d_model))  # b, [c, 1, D]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the mean of the inputs."""
        nn.init.eye_(self.value.weight)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.bias)

    def forward(self, mem: Tensor) -> Tensor:
        groups = mem.unflatten(0, (-1, self.compression_rate))  # [n, c, B, D]
        weights = (self.score(groups) + self.bias).softmax(dim=1)
        return (weights * self.value(groups)).sum(1)  # [n, B, D]


class PooledSlots(CompressiveRule):
    """The newest ``mem_len`` inputs, and ``c_mem_len`` slots, each pooled from ``compression_rate`` older
    ones."""

    Config = Settings

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """As those of the Compressive Transformer with ``bptt``."""
        S = config.segment_len
        learned = config.memory_config.learned_segments
        lengths = (config.per_layer(name) for name in ("mem_len", "c_mem_len", "compression_rate"))
        # The slots of a segment that are computed again need their c inputs each.
        sizes = []
        for M, C, c in zip(*lengths, strict=True):
            n_learned = min(learned * -(-S // c), C)
            sizes.append(MemorySizes(M, C, c, slot_positions=c, bptt_len=n_learned * c))
        return sizes

    @classmethod
    def build(cls, config: NetworkConfig) -> Sequence[MemoryRule]:
        """The rule of each layer, with its pooling."""
        learned = config.memory_config.learned_segments
        rules = []
        for size in config.memory_sizes:
            f_c = SoftmaxPooling(size.compression_rate, config.d_model)
            rule = cls(
                size.mem_len, size.c_mem_len, f_c, loss="none", bptt=learned,
                segment_len=config.segment_len,
            )  # fmt: skip
            rules.append(rule)
        return rules
