"""Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): each layer compresses its oldest memories."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments, check_value
from memformers.models.compression import build_compression, reconstruction_loss
from memformers.models.config import LENGTHS, CompressionLossName, NetworkConfig
from memformers.models.layers import MemoryLayer
from memformers.models.memory import LayerMemory, check_returned, cut
from memformers.models.rules.base import MemoryRule, UpdateContext
from memformers.models.sizes import Length, MemorySizes
from memformers.models.stack import MemoryStack


class CompressiveRule(MemoryRule):
    """Remember the newest M inputs of a layer, and C slots of older ones (section 3.1).

    Args:
        mem_len: M, in positions.
        c_mem_len: C, in slots.
        f_c: The compression function, from ``[n·c, B, D]`` to ``[n, B, D]``, with its ``compression_rate``.
        loss: What f_c learns from: attention reconstruction, or nothing ("none").
        bptt: How many compressions back f_c learns from the language model's loss.
        segment_len: S, how many positions a compression comes after; needed with ``bptt``.

    Examples:
        >>> import torch
        >>> from memformers import CompressiveRule, LayerMemory, MeanCompression, UpdateContext
        >>> rule = CompressiveRule(mem_len=16, c_mem_len=8, f_c=MeanCompression(4), loss="none")
        >>> x = torch.randn(32, 2, 64)  # [S, B, D]
        >>> context = UpdateContext(layer=None, x=x, n_valid=None)  # no layer: nothing is learned
        >>> memory, _ = rule.update(LayerMemory.nothing(x), x, context)
        >>> memory.mem_len, memory.n_slots
        (16, 4)
    """

    append_only = True
    f_c: nn.Module

    def __init__(
        self,
        mem_len: int,
        c_mem_len: int,
        f_c: nn.Module,
        *,
        loss: CompressionLossName = "attention",
        bptt: int = 0,
        segment_len: int = 1,
    ):
        rate: Any = getattr(f_c, "compression_rate", None)
        check_value("f_c.compression_rate", rate, Count)
        super().__init__(sizes_with_slots(mem_len, c_mem_len, rate, bptt, segment_len))
        self.f_c = f_c
        self.loss = loss
        self.bptt = bptt
        self.segment_len = segment_len
        learns = any(parameter.requires_grad for parameter in f_c.parameters())
        if loss == "none" and learns and not bptt:
            raise UserError(
                f"compression_loss='none' would not train {type(f_c).__name__}; use 'attention', bptt=1, or "
                f"an f_c without parameters."
            )

    @classmethod
    def sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """The newest ``mem_len`` positions, and ``c_mem_len`` slots of older ones."""
        by_layer = zip(*map(config.per_layer, LENGTHS), strict=True)
        return [sizes_with_slots(M, C, c, config.bptt, config.segment_len) for M, C, c in by_layer]

    @classmethod
    def build(cls, config: NetworkConfig) -> Sequence[MemoryRule]:
        """The rule of each layer, with its compression function."""
        f_c_of_rate = {c: build_compression(config, c) for c in {*config.per_layer("compression_rate")}}
        return [
            cls(
                size.mem_len, size.c_mem_len, copy.deepcopy(f_c_of_rate[size.compression_rate]),
                loss=config.compression_loss, bptt=config.bptt, segment_len=config.segment_len,
            )
            for size in config.memory_sizes
        ]  # fmt: skip

    def resize(self, config: NetworkConfig, size: MemorySizes) -> None:
        super().resize(config, size)
        self.segment_len = config.segment_len

    @property
    def rate(self) -> int:
        """c, positions per slot."""
        return cast(int, self.f_c.compression_rate)

    def update(
        self, past: LayerMemory, x: Tensor, context: UpdateContext
    ) -> tuple[LayerMemory, Tensor | None]:
        """Compress the oldest of ``past`` and ``x [S, B, D]`` into slots (algorithm 1); the loss is what f_c
        learns from, None if nothing was compressed."""
        # Positions overflow in groups of c; up to c − 1 wait for a whole slot.
        c = self.rate
        recent = (past.mem, x)
        n_recent = past.mem_len + len(x)
        n_slots = min(-(-max(n_recent - self.mem_len, 0) // c), n_recent // c)
        old = cut(recent, 0, n_slots * c).detach()  # [n·c, B, D]
        mem = cut(recent, n_slots * c)

        # Remembered without gradient; f_c learns from the loss below, which shares its output.
        new = make_slots(self.f_c, old, c)  # [n, B, D]
        slots = newest((past.slots, new.detach()), self.c_mem_len)
        bptt_inputs = None
        if self.bptt:
            kept = () if past.bptt_inputs is None else (past.bptt_inputs,)
            bptt_inputs = newest((*kept, old), self.size.bptt_len)
        remembered = LayerMemory(mem, slots, bptt_inputs=bptt_inputs)
        if not n_slots or self.loss == "none":
            return remembered, None

        # Slots of an earlier document don't count: no query sees them.
        n_masked = None
        if context.n_valid is not None:
            n_masked = n_masked_slots(context.n_valid, n_recent, len(x), n_slots, c)
        layer = context.layer
        return remembered, layer.compute(reconstruction_loss, layer, context.x, old, new, n_masked)

    def recall(self, past: LayerMemory) -> LayerMemory:
        """In training with ``bptt``, f_c computes its newest slots again from their inputs, so that the
        language model's loss reaches it (section 3.2.1, backpropagation through time)."""
        is_learning = self.training and torch.is_grad_enabled()
        if not is_learning or past.bptt_inputs is None or not len(past.bptt_inputs):
            return past
        new = self.recomputed_slots(past.bptt_inputs)
        old = past.slots[: past.n_slots - len(new)]
        return LayerMemory(past.mem, torch.cat((old, new)), past.shift_state, past.bptt_inputs)

    def recomputed_slots(self, bptt_inputs: Tensor) -> Tensor:
        """The newest m slots ``[m, B, D]``, from their inputs ``[m·c, B, D]``."""
        # Slots may depend on where a compression ends, so each segment's are computed separately, like the
        # first time. The oldest segment may be remembered only in part.
        c = self.rate
        n_slots = len(bptt_inputs) // c
        per_segment = slots_per_segment(self.segment_len, c)
        n_oldest = n_slots % per_segment
        lengths = [per_segment * c] * (n_slots // per_segment)
        if n_oldest:
            lengths.insert(0, n_oldest * c)
        return torch.cat([make_slots(self.f_c, inputs, c) for inputs in bptt_inputs.split(lengths)])


class CompressiveTransformer(MemoryStack):
    """Compressive Transformer (Rae et al. 2020, [arXiv 1911.05507](https://arxiv.org/abs/1911.05507)): layers
    over compressed memory, memory and segment, and in pre-norm a final norm. ``layer`` and ``mem_len`` are as
    in [`TransformerXL`][]; each layer remembers ``c_mem_len`` slots, too, and has a copy of the compression
    function ``f_c`` with fresh weights, or one of a list. Raises ValueError for ``compression_loss="none"``
    if f_c would learn nothing.

    Args:
        compression_loss: What each f_c learns from: [`AttentionReconstructionLoss`][] (attention), or nothing
            (none).

    Examples:
        >>> import torch
        >>> from memformers import CompressiveTransformer, Conv1dCompression, FeedForward, MemoryLayer
        >>> from memformers import RelativeMultiHeadAttention
        >>> layer = MemoryLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1)
        >>> f_c = Conv1dCompression(compression_rate=4, d_model=64)
        >>> stack = CompressiveTransformer(layer, n_layers=2, mem_len=16, c_mem_len=8, f_c=f_c)
        >>> memory = None
        >>> for _ in range(4):
        ...     output, memory, auxiliary_loss = stack(torch.randn(16, 2, 64), memory)  # [S, B, D]
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
        f_c: nn.Module | Sequence[nn.Module],
        compression_loss: CompressionLossName = "attention",
    ):
        if isinstance(f_c, nn.Module):
            f_c = [copy.deepcopy(f_c) for _ in range(n_layers)]
        rules = [CompressiveRule(mem_len, c_mem_len, one, loss=compression_loss) for one in f_c]
        super().__init__(layer, n_layers, rules)


def sizes_with_slots(mem_len: int, c_mem_len: int, rate: int, bptt: int, segment_len: int) -> MemorySizes:
    """M positions and C slots of c each, with the inputs of the slots that ``bptt`` compressions make."""
    n_bptt_slots = min(bptt * slots_per_segment(segment_len, rate), c_mem_len)
    return MemorySizes(mem_len, c_mem_len, rate, slot_positions=rate, bptt_len=n_bptt_slots * rate)


def make_slots(f_c: nn.Module, mem: Tensor, rate: int) -> Tensor:
    """The slots ``[n, B, D]`` that f_c makes of ``mem [n·c, B, D]``, in the dtype of ``mem`` under autocast
    too. Raises ValueError for slots of another shape."""
    if not len(mem):
        return mem
    slots = f_c(mem)
    check_returned(type(f_c), "forward", slots, (len(mem) // rate, *mem.shape[1:]))
    return slots.to(mem.dtype)


def newest(parts: Sequence[Tensor], length: int) -> Tensor:
    """The newest ``length`` of successive ``parts [·, B, D]``."""
    return cut(parts, sum(map(len, parts)) - length)


def slots_per_segment(segment_len: int, rate: int) -> int:
    """⌈S / c⌉, how many slots a compression makes after a whole segment."""
    return -(-segment_len // rate)


def n_masked_slots(n_valid: Tensor, n_recent: int, segment_len: int, n_slots: int, rate: int) -> Tensor:
    """How many of the oldest of ``n_slots`` new slots their loss ignores, int64 ``[B]``: those of positions
    before the document, which has the ``n_valid [B]`` newest of ``n_recent``; all if it starts within the
    segment, since some queries then belong to the document before it."""
    n_older = n_recent - n_valid  # [B]
    n_masked = (n_older + rate - 1).div(rate, rounding_mode="floor").clamp(0, n_slots)
    return n_masked.masked_fill(n_valid < segment_len, n_slots)
