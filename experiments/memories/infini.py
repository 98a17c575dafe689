"""The memory of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): for each head a matrix that maps
keys to values, read beside the attention over the segment, and written with the delta rule.

    memformers train --model experiments/memories/infini.py:InfiniAttention

By head, with E features a position and σ = ELU + 1 (section 2 of the paper):

    A_mem = σ(Q) M / (σ(Q) z)                             retrieval
    M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z))                 update, with the delta rule
    z ← z + Σ σ(K)                                        the sum for normalization
    A = sigmoid(β) ⊙ A_mem + (1 − sigmoid(β)) ⊙ A_dot     β: a learned scalar

A_dot, attention over the segment, has relative positions as in all models of this package; Q and K of the
matrix have none. An empty memory gives A_mem = 0.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import elu

from memformers import (
    CustomMemory,
    MemorySizes,
    NetworkConfig,
    RelativeMultiHeadAttention,
    TransformerXLLayer,
)


class InfiniLayer(TransformerXLLayer):
    def __init__(self, **parts: Any):
        super().__init__(**parts)
        self.beta = nn.Parameter(torch.zeros(self.self_attn.heads))

    def attend(self, x: Tensor, past: list[Tensor], mask: Any, key_start: Tensor | None, *_: Any) -> Tensor:
        """A of ``x [S, B, D]``, projected, where ``past`` has the slots ``[E + 1, B, D]`` if there are any; a
        query whose ``key_start [B, S]`` is not 0 doesn't see them. No ``mask`` is used but the causal one."""
        attn, read = self.self_attn, self.attention_input(x)
        Q, K, V = (attn.by_head(project(read)) for project in (attn.query, attn.key, attn.value))
        first = None if key_start is None else (key_start - sum(map(len, past))).clamp(min=0)
        A = attn.attend_by_head(Q, K, V, key_start=first)
        share = self.beta.sigmoid()[:, None, None]
        A = (1 - share) * A  # [B, H, S, E]
        for slots in past:
            A_mem = retrieved(feature(Q), *matrix_of(slots, attn))
            if key_start is not None:
                A_mem = A_mem.where((key_start == 0)[:, None, :, None], 0.0)
            A = A + share * A_mem
        return attn.output(rearrange(A, "b h s e -> s b (h e)"))


class InfiniAttention(CustomMemory):
    """M and z of each layer, as E + 1 slots of D = H·E features: slot e < E is row e of all heads' matrices,
    and the last is z."""

    layer = InfiniLayer

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """E + 1 slots. What they hold has no end in the past; each counts as a position."""
        return [MemorySizes(0, config.d_model // config.heads + 1)] * config.n_layers

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> list[tuple[int, int]]:
        return [(config.segment_len, config.segment_len)] * config.n_layers

    @classmethod
    def more_operations(cls, config: NetworkConfig) -> int:
        """By layer, 2·D·E for the product of queries, keys or values with M, in the retrieval and twice in
        the update; 2·D for each of two products with z; and 4·D² for keys and values, once more."""
        D, E = config.d_model, config.d_model // config.heads
        return config.n_layers * (3 * 2 * D * E + 2 * 2 * D + 4 * D * D)

    def grow(self, layer: int, slots: Tensor, evicted: Tensor, belongs: Tensor) -> Tensor:
        """``slots [E + 1, B, D]`` after the update with the inputs ``evicted [n, B, D]``, of which
        some ``belongs [n, B]`` to the document."""
        attn, read = self.memory_layers[layer].self_attn, self.memory_layers[layer].attention_input(evicted)
        M, z = matrix_of(slots, attn)
        K = feature(attn.by_head(attn.key(read))) * belongs.T[:, None, :, None]  # [B, H, n, E]
        M = M + K.mT @ (attn.by_head(attn.value(read)) - retrieved(K, M, z))
        z = z + K.sum(2)
        return rearrange(torch.cat([M, z[:, :, None]], 2), "b h e f -> e b (h f)")


def feature(x: Tensor) -> Tensor:
    return elu(x) + 1


def matrix_of(slots: Tensor, attention: RelativeMultiHeadAttention) -> tuple[Tensor, Tensor]:
    """M ``[B, H, E, E]`` and z ``[B, H, E]`` of ``slots [E + 1, B, D]``."""
    by_head = rearrange(slots, "e b (h f) -> b h e f", h=attention.heads)
    return by_head[:, :, :-1], by_head[:, :, -1]


def retrieved(queries: Tensor, M: Tensor, z: Tensor) -> Tensor:
    """What the matrices hold for ``queries [B, H, n, E]``, to which σ was applied: the same shape."""
    norm = queries @ z[..., None]  # [B, H, n, 1]
    return queries @ M / norm.where(norm > 0, 1.0)
