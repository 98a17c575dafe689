"""The layer that all models share: attention over memory and segment, then a feed-forward network."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, Probability, check_arguments
from memformers.models.attention import Reads, RelativeMultiHeadAttention
from memformers.models.config import GateName, Norm, check_gate
from memformers.models.linear import is_plain, linear
from memformers.models.parts import build_part, output_of

Attend = Callable[[Tensor], Tensor]
"""Attention of a layer's input ``[S, B, D]`` over whatever is remembered: ``[S, B, D]``."""


class FeedForward(nn.Module):
    """FFN(x) = W₂ · dropout(max(0, W₁x + b₁)) + b₂, position by position, with ``d_ff`` hidden features, of
    which ``dropout_prob`` are dropped (Vaswani et al. 2017, arXiv 1706.03762, section 3.3). Raises ValueError
    for an argument out of its range.

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
        hidden = hidden.relu_() if is_plain(self.layer1, nn.Linear) else hidden.relu()
        hidden = self.dropout(hidden) if self.training else hidden
        return linear(self.layer2, hidden).view_as(x)


class GRUGate(nn.Module):
    """What joins the output ``y`` of a sublayer to its input ``x``, as a GRU joins its input to its state,
    position by position (Parisotto et al. 2019, arXiv 1910.06764, section 3.2):

        r = σ(W_r y + U_r x)
        z = σ(W_z y + U_z x − b_g)
        h = tanh(W_g y + U_g (r ⊙ x))
        g(x, y) = (1 − z) ⊙ x + z ⊙ h

    ``bias`` is the first b_g. With 2, the paper's, the gate is nearly shut, so a layer is near the identity.

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
        """Let b_g be ``bias``; the maps draw their weights themselves."""
        nn.init.constant_(self.shut, self.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``x`` and ``y``, ``[S, B, D]`` each, to ``[S, B, D]``."""
        to_r, to_z, to_h = self.of_output(y).chunk(3, dim=-1)  # [S, B, D] each
        from_r, from_z = self.of_input(x).chunk(2, dim=-1)
        r, z = torch.sigmoid(to_r + from_r), torch.sigmoid(to_z + from_z - self.shut)
        h = torch.tanh(to_h + self.of_reset(r * x))
        return x + z * (h - x)


class MemoryLayer(nn.Module):
    """The layer that all models share. Raises ValueError for an argument out of its range.

    In pre-norm, it normalizes what attention and the feed-forward network read: the segment, and memories,
    which are raw inputs; in post-norm, as in the original Transformer-XL, each sum. A layer that combines the
    parts in another way overrides [`transform`][], which training and generation both use.

    Args:
        d_model: The width D, also of ``self_attn`` and ``feed_forward``, any module that keeps ``[S, B, D]``.
        dropout_prob: Probability of dropping a feature of a sublayer's output while training.
        norm: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        gate: Likewise.
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
        gate: GateName | str = "residual",
    ):
        super().__init__()
        check_gate(gate, norm)
        if self_attn.d_model != d_model:
            raise UserError(f"d_model={d_model}, but self_attn was built for {self_attn.d_model}.")
        self.d_model, self.norm = d_model, norm
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn, self.norm_ff = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.gate_self_attn, self.gate_ff = (build_gate(gate, d_model) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        mem: Tensor | None = None,
        c_mem: Tensor | None = None,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
        reads: Reads = None,
        *,
        cached: Attend | None = None,
    ) -> Tensor:
        """``x [S, B, D]``, the layer's input, to ``[S, B, D]``, after looking at what is remembered.

        Args:
            mem: Memory ``[M, B, D]``; None for nothing.
            c_mem: Compressed memory ``[C, B, D]``, likewise.
            mask: Boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look; None for causal.
            key_start: int64 ``[B, S]``, the index of the first key that each query may see; None for all.
            reads: How many of the newest keys before the segment each head reads, or how heads divide them;
                None for all.
            cached: Attention over keys and values that are kept already, in place of memories and mask.
        """
        past = [memory for memory in (c_mem, mem) if memory is not None and len(memory)]
        # Attention of one's own needs no lengths by head to be used without them.
        more: dict[str, Any] = {} if reads is None else {"reads": reads}
        attend = partial(self.attend, past=past, mask=mask, key_start=key_start, **more)
        return self.transform(x, cached or attend)

    def transform(self, x: Tensor, attend: Attend) -> Tensor:
        """``x [S, B, D]`` to ``[S, B, D]``: ``attend``, then the feed-forward network, both joined to x."""
        # Eval mode has no dropout, and calling a module without effect would slow down each token.
        dropout: Attend = self.dropout if self.training else lambda output: output
        if self.norm == "post":
            x = self.norm_self_attn(x + dropout(attend(x)))
            return self.norm_ff(x + dropout(self.feed_forward(x)))
        if self.gate_self_attn is not None and self.gate_ff is not None:
            x = joined(self.gate_self_attn, x, dropout(attend(x)))
            return joined(self.gate_ff, x, dropout(self.feed_forward(self.norm_ff(x))))
        x = x + dropout(attend(x))
        return x + dropout(self.feed_forward(self.norm_ff(x)))

    def attend(
        self,
        x: Tensor,
        past: list[Tensor],
        mask: Tensor | None,
        key_start: Tensor | None,
        reads: Reads = None,
    ) -> Tensor:
        """Attention of ``x [S, B, D]``, normalized first in pre-norm, over ``past``, ``[·, B, D]`` each in
        order of time and normalized alike, and itself: ``[S, B, D]``."""
        bounds: dict[str, Any] = {"mask": mask, "key_start": key_start}
        bounds |= {} if reads is None else {"reads": reads}
        if past and self.self_attn.can_fold(self.norm_before_attention):
            norm = self.norm_before_attention
            context = torch.cat(past) if len(past) > 1 else past[0]  # cat would copy a single one
            return self.self_attn.forward_with_memory(x, context, norm, **bounds)
        z = self.attention_input(torch.cat((*past, x)) if past else x)  # [K, B, D]
        return self.self_attn(query=z[len(z) - len(x) :], key=z, value=z, **bounds)

    def attention_input(self, x: Tensor) -> Tensor:
        """The layer's input or memory ``x [·, B, D]`` as attention reads it: ``[·, B, D]``."""
        return x if self.norm == "post" else self.norm_self_attn(x)

    @property
    def norm_before_attention(self) -> nn.LayerNorm | None:
        """The norm between the layer's input and attention; post-norm has none."""
        return None if self.norm == "post" else self.norm_self_attn


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
    """A [`MemoryLayer`][] of these ``parts`` over compressed memory, memory and segment, with its own f_c,
    ``compress``, from ``[n·c, B, D]`` to ``[n, B, D]`` (Rae et al. 2020, section 3.1).

    Examples:
        >>> import torch
        >>> from memformers import CompressiveTransformerLayer, Conv1dCompression
        >>> from memformers import FeedForward, RelativeMultiHeadAttention
        >>> parts = {"self_attn": RelativeMultiHeadAttention(4, 64), "feed_forward": FeedForward(64, 256)}
        >>> f_c = Conv1dCompression(4, d_model=64)
        >>> layer = CompressiveTransformerLayer(d_model=64, **parts, dropout_prob=0.1, compress=f_c)
        >>> layer(x=torch.randn(16, 2, 64), c_mem=layer.compress(torch.randn(32, 2, 64))).shape  # [S, B, D]
        torch.Size([16, 2, 64])
    """

    def __init__(self, *, compress: nn.Module, **parts: Any):
        super().__init__(**parts)
        self.compress = compress


def build_gate(gate: GateName | str, d_model: int) -> nn.Module | None:
    """What joins a sublayer's output to its input; None for their sum."""
    if ":" in gate:
        return build_part("gate", gate, d_model)
    return GRUGate(d_model) if gate == "gru" else None


def joined(gate: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A sublayer's output ``y [S, B, D]`` and its input ``x``, joined by ``gate``: the same shape."""
    return gate(x, y.relu()) if isinstance(gate, GRUGate) else output_of(gate, x.shape, x, y)
