"""Of the positions that leave the newest M, those stay for a while that are least like a newer one.

    memformers train --model experiments/memories/selective.py:Selective --mem-len 128 --c-mem-len 128

A position is as like a newer one as the largest cosine between it and any newer one that is remembered, of
what keys are made of, less the mean of all. For every c positions that leave the newest M, the oldest kept
one goes, so that the memory reaches M + c·C positions back, as with slots. What was dropped doesn't come
back. There is nothing to learn.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers import CustomMemory, MemorySizes
from memformers.models.config import NetworkConfig
from memformers.models.memory import Memory, cut, valid_afterwards


class Selective(CustomMemory):
    """The newest ``mem_len`` positions, and ``c_mem_len`` older ones, in order of time, in place of slots."""

    uses = ("mem_len", "c_mem_len", "compression_rate", "memory_warmup")
    keeps_keys = True

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        lengths = map(config.per_layer, ("mem_len", "c_mem_len", "compression_rate"))
        return [MemorySizes(M, C, c if C else 1) for M, C, c in zip(*lengths, strict=True)]

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with ``inputs [S, B, D]`` and ``doc_starts [S, B]``; no loss."""
        mem, c_mem = [], []
        sizes = zip(self.memory_layers, memory.lengths(len(self.layers)), inputs, strict=True)
        for i, (layer, (M, C), x) in enumerate(sizes):
            past, size = [memory.c_mem[i] if memory.c_mem else x[:0], *memory.mem[i : i + 1]], layer.size
            n = max(M + len(x) - size.mem_len, 0)
            mem.append(cut((*past[1:], x), n))
            kept = past[0]
            if n and size.c_mem_len:
                expired = min(max(-(-n // size.compression_rate) - (size.c_mem_len - C), 0), C)
                whole = torch.cat((kept[expired:], *past[1:], x)).detach()  # [C + M + S, B, D]
                C -= expired
                newest = valid_afterwards(memory.valid, doc_starts, len(x), C + M, C + M + len(x))  # [B]
                with torch.no_grad():
                    key = layer.attention_input(whole)
                chosen = least_like_newer(key, C + n, size.c_mem_len, newest)
                kept = whole.gather(0, chosen[..., None].expand(-1, -1, x.shape[2]))
            c_mem.append(kept)
        return Memory(tuple(mem), tuple(c_mem) if any(map(len, c_mem)) else ()), inputs[0].new_zeros(())

    def visible_past_keys(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many keys belong to the running document of ``valid [B]``: a kept position is one of them."""
        return valid.clamp(0, mem_len + c_mem_len)


def least_like_newer(key: Tensor, n: int, n_kept: int, newest: Tensor | None) -> Tensor:
    """The indices ``[n_kept, B]``, in order, of those of the oldest n positions of ``key [t, B, D]`` that are
    least like a newer one. Only the ``newest [B]`` are of the running document, all if it is None."""
    t, at = len(key), torch.arange(len(key), device=key.device)
    belongs = at >= (0 if newest is None else (t - newest)[:, None])  # [B, t] or [t]
    key = key.transpose(0, 1).to(torch.promote_types(key.dtype, torch.float32))  # [B, t, D]
    key = key if newest is None else key.where(belongs[..., None], 0.0)
    key = F.normalize(key - key.sum(1, keepdim=True) / belongs.sum(-1)[..., None, None], dim=2)
    is_newer = (at[:n, None] < at) & belongs[..., None, :]  # [B, n, t] or [n, t]
    likeness = (key[:, :n] @ key.mT).masked_fill(~is_newer, -2.0).amax(2)  # [B, n]
    likeness = likeness.masked_fill(~belongs[..., :n], 2.0)  # of earlier documents, the last to be chosen
    # Copies are equally like each other but for rounding: the newer one stays, whatever else is in the batch.
    order = likeness.round(decimals=4).flip(1).sort(stable=True).indices[:, :n_kept]
    return (n - 1 - order).sort().values.T
