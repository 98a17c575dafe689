"""The layer that all models share: attention over memory and segment, then a feed-forward network."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.fields import Count, Probability, check_arguments
from memformers.common.text import UserError
from memformers.kernels import naive
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import NO_MEMORY, GateName, MemorySizes, Norm, check_gate
from memformers.models.fast_linear import linear
from memformers.models.fused_norm import attend_with_memory, can_fold
from memformers.models.hooks import is_unmodified

Attend = Callable[[Tensor], Tensor]
"""Attention of a layer's input ``[S, B, D]`` to memory and segment: ``[S, B, D]``."""


class FeedForward(nn.Module):
    """FFN(x) = W₂ · dropout(max(0, W₁x + b₁)) + b₂ for each position, with ``d_ff`` hidden features, of which
    ``dropout_prob`` are dropped (Vaswani et al. 2017, arXiv 1706.03762, section 3.3). Raises ValueError for
    an argument out of its range.

    Examples:
        >>> import torch
        >>> from memformers import FeedForward
        >>> FeedForward(d_model=64, d_ff=256)(torch.randn(16, 2, 64)).shape  # [S, B, D]
        torch.Size([16, 2, 64])
    """

    @check_arguments
    def __init__(self, d_model: Count, d_ff: Count, dropout_prob: Probability = 0.1):
        super().__init__()
        self.layer1 = nn.Linear(d_model, d_ff)
        self.layer2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, D]`` to ``[S, B, D]``."""
        # Flat, since what is changed in place must not be a view: autograd would copy its gradient twice.
        hidden = linear(self.layer1, x.flatten(0, -2))  # [S·B, d_ff]
        hidden = hidden.relu_() if is_unmodified(self.layer1, nn.Linear) else hidden.relu()
        hidden = self.dropout(hidden) if self.training else hidden
        return linear(self.layer2, hidden).view_as(x)


class GRUGate(nn.Module):
    """Joins the output ``y`` of a sublayer to its input ``x`` with a GRU-style gate at each position
    (Parisotto et al. 2019, arXiv 1910.06764, section 3.2), where ``y`` is the output after a ReLU:

        r = σ(W_r y + U_r x)
        z = σ(W_z y + U_z x − b_g)
        h = tanh(W_g y + U_g (r ⊙ x))
        g(x, y) = (1 − z) ⊙ x + z ⊙ h

    b_g starts at ``bias``. At 2, the paper's value, the gate starts almost closed and the layer close to the
    identity.

    Examples:
        >>> import torch
        >>> from memformers import GRUGate
        >>> x, y = torch.randn(16, 2, 64), torch.randn(16, 2, 64)  # [S, B, D]
        >>> GRUGate(d_model=64)(x, y).shape
        torch.Size([16, 2, 64])
    """

    @check_arguments
    def __init__(self, d_model: Count, bias: float = 2.0):
        super().__init__()
        self.bias = bias
        self.of_output = nn.Linear(d_model, 3 * d_model, bias=False)  # W_r, W_z and W_g
        self.of_input = nn.Linear(d_model, 2 * d_model, bias=False)  # U_r and U_z
        self.of_reset = nn.Linear(d_model, d_model, bias=False)  # U_g
        self.shut = nn.Parameter(torch.empty(d_model))  # b_g
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set b_g to ``bias``; the maps draw their weights themselves."""
        nn.init.constant_(self.shut, self.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``x`` and ``y``, ``[S, B, D]`` each, to ``[S, B, D]``."""
        to_r, to_z, to_h = self.of_output(y).chunk(3, dim=-1)  # [S, B, D] each
        from_r, from_z = self.of_input(x).chunk(2, dim=-1)
        r, z = torch.sigmoid(to_r + from_r), torch.sigmoid(to_z + from_z - self.shut)
        h = torch.tanh(to_h + self.of_reset(r * x))
        return x + z * (h - x)


class TokenShift(nn.Module):
    """What keys and values also see: x_j + w ⊙ x_{j−1}, with a learned w ``[D]`` (arXiv 2411.19574)."""

    def __init__(self, d_model: int):
        super().__init__()
        self.w = nn.Parameter(torch.empty(d_model))

    def reset_parameters(self) -> None:
        """Let w rise from −1 to 1, so that a shift is there from the first step."""
        with torch.no_grad():
            self.w.copy_(torch.linspace(-1, 1, len(self.w)))

    def forward(self, x: Tensor, before: Tensor | None, doc_starts: Tensor | None) -> Tensor:
        """``x [S, B, D]`` after the input ``before [1, B, D]``, None for none, to ``[S, B, D]``; where
        ``doc_starts [S, B]`` is true, nothing is added."""
        before = x.new_zeros(1, *x.shape[1:]) if before is None else before
        return naive.token_shift(torch.cat((before, x)), self.w, doc_starts)


class MemoryLayer(nn.Module):
    """The layer that all models share. Raises ValueError for an argument out of its range.

    In pre-norm, it normalizes what attention and the feed-forward network read: the segment, and memories,
    which are raw inputs; in post-norm, as in the original Transformer-XL, each sum.

    Args:
        d_model: The width D, also of ``self_attn`` and ``feed_forward``, any module that keeps ``[S, B, D]``.
        dropout_prob: Probability of dropping a feature of a sublayer's output while training.
        norm: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        gate: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        size: How much the layer remembers; nothing by default.
        token_shift: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
    """

    @check_arguments
    def __init__(
        self,
        *,
        d_model: Count,
        self_attn: RelativeMultiHeadAttention,
        feed_forward: nn.Module,
        dropout_prob: Probability,
        norm: Norm = "pre",
        gate: GateName = "residual",
        size: MemorySizes = NO_MEMORY,
        token_shift: bool = False,
    ):
        super().__init__()
        check_gate(gate, norm)
        if self_attn.d_model != d_model:
            raise UserError(f"d_model={d_model}, but self_attn was built for {self_attn.d_model}.")
        self.d_model, self.norm = d_model, norm
        self.size = replace(size, predecessors=1) if token_shift and size.keys else size
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn, self.norm_ff = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.gate_self_attn, self.gate_ff = (GRUGate(d_model) if gate == "gru" else None for _ in range(2))
        self.shift = TokenShift(d_model) if token_shift else None

    def forward(
        self,
        x: Tensor,
        mem: Tensor | None = None,
        c_mem: Tensor | None = None,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
        keys: Tensor | None = None,
        *,
        cached: Attend | None = None,
    ) -> Tensor:
        """``x [S, B, D]``, the layer's input, to its output ``[S, B, D]``.

        Args:
            mem: Memory ``[M, B, D]``; None for nothing.
            c_mem: Compressed memory ``[C, B, D]``; None for nothing.
            mask: Boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look; None for causal.
            key_start: int64 ``[B, S]``, the index of the first key that each query may see; None for all.
            keys: What keys and values of the segment are made of, ``[S, B, D]``; None for ``shifted(x, None,
                None)``, as if nothing came before ``x``.
            cached: Attention over cached keys and values, instead of memories and mask.
        """
        past = [memory for memory in (c_mem, mem) if memory is not None and len(memory)]
        y = cached(x) if cached else self.attend(x, past, mask, key_start, keys)  # [S, B, D]
        y = self.dropout(y) if self.training else y  # a call without effect would slow down each token
        if self.norm == "post":
            x = self.norm_self_attn(x + y)
            return self.norm_ff(x + self.dropout(self.feed_forward(x)))
        x = x + y if self.gate_self_attn is None else self.gate_self_attn(x, y.relu())
        y = self.feed_forward(self.norm_ff(x))
        y = self.dropout(y) if self.training else y
        return x + y if self.gate_ff is None else self.gate_ff(x, y.relu())

    def attend(
        self,
        x: Tensor,
        past: list[Tensor],
        mask: Tensor | None,
        key_start: Tensor | None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``x [S, B, D]`` to ``past``, ``[·, B, D]`` each in order of time, and to ``keys [S, B,
        D]``, as in ``forward``, all normalized first in pre-norm: ``[S, B, D]``."""
        if keys is None:
            keys = x if self.shift is None else self.shift(x, None, None)
        norm = None if self.norm == "post" else self.norm_self_attn
        if past and mask is None and can_fold(self.self_attn, norm):
            context = torch.cat(past) if len(past) > 1 else past[0]  # cat would copy a single one
            return attend_with_memory(self.self_attn, norm, x, keys, context, key_start)
        key = self.attention_input(torch.cat((*past, keys)))
        query = key[len(key) - len(x) :] if keys is x else self.attention_input(x)
        return self.self_attn(query=query, key=key, value=key, mask=mask, key_start=key_start)

    def shifted(self, x: Tensor, before: Tensor | None, doc_starts: Tensor | None) -> Tensor:
        """What keys and values of a segment ``x [S, B, D]`` are made of, and memory is: after a
        [`TokenShift`][], if there is one, else ``x`` itself."""
        return x if self.shift is None else self.compute(self.shift, x, before, doc_starts)

    def attention_input(self, x: Tensor) -> Tensor:
        """The layer's input or memory ``x [·, B, D]`` as attention reads it: ``[·, B, D]``."""
        return x if self.norm == "post" else self.norm_self_attn(x)

    def compute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """``function(*inputs)``, of any shape, which uses parts of this layer outside of its ``forward``. If
        the layer is sharded (FSDP2), its weights are gathered, as they are for ``forward``."""
        if hasattr(type(self), "unshard") and "_compute" not in vars(self):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self, "_compute")
        return self._compute(function, *inputs)

    def _compute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(*inputs)


