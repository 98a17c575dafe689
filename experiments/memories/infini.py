"""The memory of Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): for each head a matrix that maps
keys to values, read beside the attention over the segment, and written with the delta rule.

    memformers train --model experiments/memories/infini.py:InfiniAttention

By head, with E features a position and σ = ELU + 1 (section 2 of the paper):

    A_mem = σ(Q) M / (σ(Q) z)                             retrieval
    M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K) z))                 update, with the delta rule
    z ← z + Σ σ(K)                                        the sum for normalization
    A = sigmoid(β) ⊙ A_mem + (1 − sigmoid(β)) ⊙ A_dot     β: a learned scalar

A_dot, attention over the segment, has relative positions; Q and K of the matrix have none. An empty memory
gives A_mem = 0.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import elu

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, UpdateContext


class InfiniLayer(MemoryLayer):
    def __init__(self, **parts: Any):
        super().__init__(**parts)
        self.beta = nn.Parameter(torch.zeros(self.self_attn.n_heads))

    def attend(
        self, x: Tensor, kv_input: Tensor, past: LayerMemory | None, mask: Any, key_start: Tensor | None
    ) -> Tensor:
        """A of ``x [S, B, D]``, projected; a query whose ``key_start [B, S]`` is not 0 sees no slots."""
        if mask is not None:
            raise ValueError(
                "Infini-attention can't read its matrix through a mask; give doc_starts instead."
            )
        # Queries, keys and values of the segment, [B, H, S, E] each.
        attention = self.self_attn
        z = self.attention_input(x)
        Q = attention.by_head(attention.query(z))  # [B, H, S, E]
        K = attention.by_head(attention.key(z))
        V = attention.by_head(attention.value(z))
        # Attention over the segment alone, whose first key comes after the slots.
        n_slots = past.n_slots if past else 0
        first = None if key_start is None else (key_start - n_slots).clamp(min=0)
        share = self.beta.sigmoid()[:, None, None]
        A = (1 - share) * attention.attend_by_head(Q, K, V, key_start=first)  # [B, H, S, E]
        # Retrieval, for queries whose document began before the segment.
        if past is not None and n_slots:
            A_mem = retrieve(elu(Q) + 1, *matrix_of(past.slots, attention.n_heads))
            if key_start is not None:
                A_mem = A_mem.where((key_start == 0)[:, None, :, None], 0.0)
            A = A + share * A_mem
        return attention.output(rearrange(A, "b h s e -> s b (h e)"))


class InfiniAttention(MemoryRule):
    """M and z of a layer, as E + 1 slots of D = H·E features: slot e < E is row e of all heads' matrices,
    and the last is z."""

    layer = InfiniLayer

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """E + 1 slots, which are no keys. A token takes 2·D·E operations for each of three products with M,
        2·D for each of two with z, and 4·D² for keys and values, once more."""
        D = config.d_model
        E = D // config.n_heads
        operations = 3 * 2 * D * E + 2 * 2 * D + 4 * D * D
        return [MemorySizes(0, E + 1, n_keys=0, extra_operations=operations)] * config.n_layers

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        """The update with all inputs ``x [S, B, D]`` that belong to the document."""
        window = self.push(past, x, context)
        attention = context.layer.self_attn
        z = context.layer.attention_input(window.evicted)
        # The delta rule; positions of an earlier document have no key.
        M, norm = matrix_of(window.slots, attention.n_heads)
        K = elu(attention.by_head(attention.key(z))) + 1  # [B, H, S, E]
        K = K.where(window.belongs.T[:, None, :, None], 0.0)
        V = attention.by_head(attention.value(z))
        M = M + K.mT @ (V - retrieve(K, M, norm))
        norm = norm + K.sum(2)
        slots = rearrange(torch.cat([M, norm[:, :, None]], 2), "b h e f -> e b (h f)")
        return LayerMemory(window.mem, slots), None


def matrix_of(slots: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    """M ``[B, H, E, E]`` and z ``[B, H, E]`` of ``slots [E + 1, B, D]``."""
    by_head = rearrange(slots, "e b (h f) -> b h e f", h=n_heads)
    return by_head[:, :, :-1], by_head[:, :, -1]


def retrieve(queries: Tensor, M: Tensor, z: Tensor) -> Tensor:
    """What the matrices hold for ``queries [B, H, n, E]``, to which σ was applied: the same shape."""
    norm = queries @ z[..., None]  # [B, H, n, 1]
    return queries @ M / norm.where(norm > 0, 1.0)
