"""KeyDiff (Park et al. 2025, arXiv 2504.15364): the older positions whose keys differ most from the mean key.

    memformers train --model experiments/memories/keydiff.py:KeyDiff

By head, with the keys k of the n positions to choose among, those kept so far and those that leave the newest
M (the paper's sliding window):

    anchor = (1 / n) Σ k / |k|                            mean of the normalized keys
    score = −cos(anchor, k)                               the C positions with the highest stay

The paper keeps other positions for each head of a trained model's cache. Here a layer keeps the same
positions for all its heads, those with the highest mean score, since it remembers inputs, not keys; and the
model is trained with the rule. As in the paper, kept positions don't expire.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, UpdateContext


class KeyDiff(MemoryRule):
    """The newest ``mem_len`` inputs, and the ``c_mem_len`` older ones that KeyDiff keeps."""

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """A kept position stands for itself alone. After each segment, the keys of the C + S positions to
        choose among are projected once more, 2·D² operations each."""
        S = config.segment_len
        sizes = []
        for M, C in zip(config.per_layer("mem_len"), config.per_layer("c_mem_len"), strict=True):
            operations = 2 * config.d_model**2 * (C + S) // S
            sizes.append(MemorySizes(M, C, slot_positions=1, extra_operations=operations))
        return sizes

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        candidates = self.candidates(past, x, context)
        layer = context.layer
        with torch.no_grad():
            score = layer.compute(key_difference, layer, candidates.older, candidates.belongs)  # [n, B]
        chosen = candidates.chosen(score, self.c_mem_len)  # [C, B]
        return LayerMemory(candidates.mem, candidates.take(chosen)), None


def key_difference(layer: MemoryLayer, x: Tensor, belongs: Tensor) -> Tensor:
    """The score of the inputs ``x [n, B, D]`` of ``layer``, ``[n, B]``, from −1 to 1. The mean is of those
    that belong to the document, by ``belongs [n, B]``."""
    attention = layer.self_attn
    key = attention.by_head(attention.key(layer.attention_input(x)))  # [B, H, n, E]
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    visible = belongs.T[:, None, :, None]  # [B, 1, n, 1]
    # The sum has the direction of the mean.
    anchor = normalize(key, dim=3).where(visible, 0.0).sum(2, keepdim=True)  # [B, H, 1, E]
    return -cosine_similarity(anchor, key, dim=3).mean(1).T
