"""Learned eviction: the older positions with the highest keep-score, which the language model's loss trains.
After Dynamic Memory Sparsification (Łańcucki et al. 2025, arXiv 2506.05345).

    memformers train --model experiments/memories/learned_eviction.py:LearnedEviction

A position j has the keep-score s_j = sigmoid(w·z_j + b), where z_j is what attention reads of it. By head,

    p_j = softmax_j(score_j + log s_j)                    s_j = 1 for the newest M and the segment

and the C older positions with the highest s stay, so what is to be forgotten is hardly seen before. As
attention A with the scores alone is a weighted mean of values v, this is

    A(s ⊙ v) / A(s)

The paper retrofits trained models, decides for each head when a key is made, and draws decisions in training.
Here a layer keeps the same positions for all its heads, since it remembers inputs, not keys; the model is
trained with the rule, and nothing is drawn. Kept positions don't expire. Needs ``--dropout 0``, the default.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, UpdateContext

FIRST_SCORE = 3.0
"""b at first: then s is 0.95, and attention nearly that of Transformer-XL."""


class EvictionLayer(MemoryLayer):
    def __init__(self, **parts: Any):
        super().__init__(**parts)
        self.keep = nn.Linear(self.d_model, 1)  # w and b
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with equal scores."""
        nn.init.zeros_(self.keep.weight)
        nn.init.constant_(self.keep.bias, FIRST_SCORE)

    def attend(
        self, x: Tensor, kv_input: Tensor, past: LayerMemory | None, mask: Any, key_start: Tensor | None
    ) -> Tensor:
        """Attention of ``x [S, B, D]`` to slots by their keep-scores, to positions, and to the segment."""
        if mask is not None:
            raise ValueError("learned eviction attends without a mask; give doc_starts instead.")
        past = LayerMemory.nothing(x) if past is None else past
        attention = self.self_attn
        z = self.attention_input(torch.cat((past.slots, past.mem, kv_input)))  # [K, B, D]
        q = attention.by_head(attention.query(self.attention_input(x)))  # [B, H, S, E]
        k = attention.by_head(attention.key(z))  # [B, H, K, E]
        v = attention.by_head(attention.value(z))
        # Without slots, all keep-scores are 1, and this is plain attention.
        if not past.n_slots:
            A = attention.attend_by_head(q, k, v, key_start=key_start)
        else:
            # A(s ⊙ v) / A(s), where s is 1 for all that isn't a slot.
            s = self.keep_score(z[: past.n_slots])  # [C, B]
            s = torch.cat((s, s.new_ones(len(z) - past.n_slots, x.shape[1])))  # [K, B]
            s = s.T[:, None, :, None].expand_as(v).to(v.dtype)
            weighted = attention.attend_by_head(q, k, s * v, key_start=key_start)
            A = weighted / attention.attend_by_head(q, k, s.contiguous(), key_start=key_start)
        return attention.output(rearrange(A, "b h s e -> s b (h e)"))

    def keep_score(self, z: Tensor) -> Tensor:
        """s ``[t, B]`` of ``z [t, B, D]``."""
        return self.keep(z).squeeze(2).sigmoid()

    def scores_of(self, x: Tensor) -> Tensor:
        """s ``[n, B]`` of the layer's inputs ``x [n, B, D]``."""
        return self.keep_score(self.attention_input(x))


class LearnedEviction(MemoryRule):
    """The newest ``mem_len`` inputs, and the ``c_mem_len`` older ones with the highest keep-scores."""

    layer = EvictionLayer

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """A kept position stands for itself alone. Keys are attended to twice, 6·D operations a key. Slots
        have a keep-score, 2·D, where they are read, and what may leave has one. Raises ValueError for
        dropout, which would drop different keys of the two."""
        if config.dropout:
            raise ValueError(f"learned eviction needs dropout=0, got dropout={config.dropout}.")
        D = config.d_model
        S = config.segment_len
        sizes = []
        for M, C in zip(config.per_layer("mem_len"), config.per_layer("c_mem_len"), strict=True):
            operations = 6 * D * (C + M + S) + 2 * D * (C + C + S) // S
            sizes.append(MemorySizes(M, C, slot_positions=1, extra_operations=operations))
        return sizes

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        candidates = self.candidates(past, x, context)
        layer = context.layer
        # Scores learn where they are read, not where positions are chosen.
        with torch.no_grad():
            score = layer.compute(EvictionLayer.scores_of, layer, candidates.older)  # [n, B]
        return LayerMemory(candidates.mem, candidates.take(candidates.chosen(score, self.c_mem_len))), None
