"""A memory of the newest positions, and of older ones that no newer one resembles."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.fields import Count, check_arguments
from memformers.models.config import LENGTHS, NetworkConfig
from memformers.models.layers import MemoryLayer
from memformers.models.memory import LayerMemory
from memformers.models.rules.base import MemoryRule, UpdateContext, highest
from memformers.models.sizes import Length, MemorySizes, Rate
from memformers.models.stack import MemoryStack


class SelectiveRule(MemoryRule):
    """Remember the newest M inputs of a layer, and, in place of slots, C older ones unchanged: those that are
    least similar to any newer one ([`select_novel`][]). When n positions leave, the oldest ⌈n / c⌉ kept ones
    expire. If segments are multiples of c, a layer therefore sees at most M + c·C positions back, as with
    slots; in segments of one token, a call each, the newest M + C stay (a ``Stepper`` remembers whole
    segments). Nothing is learned.

    KeyDiff ([arXiv 2504.15364](https://arxiv.org/abs/2504.15364)) and R-KV ([arXiv
    2505.24133](https://arxiv.org/abs/2505.24133)) also keep what is least similar, to the mean key or to
    other keys, in the key caches of trained models. Here a model trains with its rule, the largest similarity
    to any *newer* position decides, no attention is used, and kept positions expire.

    Args:
        size: M and C, and as ``compression_rate`` how many positions leave for each kept one that expires.

    Examples:
        >>> from memformers import MemoryLM, MemorySizes, ModelConfig, SelectiveRule
        >>> rule = SelectiveRule(MemorySizes(mem_len=16, c_mem_len=8, compression_rate=4))
        >>> rule.mem_len, rule.c_mem_len, rule.expiry_rate
        (16, 8, 4)
    """

    def __init__(self, size: MemorySizes, settings: object = None):
        super().__init__(size)
        self.expiry_rate = size.compression_rate

    @classmethod
    def sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions, and ``c_mem_len`` older ones."""
        by_layer = zip(*map(config.per_layer, LENGTHS), strict=True)
        return [MemorySizes(M, C, c if C else 1, slot_positions=1) for M, C, c in by_layer]

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        """The newest M of ``past`` and ``x [S, B, D]``, and of all older ones the C most novel; no loss."""
        candidates = self.candidates(past, x, context, self.expiry_rate)
        if not self.c_mem_len or len(candidates.mem) == past.mem_len + len(x):
            return LayerMemory(candidates.mem, past.slots), None

        # Compare positions as attention reads them.
        everything = torch.cat((candidates.older, candidates.mem)).detach()  # [C + M + S, B, D]
        with torch.no_grad():
            key = context.layer.compute(context.layer.attention_input, everything)
        n = len(candidates.older)
        chosen = select_novel(key, n, self.c_mem_len, context.n_valid)  # [C, B]
        return LayerMemory(candidates.mem, candidates.take(chosen).detach()), None


class SelectiveTransformer(MemoryStack):
    """A Transformer-XL whose layers also keep ``c_mem_len`` older positions that no newer one resembles
    ([`SelectiveRule`][]). For every ``expiry_rate`` positions that leave, one expires. ``layer`` and
    ``mem_len`` are as in [`TransformerXL`][].

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, MemoryLayer, RelativeMultiHeadAttention
        >>> from memformers import SelectiveTransformer
        >>> layer = MemoryLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1)
        >>> stack = SelectiveTransformer(layer, n_layers=2, mem_len=16, c_mem_len=8)
        >>> memory = None
        >>> for _ in range(4):
        ...     output, memory, _ = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
        >>> memory.mem_len, memory.n_slots
        (16, 8)
    """

    @check_arguments
    def __init__(
        self,
        layer: MemoryLayer | Sequence[MemoryLayer],
        n_layers: Count,
        mem_len: Length,
        c_mem_len: Length,
        expiry_rate: Rate = 4,
    ):
        size = MemorySizes(mem_len, c_mem_len, expiry_rate, slot_positions=1)
        super().__init__(layer, n_layers, [SelectiveRule(size) for _ in range(n_layers)])


def select_novel(key: Tensor, n: int, n_kept: int, n_valid: Tensor | None) -> Tensor:
    """The indices ``[n_kept, B]``, in order, of the positions that are least similar to a newer one, among
    the oldest n of ``key [t, B, D]``: their largest cosine with any newer one is smallest, after the mean of
    all is subtracted. Only the newest ``n_valid [B]`` belong to the current document; None for all."""
    t = len(key)
    position = torch.arange(t, device=key.device)
    first = 0 if n_valid is None else (t - n_valid)[:, None]
    belongs = position >= first  # [B, t] or [t]

    # Cosines with the mean of the document subtracted.
    key = key.transpose(0, 1).to(torch.promote_types(key.dtype, torch.float32))  # [B, t, D]
    if n_valid is not None:
        key = key.where(belongs[..., None], 0.0)
    mean = key.sum(1, keepdim=True) / belongs.sum(-1)[..., None, None]
    key = F.normalize(key - mean, dim=2)
    is_newer = (position[:n, None] < position) & belongs[..., None, :]  # [B, n, t] or [n, t]
    with torch.autocast("cpu" if key.is_meta else key.device.type, enabled=False):
        similarity = (key[:, :n] @ key.mT).masked_fill(~is_newer, -2.0).amax(2)  # [B, n]
    similarity = similarity.masked_fill(~belongs[..., :n], 2.0)  # of earlier documents, the last to be chosen

    return highest(-similarity, n_kept)
