"""A memory of the newest positions, and of older ones that no newer one resembles."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.models.base import MemoryStack
from memformers.models.config import MemorySizes, NetworkConfig
from memformers.models.documents import valid_afterwards
from memformers.models.memory import Memory, cut
from memformers.models.registry import MODELS


class SelectiveTransformer(MemoryStack):
    """A Transformer-XL that also keeps C older positions unchanged, in place of slots: of those that leave
    the newest M, the C that are least like a newer one ([`least_like_newer`][]). When n positions leave, the
    oldest ⌈n / c⌉ kept ones expire. If segments are multiples of c, a layer therefore sees at most M + c·C
    positions back, as with slots; in segments of one token, a call each, the newest M + C stay (a ``Stepper``
    remembers whole segments). Nothing is learned. ``layer`` is as in [`TransformerXL`][].

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, MemorySizes, RelativeMultiHeadAttention
        >>> from memformers import SelectiveTransformer, TransformerXLLayer
        >>> layer = TransformerXLLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1, size=MemorySizes(16, 8, 4))
        >>> stack, memory = SelectiveTransformer(layer, n_layers=2), None
        >>> for _ in range(4):
        ...     output, memory, _ = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
        >>> memory.mem_len, memory.c_mem_len
        (16, 8)
    """

    only_appends = False
    whole_slots = False

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions, and ``c_mem_len`` older ones."""
        lengths = map(config.per_layer, ("mem_len", "c_mem_len", "compression_rate"))
        return [MemorySizes(M, C, c if C else 1) for M, C, c in zip(*lengths, strict=True)]

    def update(
        self, memory: Memory, inputs: Sequence[Tensor], shifted: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with ``shifted [S, B, D]`` and ``doc_starts [S, B]``; no loss."""
        mem, c_mem = [], []
        by_layer = zip(self.memory_layers, memory.lengths(len(self.layers)), shifted, strict=True)
        for i, (layer, (M, C), x) in enumerate(by_layer):
            size, kept = layer.size, memory.c_mem[i] if memory.c_mem else x[:0]
            newest = (*memory.mem[i : i + 1], x)
            n = max(M + len(x) - size.mem_len, 0)
            mem.append(cut(newest, n))
            if n and size.c_mem_len:
                leave = -(-n // size.compression_rate) - (size.c_mem_len - C)  # free places go first
                kept = kept[max(leave, 0) :]
                whole = torch.cat((kept, *newest)).detach()  # [C + M + S, B, D]
                C, t = len(kept), len(whole)
                belong = valid_afterwards(memory.valid, doc_starts, len(x), t - len(x), t)  # [B]
                with torch.no_grad():
                    key = layer.compute(layer.attention_input, whole)
                chosen = least_like_newer(key, C + n, size.c_mem_len, belong)
                kept = whole.gather(0, chosen[..., None].expand(-1, -1, x.shape[2]))
            c_mem.append(kept)
        return Memory(tuple(mem), tuple(c_mem) if any(map(len, c_mem)) else ()), inputs[0].new_zeros(())

    def visible_past_keys(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """As [`MemoryStack.visible_past_keys`][memformers.models.base.MemoryStack.visible_past_keys], int64
        ``[B]``, where a kept position counts as one."""
        return valid.clamp(0, mem_len + c_mem_len)


def least_like_newer(key: Tensor, n: int, n_kept: int, newest: Tensor | None) -> Tensor:
    """The indices ``[n_kept, B]``, in order, of those of the oldest n positions of ``key [t, B, D]`` that are
    least like a newer one: whose largest cosine with any newer one is smallest, after the mean of all is
    subtracted. Only the ``newest [B]`` are of the current document, all if it is None."""
    t, at = len(key), torch.arange(len(key), device=key.device)
    belongs = at >= (0 if newest is None else (t - newest)[:, None])  # [B, t] or [t]
    key = key.transpose(0, 1).to(torch.promote_types(key.dtype, torch.float32))  # [B, t, D]
    key = key if newest is None else key.where(belongs[..., None], 0.0)
    key = F.normalize(key - key.sum(1, keepdim=True) / belongs.sum(-1)[..., None, None], dim=2)
    is_newer = (at[:n, None] < at) & belongs[..., None, :]  # [B, n, t] or [n, t]
    with torch.autocast("cpu" if key.is_meta else key.device.type, enabled=False):
        likeness = (key[:, :n] @ key.mT).masked_fill(~is_newer, -2.0).amax(2)  # [B, n]
    likeness = likeness.masked_fill(~belongs[..., :n], 2.0)  # of earlier documents, the last to be chosen
    # Copies are equally like each other but for rounding: the newer one stays, whatever else is in the batch.
    # No two ranks are equal, so no stable sort is needed, which ONNX doesn't have. NaN is chosen last of all.
    rank = (10_000 * likeness.nan_to_num(nan=3.0)).round().long() * n + at[:n].flip(0)  # [B, n]
    return rank.topk(min(n_kept, n), largest=False).indices.sort().values.T


MODELS["selective"] = SelectiveTransformer
