"""A compression that keeps the positions that are used most, and the attention that tells which they are."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.kernels.naive import attention_probabilities, causal_mask, from_key_start
from memformers.models.compression import check_rate, check_whole_slots
from memformers.models.layers import MemoryLayer

QUERIES = 64
"""How many queries are looked at together, so that a long segment never has S x K probabilities at once."""


class MostUsedCompression(nn.Module):
    """f_c that keeps what is used most (section 3.2): of every ``compression_rate`` positions, the one that
    received the most attention becomes the slot, the oldest of equals, ``[n·c, B, D]`` to ``[n, B, D]``.
    There is nothing in it to learn.

    The paper sorts all memories by their average attention and keeps the most-used. Here one of each c
    successive positions is kept: so a slot stands for c known positions, as in every other compression, slots
    stay in order of time, and none mixes two documents. The paper leaves open over which queries attention is
    averaged; here those of the newest segment count ([`attention_received`][], which says what it
    costs), so that nothing has to be remembered of older ones.

    Raises ValueError for a rate below 1, a length that is no multiple of it, or attention of another shape.
    """

    needs_attention = True

    def __init__(self, compression_rate: int):
        super().__init__()
        check_rate(compression_rate)
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor, received: Tensor | None = None) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, which ``received [n·c, B]`` attention, to ``[n, B, D]``."""
        check_whole_slots(mem, self.compression_rate)
        if received is None or received.shape != mem.shape[:2]:
            came = "none" if received is None else f"{list(received.shape)}"
            raise UserError(
                f"MostUsedCompression was expected to be given how much attention each position received, "
                f"{list(mem.shape[:2])}, but {came} came; compute it with attention_received, or give a loss "
                f"the slots that are made already."
            )
        positions = rearrange(mem, "(n c) b d -> n c b d", c=self.compression_rate)
        attention = rearrange(received, "(n c) b -> n c b", c=self.compression_rate)
        most_used = attention.argmax(1)[:, None, :, None].expand(-1, 1, -1, mem.shape[-1])  # [n, 1, B, D]
        return positions.gather(1, most_used).squeeze(1)


@torch.no_grad()
def attention_received(
    layer: MemoryLayer, context: Tensor, S: int, key_start: Tensor | None = None
) -> Tensor:
    """How much attention each position or slot of ``context [K, B, D]``, a ``layer``'s inputs, receives from
    the ``S`` last ones: the mean over heads and over the queries that may see it, ``[K, B]``; 0 where none
    may. ``key_start [B, S]`` is the first key that each query may see, None for all.

    No kernel tells its probabilities, so they are computed once more, by the definition and without a
    gradient: two projections of all K positions, and 4·S·K·D operations for scores, which is as much as a
    layer's forward pass spends on them. A model does so in the segments that compress, and only for an f_c
    that needs it.
    """
    attention, K = layer.self_attn, len(context)
    z = layer.attention_input(context)
    key, query = attention.by_head(attention.key(z)), attention.by_head(attention.query(z[K - S :]))
    terms = attention.distance_terms(K)
    total = seen = query.new_zeros((), dtype=torch.promote_types(context.dtype, torch.float32))
    for begin in range(0, S, QUERIES):
        end = min(begin + QUERIES, S)
        k = K - S + end  # the last of these queries sees no later key
        of_first = None if key_start is None else key_start[:, begin:end]
        nearer = {name: term[:, :k] if name in ("r", "s") else term for name, term in terms.items()}
        looks = attention_probabilities(query[:, :, begin:end], key[:, :, :k], **nearer, key_start=of_first)
        visible = causal_mask(end - begin, k, context.device)
        if of_first is not None:
            visible = visible & from_key_start(of_first, k)  # [B, 1, s, k]
        total = total + F.pad(looks.to(total.dtype).mean(1).sum(-2), (0, K - k))  # [B, K]
        seen = seen + F.pad(visible.sum(-2).to(total.dtype), (0, K - k)).view(-1, K)  # [B, K] or [1, K]
    return (total / seen.clamp(min=1)).T
