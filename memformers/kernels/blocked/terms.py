"""The terms of a block's scores, and the probabilities computed from them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels.blocked.tiling import Block, blocks, unused


class Terms:
    """The terms of scores: u, v and s over √E, and a table of r and s with distances along its rows; in
    float32 for half precision: a score is an exponent, and 8 bits of it would be too few."""

    def __init__(
        self, query: Tensor, key: Tensor, r: Tensor, u: Tensor, v: Tensor | None, s: Tensor | None,
        key_start: Tensor | None, seed: Tensor | None, dropout_prob: float, poison: Tensor | None,
    ):  # fmt: skip
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.query, self.key, self.key_start, self.poison = query, key, key_start, poison
        self.u = u.to(self.dtype) * self.scale
        self.v = None if v is None else v.to(self.dtype) * self.scale
        (H, K, E), start = r.shape, unused(r.shape[1])
        self.table = self.u.new_zeros(H, E if s is None else E + 1, start + K)
        """r and, as the last of E + 1 rows, s by descending distance; longer distances have zeros."""
        self.table[:, :E, start:] = r.flip(1).mT
        if s is not None:
            self.table[:, E, start:] = s.to(self.dtype).flip(1) * self.scale
        largest = next(blocks(query, key))
        h, b, queries, _, w = largest.shape
        self.future = self.u.new_full((queries, queries), -math.inf).triu_(1)
        self.workspace = self.u.new_empty(h * b * queries * w)
        self.generator = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.dropped_below = int(dropout_prob * (1 << 31))
        self.scale_up = 1.0 / (1.0 - dropout_prob)

    def biased_queries(self, block: Block) -> tuple[Tensor, Tensor]:
        """(q + u) / √E as ``[n, s, E]`` and (q + v) / √E as ``[h, s·b, E]``, or with a 1 for s,
        ``[h, s·b, E + 1]``."""
        q = block.rows(self.query).permute(2, 0, 1, 3).to(self.dtype)  # [s, b, h, E]
        content = torch.add(self.u[block.heads], q, alpha=self.scale)
        position = q * self.scale if self.v is None else torch.add(self.v[block.heads], q, alpha=self.scale)
        content, position = content.flatten(1, 2).transpose(0, 1), position.flatten(0, 1).transpose(0, 1)
        if self.table.shape[1] > position.shape[2]:
            position = F.pad(position, (0, 1), value=1.0)
        return content.contiguous(), position.contiguous()

    def probabilities(self, block: Block, out: Tensor) -> Tensor:
        """The block's probabilities ``[n, s, k]``, written to ``out``; those to drop have a minus sign.
        With dropout, this must be called for the blocks in their order."""
        content, position = self.biased_queries(block)
        by_distance, by_key = block.split(self.workspace, block.shape[1])
        torch.bmm(position, self.table[block.heads, :, block.distances], out=by_distance)
        torch.bmm(content, block.columns(self.key).to(self.dtype), out=out)
        block.unpair(out).add_(by_key)
        if self.poison is not None:
            block.unpair(out).add_(self.poison[block.streams, block.heads, None, block.keys])
        self.hide(block, out)
        torch.softmax(out, dim=-1, out=out)
        if self.generator is not None:  # whole numbers from 0 to 2³¹ − 1 are the cheapest random ones
            numbers = torch.empty_like(out, dtype=torch.int32).random_(generator=self.generator)
            out.copysign_(numbers.sub_(self.dropped_below))
        return out

    def hide(self, block: Block, scores: Tensor, by: float = -math.inf) -> None:
        """Write ``by`` to the block's scores ``[n, s, k]`` of the keys that a query does not see."""
        _, _, s, k, _ = block.shape
        by_stream = block.unpair(scores)  # [b, h, s, k]
        hidden = [(by_stream[..., k - s :], self.future[:s, :s])]
        if self.key_start is not None:
            first = self.key_start[block.streams, block.queries] - block.keys.start  # [b, s]
            before = torch.arange(k) < first[:, None, :, None]
            hidden.append((by_stream, self.future.new_zeros(before.shape).masked_fill_(before, -math.inf)))
        for part, infinite in hidden:
            if self.poison is None:
                part.add_(infinite)  # seven times as fast as replacing, which NaN needs
            else:
                part.masked_fill_(infinite < 0, by)

    def not_dropped(self, probabilities: Tensor) -> Tensor:
        """The probabilities ``[n, s, k]`` with 0 for those that were dropped, not scaled up yet."""
        return probabilities if self.generator is None else probabilities.relu()
