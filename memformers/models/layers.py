"""The layer that all models share: attention over memory and segment, then a feed-forward network."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, Probability, check_arguments
from memformers.kernels import naive
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import GateName, Norm, check_gate
from memformers.models.fast_linear import linear
from memformers.models.fused_norm import attend_with_memory, can_fold
from memformers.models.hooks import is_unmodified
from memformers.models.memory import LayerMemory

if TYPE_CHECKING:
    from memformers.common.types import typed_like


class AttentionCache(Protocol):
    """Cached keys and values of a layer's past, and its modules as functions."""

    def attend(self, x: Tensor, kv_input: Tensor, key_start: Tensor | None) -> Tensor:
        """Append the keys of ``kv_input [t, B, D]``; attend from ``x [t, B, D]`` to all: ``[t, B, D]``."""
        ...

    def feed_forward(self, x: Tensor) -> Tensor:
        """FFN(norm(x)) of ``x [t, B, D]``, in pre-norm: ``[t, B, D]``."""
        ...


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
        # W₁x + b₁, and the ReLU in place where nothing else sees its input. Flat: a tensor changed in place
        # must not be a view, or autograd would copy its gradient twice.
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
        >>> x = torch.randn(16, 2, 64)  # [S, B, D]
        >>> y = torch.randn(16, 2, 64)
        >>> GRUGate(d_model=64)(x, y).shape
        torch.Size([16, 2, 64])
    """

    @check_arguments
    def __init__(self, d_model: Count, bias: float = 2.0):
        super().__init__()
        self.bias = bias
        self.W = nn.Linear(d_model, 3 * d_model, bias=False)  # W_r, W_z and W_g
        self.U = nn.Linear(d_model, 2 * d_model, bias=False)  # U_r and U_z
        self.U_g = nn.Linear(d_model, d_model, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(d_model))  # b_g
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set b_g to ``bias``; the maps draw their weights themselves."""
        nn.init.constant_(self.gate_bias, self.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``x`` and ``y``, ``[S, B, D]`` each, to ``[S, B, D]``."""
        # The products with y and with x, each as one matrix.
        W_r_y, W_z_y, W_g_y = self.W(y).chunk(3, dim=-1)  # [S, B, D] each
        U_r_x, U_z_x = self.U(x).chunk(2, dim=-1)
        # Reset gate, update gate, candidate (equations 2 to 4 of the paper).
        r = torch.sigmoid(W_r_y + U_r_x)
        z = torch.sigmoid(W_z_y + U_z_x - self.gate_bias)
        h = torch.tanh(W_g_y + self.U_g(r * x))
        # (1 − z) ⊙ x + z ⊙ h
        return x + z * (h - x)


class TokenShift(nn.Module):
    """Token shift: keys and values are projected from x_j + w ⊙ x_{j−1}, with a learned w ``[D]`` (arXiv
    2411.19574)."""

    def __init__(self, d_model: int):
        super().__init__()
        self.w = nn.Parameter(torch.empty(d_model))

    def reset_parameters(self) -> None:
        """Initialize w linearly from −1 to 1, so the shift is active from step 0."""
        with torch.no_grad():
            self.w.copy_(torch.linspace(-1, 1, len(self.w)))

    def forward(self, x: Tensor, shift_state: Tensor | None, doc_starts: Tensor | None) -> Tensor:
        """``x [S, B, D]`` after the input ``shift_state [1, B, D]``, None for none, to ``[S, B, D]``; where
        ``doc_starts [S, B]`` is true, nothing is added."""
        if shift_state is None:
            shift_state = x.new_zeros(1, *x.shape[1:])
        return naive.token_shift(torch.cat((shift_state, x)), self.w, doc_starts)


class MemoryLayer(nn.Module):
    """The layer that all models share. Raises ValueError for an argument out of its range.

    Pre-norm normalizes the inputs of attention and the feed-forward network: the segment, and the memories,
    which are raw inputs. Post-norm, as in the original Transformer-XL, normalizes each sum.

    Args:
        d_model: The width D, also of ``self_attn`` and ``feed_forward``, any module that keeps ``[S, B, D]``.
        dropout_prob: Probability of dropping a feature of a sublayer's output while training.
        norm: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        gate: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        token_shift: As in [`NetworkConfig`][memformers.models.config.NetworkConfig].
        window: How many of the newest keys a query sees, its own included; None for all.

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, LayerMemory, MemoryLayer, RelativeMultiHeadAttention
        >>> attention = RelativeMultiHeadAttention(n_heads=4, d_model=64)
        >>> ffn = FeedForward(64, 256)
        >>> layer = MemoryLayer(d_model=64, self_attn=attention, feed_forward=ffn, dropout_prob=0.1)
        >>> past = LayerMemory(torch.randn(32, 2, 64), torch.randn(8, 2, 64))  # [M, B, D], [C, B, D]
        >>> layer(torch.randn(16, 2, 64), past).shape  # [S, B, D]
        torch.Size([16, 2, 64])
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
        token_shift: bool = False,
        window: Count | None = None,
    ):
        super().__init__()
        check_gate(gate, norm)
        if self_attn.d_model != d_model:
            raise UserError(f"d_model={d_model}, but self_attn was built for {self_attn.d_model}.")
        self.d_model = d_model
        self.norm = norm
        self.window = window
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn = nn.LayerNorm(d_model)
        self.norm_ff = nn.LayerNorm(d_model)
        self.gate_self_attn = GRUGate(d_model) if gate == "gru" else None
        self.gate_ff = GRUGate(d_model) if gate == "gru" else None
        self.shift = TokenShift(d_model) if token_shift else None

    def forward(
        self,
        x: Tensor,
        past: LayerMemory | None = None,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
        kv_input: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """``x [S, B, D]``, the layer's input, to its output ``[S, B, D]``.

        Args:
            past: What the layer remembers, M positions and C slots; None for nothing.
            mask: Boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look; None for causal.
            key_start: int64 ``[B, S]``, the index of the first key that each query may see; None for all.
            kv_input: The input of the segment's keys and values, ``[S, B, D]``; None for ``shifted(x, None,
                None)``, as if ``x`` were the start of a text.
            cache: Keys and values of the past, instead of ``past`` and ``mask``; those of the segment are
                appended.
        """
        # Attention over memory and segment.
        if kv_input is None:
            kv_input = x if self.shift is None else self.shift(x, None, None)
        if cache is None:
            y = self.attend(x, kv_input, past, mask, key_start)  # [S, B, D]
        else:
            y = cache.attend(x, kv_input, key_start)
        y = self.dropped(y)
        # Post-norm: x = norm(x + sublayer(x)), as in the original Transformer-XL.
        if self.norm == "post":
            x = self.norm_self_attn(x + y)
            return self.norm_ff(x + self.dropped(self.feed_forward(x)))
        # Pre-norm: x = x + sublayer(norm(x)), or through a gate.
        x = self.joined(x, y, self.gate_self_attn)
        y = self.feed_forward(self.norm_ff(x)) if cache is None else cache.feed_forward(x)
        return self.joined(x, self.dropped(y), self.gate_ff)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def attend(
        self,
        x: Tensor,
        kv_input: Tensor,
        past: LayerMemory | None,
        mask: Tensor | None,
        key_start: Tensor | None,
    ) -> Tensor:
        """Attention from ``x [S, B, D]`` to slots and positions of ``past`` and to ``kv_input [S, B, D]``, in
        this order, all normalized first in pre-norm: ``[S, B, D]``."""
        # In order of time: slots, positions, segment.
        context = [] if past is None else [part for part in (past.slots, past.mem) if len(part)]
        norm = None if self.norm == "post" else self.norm_self_attn
        # The folded norm computes the same faster, if only the weights decide the output.
        if context and mask is None and can_fold(self.self_attn, norm):
            joined = torch.cat(context) if len(context) > 1 else context[0]  # cat would copy a single one
            return attend_with_memory(self.self_attn, norm, x, kv_input, joined, key_start)
        key = self.attention_input(torch.cat((*context, kv_input)))  # [K, B, D]
        query = key[len(key) - len(x) :] if kv_input is x else self.attention_input(x)
        return self.self_attn(query=query, key=key, value=key, mask=mask, key_start=key_start)

    def dropped(self, y: Tensor) -> Tensor:
        """A sublayer's output ``y [S, B, D]`` after dropout."""
        return self.dropout(y) if self.training else y  # a call without effect would slow down each token

    def joined(self, x: Tensor, y: Tensor, gate: GRUGate | None) -> Tensor:
        """A sublayer's input and output, ``[S, B, D]`` each, as a sum or through its gate."""
        return x + y if gate is None else gate(x, y.relu())

    def shifted(self, x: Tensor, shift_state: Tensor | None, doc_starts: Tensor | None) -> Tensor:
        """The input of a segment's keys and values, which the memory keeps, too: ``x [S, B, D]`` after a
        [`TokenShift`][], or without one ``x`` itself."""
        return x if self.shift is None else self.compute(self.shift, x, shift_state, doc_starts)

    def attention_input(self, x: Tensor) -> Tensor:
        """The layer's input or memory ``x [·, B, D]`` as attention reads it: ``[·, B, D]``."""
        return x if self.norm == "post" else self.norm_self_attn(x)

    def compute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """``function(*inputs)``, from tensors to one of any shape, which uses parts of this layer outside of
        its ``forward``. If the layer is sharded (FSDP2), its weights are gathered, as for ``forward``."""
        if hasattr(type(self), "unshard") and "_compute" not in vars(self):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self, "_compute")
        return self._compute(function, *inputs)

    def _compute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(*inputs)