class TransformerXLLayer(MemoryLayer):
    """A [`MemoryLayer`][] that attends over memory and segment (Dai et al. 2019, section 3.2).

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, RelativeMultiHeadAttention, TransformerXLLayer
        >>> attention, ffn = RelativeMultiHeadAttention(heads=4, d_model=64), FeedForward(64, 256)
        >>> layer = TransformerXLLayer(d_model=64, self_attn=attention, feed_forward=ffn, dropout_prob=0.1)
        >>> layer(x=torch.randn(16, 2, 64), mem=torch.randn(32, 2, 64)).shape  # [S, B, D], [M, B, D]
        torch.Size([16, 2, 64])
    """


class CompressiveTransformerLayer(MemoryLayer):
    """A [`MemoryLayer`][] over compressed memory, memory and segment, with an f_c, ``compress``, from ``[n·c,
    B, D]`` to ``[n, B, D]`` with the ``compression_rate`` c of ``size`` (Rae et al. 2020, section 3.1).

    Examples:
        >>> import torch
        >>> from memformers import CompressiveTransformerLayer, Conv1dCompression, FeedForward
        >>> from memformers import MemorySizes, RelativeMultiHeadAttention
        >>> layer = CompressiveTransformerLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1, compress=Conv1dCompression(4, d_model=64), size=MemorySizes(32, 8, 4))
        >>> layer(x=torch.randn(16, 2, 64), c_mem=layer.compress(torch.randn(32, 2, 64))).shape  # [S, B, D]
        torch.Size([16, 2, 64])
    """

    def __init__(
        self,
        *,
        d_model: int,
        self_attn: RelativeMultiHeadAttention,
        feed_forward: nn.Module,
        dropout_prob: float,
        compress: nn.Module,
        norm: Norm = "pre",
        gate: GateName = "residual",
        size: MemorySizes = NO_MEMORY,
        token_shift: bool = False,
    ):
        super().__init__(
            d_model=d_model, self_attn=self_attn, feed_forward=feed_forward, dropout_prob=dropout_prob,
            norm=norm, gate=gate, size=size, token_shift=token_shift,
        )  # fmt: skip
        self.compress = compress
