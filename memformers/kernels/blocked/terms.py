"""What the scores of a block are made from, and the probabilities that they become."""

import math

import torch
from torch import Tensor

from memformers.kernels.blocked.tiling import Block, blocks, largest_block


class Terms:
    """What scores are made from, scaled, with the distances in descending order K, K−1 … 0.

    All in float32 where the inputs are in half precision: a score is an exponent, and rounding it
    to 8 bits would cost more digits than everything else.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        r: Tensor,
        u: Tensor,
        v: Tensor | None,
        s: Tensor | None,
        seed: Tensor | None,
        dropout_prob: float,
    ):
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self.dtype = exact(query)
        self.query, self.key = query, key
        self.u = u.to(self.dtype) * self.scale
        self.v = None if v is None else v.to(self.dtype) * self.scale
        self.r = descending(r.to(self.dtype))  # [H, K + 1, E]
        self.s = None if s is None else descending(s.to(self.dtype) * self.scale)  # [H, K + 1]
        _, _, queries, _ = next(blocks(query, key)).shape  # the first is the largest
        numbers = largest_block(query, key)
        self.future = self.r.new_full((queries, queries), -math.inf).triu_(1)
        self.workspace = self.r.new_empty(numbers)
        self.generator = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.dropped_below = int(dropout_prob * (1 << 31))
        self.scale_up = 1.0 / (1.0 - dropout_prob)

    def biased_queries(self, block: Block) -> tuple[Tensor, Tensor]:
        """(q + u) / √E as ``[n, s, E]`` and (q + v) / √E as ``[h, s·b, E]``."""
        q = block.of(self.query, block.queries).permute(2, 0, 1, 3).to(self.dtype)  # [s, b, h, E]
        content = torch.add(self.u[block.heads], q, alpha=self.scale)
        position = q * self.scale if self.v is None else torch.add(self.v[block.heads], q, alpha=self.scale)
        content, position = content.flatten(1, 2).transpose(0, 1), position.flatten(0, 1).transpose(0, 1)
        return content.contiguous(), position.contiguous()

    def probabilities(self, block: Block, out: Tensor) -> Tensor:
        """The block's probabilities ``[n, s, k]``, those to drop with a minus sign, written to ``out``.
        With dropout, blocks must be asked for in their order."""
        content, position = self.biased_queries(block)
        by_distance, by_key = block.split(self.workspace)
        r = self.r[block.heads, block.distances].transpose(1, 2)
        if self.s is None:
            torch.bmm(position, r, out=by_distance)
        else:
            torch.baddbmm(self.s[block.heads, None, block.distances], position, r, out=by_distance)
        _, _, s, k = block.shape
        end = by_distance.numel()
        self.workspace[end : end + s] = 0.0  # read as future, and −∞ + NaN would stay NaN
        keys = block.pairs(self.key, block.keys).to(self.dtype)
        torch.bmm(content, keys.transpose(1, 2), out=out)
        block.unpair(out).add_(by_key)
        out[:, :, k - s :].add_(self.future[:s, :s])
        torch.softmax(out, dim=-1, out=out)
        if self.generator is not None:  # whole numbers from 0 to 2³¹ − 1 are the cheapest random ones
            numbers = torch.empty_like(out, dtype=torch.int32).random_(generator=self.generator)
            out.copysign_(numbers.sub_(self.dropped_below))
        return out

    def not_dropped(self, probabilities: Tensor) -> Tensor:
        """The probabilities ``[n, s, k]`` with 0 for those that were dropped, not scaled up yet."""
        return probabilities if self.generator is None else probabilities.relu()


def exact(x: Tensor) -> torch.dtype:
    """The dtype of scores, probabilities and sums over many blocks for inputs like ``x``, of any shape:
    float32 for half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def descending(table: Tensor) -> Tensor:
    """A table by distance 0 … K−1, ``[H, K, …]``, as one by descending distance, with a row of zeros for K:
    ``[H, K + 1, …]``."""
    return torch.cat((torch.zeros_like(table[:, :1]), table.flip(1)), dim=1)


def ascending(gradient: Tensor, like: Tensor) -> Tensor:
    """A table by descending distance K … 0, ``[H, K + 1, …]``, as one by distance 0 … K−1, ``[H, K, …]``, in
    the dtype of ``like``."""
    return gradient[:, 1:].flip(1).to(like.dtype)
