"""R-KV (Cai et al. 2025, arXiv 2505.24133): the older positions that are attended to and not redundant.

    memformers train --model experiments/memories/rkv.py:RKV

By head, for the n positions to choose among, those kept so far and those that leave the newest M, with the
keys k and the probabilities p_i of the newest 8 queries, among these n alone:

    I_j = max of (1 / 8) Σ_i p_i over 7 neighbors of j    importance
    R = softmax(r), r_j = (1 / n) Σ_{i≠j} cos(k_i, k_j)   redundancy
    score = λ I − (1 − λ) R                               the C positions with the highest stay

Each i leaves out of r the newest j that is like it, cos > 0.5, so the newest of several copies is not
redundant. The paper keeps other positions for each head of a trained model's cache. Here a layer keeps the
same positions for all its heads, those with the highest mean score, since it remembers inputs, not keys; and
the model is trained with the rule. As in the paper, kept positions don't expire.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, Range, UpdateContext

N_QUERIES = 8
"""How many of the newest queries say what is important."""
NEIGHBORS = 7
"""Among how many positions attention is pooled."""
ALIKE = 0.5
"""Above which cosine two keys are alike."""


@dataclass(frozen=True)
class Settings:
    importance_share: Annotated[float, Range(0, 1)] = 0.1
    """λ, the share of importance in the score; the rest is that of redundancy."""


class RKV(MemoryRule):
    """The newest ``mem_len`` inputs, and the ``c_mem_len`` older ones that R-KV keeps."""

    Config = Settings

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """A kept position stands for itself alone. After each segment, the keys of C + M + S positions are
        projected once more, 2·D² operations each, and compared with 8 queries, 4·D each; then the n = C + S
        to choose among are, and compared with each other, 2·D each."""
        D = config.d_model
        S = config.segment_len
        sizes = []
        for M, C in zip(config.per_layer("mem_len"), config.per_layer("c_mem_len"), strict=True):
            n = C + S
            importance = (2 * D * D + 4 * D * N_QUERIES) * (M + n)
            redundancy = (2 * D * D + 2 * D * n) * n
            operations = (importance + redundancy) // S
            sizes.append(MemorySizes(M, C, slot_positions=1, extra_operations=operations))
        return sizes

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        candidates = self.candidates(past, x, context)
        older = candidates.older
        belongs = candidates.belongs
        if not len(older):
            return LayerMemory(candidates.mem, past.slots), None
        layer = context.layer
        queries = context.x[-N_QUERIES:]
        key_input = torch.cat((older, candidates.mem))  # [C + M + S, B, D]
        with torch.no_grad():
            importance = layer.compute(
                pooled_attention, layer, queries, key_input, belongs, context.n_valid
            )  # [B, H, n]
            redundancy = layer.compute(mean_similarity, layer, older, belongs)  # [B, H, n]
        share = self.settings.importance_share
        score = (share * importance - (1 - share) * redundancy).mean(1).T  # [n, B]
        # Scores of many positions are small, so they are compared with the largest.
        largest = score.masked_fill(~belongs, 0.0).abs().amax(0)
        score = score / largest.clamp(min=torch.finfo(score.dtype).tiny)
        return LayerMemory(candidates.mem, candidates.take(candidates.chosen(score, self.c_mem_len))), None


def pooled_attention(
    layer: MemoryLayer, x: Tensor, key_input: Tensor, belongs: Tensor, n_valid: Tensor | None
) -> Tensor:
    """I ``[B, H, n]`` of the oldest n of ``key_input [t, B, D]``, for the newest inputs ``x`` of ``layer``,
    which see the newest ``n_valid [B]``. Those that ``belongs [n, B]`` leaves out have 0."""
    t = len(key_input)
    key_start = None
    if n_valid is not None:  # [B, 8]; a query sees at least its own key
        key_start = (t - n_valid[:, None]).clamp(min=0).minimum(torch.arange(t - len(x), t, device=x.device))
    query = layer.attention_input(x)
    key = layer.attention_input(key_input)
    p = layer.self_attn.probabilities(query=query, key=key, key_start=key_start)  # [B, H, 8, t]
    p = p[..., : len(belongs)].where(belongs.T[:, None, None], 0.0)
    # Among the n positions alone, probabilities add up to 1.
    p = p / p.sum(3, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return max_pool1d(p.mean(2), NEIGHBORS, stride=1, padding=NEIGHBORS // 2)


def mean_similarity(layer: MemoryLayer, x: Tensor, belongs: Tensor) -> Tensor:
    """R ``[B, H, n]`` of the inputs ``x [n, B, D]`` of ``layer`` that ``belongs [n, B]`` has; 0 of others."""
    attention = layer.self_attn
    key = attention.by_head(attention.key(layer.attention_input(x)))  # [B, H, n, E]
    key = normalize(key.to(torch.promote_types(key.dtype, torch.float32)), dim=3)
    cosine = key @ key.mT  # [B, H, n, n]
    # Pairs of two positions of the document.
    j = torch.arange(len(x), device=x.device)
    is_member = belongs.T[:, None]  # [B, 1, n]
    is_pair = is_member[..., None] & is_member[..., None, :] & (j != j[:, None])
    # Each leaves out the newest one that is like it.
    is_alike = is_pair & (cosine > ALIKE)
    newest = j.where(is_alike, -1).amax(3, keepdim=True)  # [B, H, n, 1]
    cosine = cosine.where(is_pair & (j != newest), 0.0)
    mean = cosine.sum(2) / is_member.sum(2, keepdim=True)
    return mean.masked_fill(~is_member, -torch.inf).softmax(2)
