"""Multi-head attention over memory and segment, which depends on distances and not on absolute positions."""

import os

import torch
from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, Positive, Probability, check_arguments, check_value
from memformers.kernels import KernelName, relative_attention
from memformers.kernels.naive import attention_probabilities
from memformers.models.attention_inputs import check_blocked, check_shapes, visible_keys
from memformers.models.config import Positions, check_heads, check_positions, check_rotations, has_rotations
from memformers.models.flash_positions import attend_by_flash, is_flash_used
from memformers.models.sinusoids import POSITION_BASE, sinusoid_table

KERNEL_VARIABLE = "MEMFORMERS_KERNEL"


class RelativeMultiHeadAttention(nn.Module):
    """Causal attention with relative positions over K keys: first the memory's, then the queries' own S (Dai
    et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860), section 3.3). Raises ValueError for
    arguments out of their range.

    Args:
        n_heads: The number of heads, H, which must divide ``d_model``.
        d_model: The width of the model, D.
        dropout_prob: Probability of dropping an attention probability while training.
        positions: ``"learned"``, a vector r_d and a scalar s_d for each head and distance d; or
            ``"sinusoidal"``, r_d = W_R · sinusoid(d) and learned u and v for each head, as in the paper.
        max_positions: How many distances the learned scheme stores, at least the largest K = C + M + S.
        position_features: Numbers in a sinusoid, P; ``d_model`` if not given (sinusoidal).
        position_base: The longest wavelength of the sinusoids over 2π (sinusoidal).
        clamp_len: Distances beyond this have the same sinusoid (sinusoidal); all differ if not given.
        kernel: The kernel; ``"auto"``: the fastest, or the one that the variable ``MEMFORMERS_KERNEL`` names.

    Examples:
        >>> import torch
        >>> from memformers import RelativeMultiHeadAttention
        >>> attention = RelativeMultiHeadAttention(n_heads=4, d_model=64, positions="sinusoidal")
        >>> segment = torch.randn(16, 2, 64)  # [S, B, D]
        >>> past = torch.randn(32, 2, 64)  # [M, B, D]
        >>> context = torch.cat((past, segment))
        >>> attention(query=segment, key=context, value=context).shape
        torch.Size([16, 2, 64])
    """

    @check_arguments
    def __init__(
        self,
        n_heads: Count,
        d_model: Count,
        dropout_prob: Probability = 0.1,
        *,
        positions: Positions = "learned",
        max_positions: Count = 4096,
        position_features: Count | None = None,
        position_base: Positive = POSITION_BASE,
        clamp_len: Count | None = None,
        kernel: KernelName = "auto",
    ):
        super().__init__()
        check_heads(n_heads, d_model)
        check_positions(positions, position_features, clamp_len)
        n_features = position_features or d_model
        if kernel == "auto":
            kernel = os.environ.get(KERNEL_VARIABLE, kernel)  # type: ignore[assignment]
            check_value(KERNEL_VARIABLE, kernel, KernelName)
        if kernel == "flash":
            check_rotations(positions, n_features, clamp_len)
        self.n_heads = n_heads
        self.d_model = d_model
        self.dropout_prob = dropout_prob
        self.positions = positions
        self.max_positions = max_positions
        self.clamp_len = clamp_len
        self.has_rotations = has_rotations(positions, n_features, clamp_len)
        self.kernel: KernelName = kernel

        # Projections of contents (section 3.3), and u, which is the same for queries at all positions.
        d_head = d_model // n_heads
        self.query = nn.Linear(d_model, d_model, bias=False)  # W_q
        self.key = nn.Linear(d_model, d_model, bias=False)  # W_k,E
        self.value = nn.Linear(d_model, d_model)  # W_v
        self.output = nn.Linear(d_model, d_model)  # Linear(a)
        self.u = nn.Parameter(torch.empty(n_heads, d_head))  # of term (c)

        # Positions: a vector r and a scalar s for each distance, or r = W_k,R · R and v, as in the paper.
        if positions == "learned":
            self.r = nn.Parameter(torch.empty(n_heads, max_positions, d_head))
            self.s = nn.Parameter(torch.empty(n_heads, max_positions))  # in place of term (d)
        else:
            self.position_features = n_features
            self.position_base = position_base
            self.position = nn.Linear(n_features, d_model, bias=False)  # W_k,R
            self.v = nn.Parameter(torch.empty(n_heads, d_head))  # of term (d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with no preference for any distance; the projections draw their own weights."""
        for name in ("u", "r", "s") if self.positions == "learned" else ("u", "v"):
            nn.init.zeros_(getattr(self, name))

    def forward(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``query [S, B, D]`` to ``key`` and ``value [K, B, D]``, oldest first: ``[S, B, D]``.

        ``mask`` is boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look, None for causal;
        ``key_start`` int64 ``[B, S]``, the first key that each query may see, at most its own, K − S + i.
        Raises ValueError for other shapes, too many keys, and a mask that shows the future or hides all keys.
        """
        check_shapes(query, key, value, self.d_model)
        mask, key_start = visible_keys(mask, key_start, len(query), len(key), query.shape[1])
        # q = h W_q, k = h̃ W_k,E, v = h̃ W_v (section 3.3).
        query = self.query(query)  # [S, B, D]
        key = self.key(key)  # [K, B, D]
        value = self.value(value)  # [K, B, D]
        return self.attend(query, key, value, mask, key_start)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, key_start: Tensor | None
    ) -> Tensor:
        """Attention of a projected ``query [S, B, D]`` to projected ``key`` and ``value [K, B, D]``, with
        ``mask [B or 1, 1, S, K]`` and ``key_start [B, S]``, and the output map: ``[S, B, D]``."""
        q = self.by_head(query)  # [B, H, S, E]
        k = self.by_head(key)  # [B, H, K, E]
        v = self.by_head(value)  # [B, H, K, E]
        attended = self.attend_by_head(q, k, v, mask=mask, key_start=key_start)  # [B, H, S, E]
        return self.output(self.join_heads(attended))  # [S, B, D]

    def attend_by_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        """The kernel's attention of ``query [B, H, S, E]`` to ``key`` and ``value [B, H, K, E]``, with ``mask
        [B or 1, 1, S, K]`` and ``key_start [B, S]``: ``[B, H, S, E]``."""
        dropout_prob = self.dropout_prob if self.training else 0.0
        # With few position features, the flash kernel takes r's factors, W_k,R and R.
        if is_flash_used(self, query, dropout_prob):
            return attend_by_flash(
                self, query, key, value, mask=mask, key_start=key_start, dropout_prob=dropout_prob
            )
        if self.kernel == "blocked":
            check_blocked(query, mask)
        # Scores (a) to (d) of section 3.3, masked softmax, and sums of values: see kernels/naive.py.
        return relative_attention(
            query, key, value, **self.distance_terms(key.shape[2]), mask=mask, key_start=key_start,
            dropout_prob=dropout_prob, kernel=self.kernel,
        )  # fmt: skip

    def distance_terms(self, K: int) -> dict[str, Tensor]:
        """What scores depend on besides queries and keys: the kernel's r ``[H, K, E]``, the vectors of the
        distances 0 … K−1, u ``[H, E]``, and the scheme's s ``[H, K]`` or v ``[H, E]``."""
        if self.positions == "learned":
            if self.max_positions < K:
                raise UserError(
                    f"expected at most max_positions={self.max_positions}, got {K} positions of memory and "
                    f"segment; build with max_positions={K}, use positions='sinusoidal', or shorten either."
                )
            return {"r": self.r[:, :K], "s": self.s[:, :K], "u": self.u}
        # r_d = W_k,R · R_d, once for each distance and not for each pair of query and key (appendix B).
        r = self.position(self.sinusoid_table(K))  # [K, D]
        return {"r": rearrange(r, "k (h e) -> h k e", h=self.n_heads), "u": self.u, "v": self.v}

    def sinusoid_table(self, K: int) -> Tensor:
        """R_d, the sinusoids of K distances, in the weights' dtype: ``[K, P]``."""
        return sinusoid_table(K, self.position_features, self.clamp_len, self.position_base, self.u.detach())

    def by_head(self, x: Tensor) -> Tensor:
        """``[t, B, D]`` in the order of the kernels, ``[B, H, t, E]``."""
        return rearrange(x, "t b (h e) -> b h t e", h=self.n_heads)

    def join_heads(self, x: Tensor) -> Tensor:
        """The reverse of [`by_head`][memformers.models.attention.RelativeMultiHeadAttention.by_head]:
        ``[B, H, t, E]`` to ``[t, B, D]``."""
        return rearrange(x, "b h t e -> t b (h e)")

    @torch.no_grad()
    def probabilities(
        self, *, query: Tensor, key: Tensor, mask: Tensor | None = None, key_start: Tensor | None = None
    ) -> Tensor:
        """What each query looks at: attention probabilities ``[B, H, S, K]`` of ``query [S, B, D]`` to ``key
        [K, B, D]``, without gradient."""
        check_shapes(query, key, key, self.d_model)
        mask, key_start = visible_keys(mask, key_start, len(query), len(key), query.shape[1])
        q = self.by_head(self.query(query))  # [B, H, S, E]
        k = self.by_head(self.key(key))  # [B, H, K, E]
        return attention_probabilities(q, k, **self.distance_terms(len(key)), mask=mask, key_start=key_start)
