"""TOVA (Oren et al. 2024, arXiv 2401.06104): the older positions to which the newest query attends most.

    memformers train --model experiments/memories/tova.py:TOVA

By layer, with the probabilities p_h of head h at the last position of a segment:

    score_j = (1 / H) Σ_h p_h(j)                          the C older positions with the highest stay

As in the paper, all heads of a layer keep the same positions, and kept ones don't expire. The paper drops one
position for each new token of a trained model, and may drop recent ones; here the model is trained with the
rule, which chooses once for each segment and leaves the newest M alone.
"""

import torch
from torch import Tensor

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, UpdateContext


class TOVA(MemoryRule):
    """The newest ``mem_len`` inputs, and the ``c_mem_len`` older ones that TOVA keeps."""

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """A kept position stands for itself alone. After each segment, the keys of C + M + S positions are
        projected once more, 2·D² operations each, and compared with its query, 4·D each."""
        D = config.d_model
        S = config.segment_len
        sizes = []
        for M, C in zip(config.per_layer("mem_len"), config.per_layer("c_mem_len"), strict=True):
            operations = (2 * D * D + 4 * D) * (C + M + S) // S
            sizes.append(MemorySizes(M, C, slot_positions=1, extra_operations=operations))
        return sizes

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        candidates = self.candidates(past, x, context)
        n = len(candidates.older)
        if not n:
            return LayerMemory(candidates.mem, past.slots), None
        layer = context.layer
        key_input = torch.cat((candidates.older, candidates.mem))  # [C + M + S, B, D]
        with torch.no_grad():
            p = layer.compute(attention_of_newest, layer, context.x[-1:], key_input, context.n_valid)
        # Attention is compared with the strongest, since it may be small to all.
        largest = p[:n].masked_fill(~candidates.belongs, 0.0).amax(0)  # [B]
        score = p[:n] / largest.clamp(min=torch.finfo(p.dtype).tiny)  # [n, B]
        return LayerMemory(candidates.mem, candidates.take(candidates.chosen(score, self.c_mem_len))), None


def attention_of_newest(layer: MemoryLayer, x: Tensor, key_input: Tensor, n_valid: Tensor | None) -> Tensor:
    """How much ``layer`` attends from the newest input ``x [1, B, D]`` to each of ``key_input [t, B, D]``, of
    which it sees the newest ``n_valid [B]``, on average over heads: ``[t, B]``."""
    key_start = None if n_valid is None else (len(key_input) - n_valid).clamp(min=0)[:, None]
    query = layer.attention_input(x)
    key = layer.attention_input(key_input)
    p = layer.self_attn.probabilities(query=query, key=key, key_start=key_start)  # [B, H, 1, t]
    return p.mean(1)[:, 0].T
