"""Multi-head attention over memory and segment, aware of distances and not of absolute positions."""

import os

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, Probability, check_arguments, check_value
from memformers.kernels import absorbed
from memformers.kernels.dispatch import KernelName, obstacle, relative_attention
from memformers.kernels.naive import attention_probabilities, causal_mask, from_key_start
from memformers.models.linear import Affine, fold, linear, standardized
from memformers.models.positions import Positions, Sinusoids, check_positions

FORCED = "MEMFORMERS_KERNEL"


class RelativeMultiHeadAttention(nn.Module):
    """Attention with relative positions, causal, over keys that may begin before the queries.

    The last S of the K keys are the queries' own positions; everything before is memory. Source:
    Transformer-XL (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)), section 3.3.

    Args:
        heads: The number of heads, H, which must divide ``d_model``.
        d_model: The width of the model, D.
        dropout_prob: Probability of dropping an attention probability while training.
        positions: ``"learned"``, a vector r_d and a scalar s_d for each head and distance d; or
            ``"sinusoidal"``, r_d = W_R · sinusoid(d) and learned u and v for each head, as in the paper.
        max_positions: The number of distances 0 … max_positions−1 that the learned scheme stores, at least
            the largest K = C + M + S that the module gets. The sinusoidal scheme stores none and has no
            limit.
        position_features: Numbers in a sinusoid, P; ``d_model`` if not given (sinusoidal).
        clamp_len: Distances beyond this have the same sinusoid (sinusoidal); all differ if not given.
        kernel: What computes the scores and their softmax; ``"auto"`` chooses the fastest, or the one that
            the environment variable ``MEMFORMERS_KERNEL`` names.

    Raises:
        ValueError: If the heads don't divide ``d_model``, for an argument out of its range, and for a kernel
            that doesn't support these positions.

    Examples:
        >>> import torch
        >>> from memformers import RelativeMultiHeadAttention
        >>> attention = RelativeMultiHeadAttention(heads=4, d_model=64, positions="sinusoidal")
        >>> segment, past = torch.randn(16, 2, 64), torch.randn(32, 2, 64)  # [S, B, D] and [M, B, D]
        >>> context = torch.cat((past, segment))
        >>> attention(query=segment, key=context, value=context).shape
        torch.Size([16, 2, 64])
    """

    @check_arguments
    def __init__(
        self,
        heads: Count,
        d_model: Count,
        dropout_prob: Probability = 0.1,
        *,
        positions: Positions = "learned",
        max_positions: Count = 4096,
        position_features: Count | None = None,
        clamp_len: Count | None = None,
        kernel: KernelName = "auto",
    ):
        super().__init__()
        check_heads(heads, d_model)
        check_positions(positions, position_features, clamp_len)
        d_head = d_model // heads
        self.heads = heads
        self.d_model = d_model
        self.dropout_prob = dropout_prob
        self.positions = positions
        self.max_positions = max_positions
        self.clamp_len = clamp_len
        named = os.environ.get(FORCED, kernel) if kernel == "auto" else kernel
        check_value(FORCED, named, KernelName)
        self.kernel: KernelName = named  # type: ignore[assignment]
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.u = nn.Parameter(torch.empty(heads, d_head))
        if positions == "learned":
            self.r = nn.Parameter(torch.empty(heads, max_positions, d_head))
            self.s = nn.Parameter(torch.empty(heads, max_positions))
        else:
            features = d_model if position_features is None else position_features
            self.position = nn.Linear(features, d_model, bias=False)  # W_R
            self.sinusoids = Sinusoids(features, clamp_len)
            self.v = nn.Parameter(torch.empty(heads, d_head))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with no preference for any distance; the projections draw their own weights."""
        for name in ("u", "v", "r", "s"):
            if hasattr(self, name):
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
        """Attend from the segment to memory and segment.

        Args:
            query: ``[S, B, D]``.
            key: ``[K, B, D]``, in order of time.
            value: ``[K, B, D]``.
            mask: Boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look; None means causal with
                all memory visible.
            key_start: int64 ``[B, S]``, the index of the first key that each query may see, at most its own,
                K − S + i; None means 0.

        Returns:
            ``[S, B, D]``.

        Raises:
            ValueError: For shapes that don't fit, for more keys than learned positions, and for a mask that
                shows the future or hides everything.
        """
        self._check_shapes(query, key, value)
        mask, key_start = checked(mask, key_start, len(query), len(key), query.shape[1])
        query, key, value = self.query(query), self.key(key), self.value(value)
        return self.attend(self.by_head(query), self.by_head(key), self.by_head(value), mask, key_start)

    def over_memory(
        self,
        x: Tensor,
        past: Tensor,
        norm: nn.LayerNorm | None,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        """The same as ``forward`` for ``query=norm(x)`` and ``key=value=norm([past; x])``, with less work.

        ``x [S, B, D]`` and ``past [M, B, D]`` are not normalized yet; a ``norm`` of None leaves them as they
        are. Returns ``[S, B, D]``. The scale γ and the shift β of ``norm`` are moved into the weights,
        W(γ ∘ x̂ + β) = (W ∘ γ)x̂ + Wβ. So the past is only needed as x̂, which has no parameters: the
        gradients of γ and β need no gradient for each remembered position.
        """
        x, past = standardized(norm, x), standardized(norm, past)  # x̂
        query = F.linear(x, *fold(norm, self.query))  # [S, B, D]
        key_map, value_map = fold(norm, self.key), fold(norm, self.value)
        if mask is None and self._worth_absorbing(x, past):
            return self._absorbed(query, past, x, key_map, value_map, key_start)
        mask, key_start = checked(mask, key_start, len(x), len(past) + len(x), x.shape[1])
        key = torch.cat((F.linear(past, *key_map), F.linear(x, *key_map)))  # [K, B, D]
        value = torch.cat((F.linear(past, *value_map), F.linear(x, *value_map)))  # [K, B, D]
        return self.attend(self.by_head(query), self.by_head(key), self.by_head(value), mask, key_start)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        key_start: Tensor | None = None,
    ) -> Tensor:
        """Attention over inputs that are already projected, ``query [B, H, S, E]`` and ``key``, ``value
        [B, H, K, E]``, followed by the output map; returns ``[S, B, D]``. ``mask`` and ``key_start [B, S]``
        have the form that the kernels take."""
        K = key.shape[2]
        self._check_positions(K)
        dropout_prob = self.dropout_prob if self._dropping else 0.0
        terms = self.distance_terms(K)
        if self.kernel != "auto" and (
            reason := obstacle(self.kernel, mask, query, key, value, *terms.values())
        ):
            raise UserError(f"kernel='{self.kernel}' {reason}; use kernel='auto' or 'naive'.")
        context = relative_attention(
            query,
            key,
            value,
            **terms,
            mask=mask,
            key_start=key_start,
            dropout_prob=dropout_prob,
            kernel=self.kernel,
        )
        return linear(self.output, rearrange(context, "b h s e -> s b (h e)"))

    def by_head(self, x: Tensor) -> Tensor:
        """``[t, B, D]`` in the order of the kernels, ``[B, H, t, E]``."""
        return rearrange(x, "t b (h e) -> b h t e", h=self.heads)

    @torch.no_grad()
    def probabilities(
        self, *, query: Tensor, key: Tensor, mask: Tensor | None = None, key_start: Tensor | None = None
    ) -> Tensor:
        """The attention probabilities of each position of ``query [S, B, D]`` over the positions of
        ``key [K, B, D]``, by head and without gradient: ``[B, H, S, K]``, where each row sums to 1. ``mask``,
        ``key_start [B, S]`` and errors are those of ``forward``."""
        self._check_shapes(query, key, key)
        self._check_positions(len(key))
        mask, key_start = checked(mask, key_start, len(query), len(key), query.shape[1])
        query, key = self.by_head(self.query(query)), self.by_head(self.key(key))
        terms = self.distance_terms(key.shape[2])
        return attention_probabilities(query, key, **terms, mask=mask, key_start=key_start)

    def _worth_absorbing(self, x: Tensor, past: Tensor) -> bool:
        """Whether to project the segment's queries instead of the memory's keys: for segments that are at
        most half as long as a head is wide, over memories at least four times as long. It was measured only
        on CPU in float32; half precision would round the scores."""
        S, M = len(x), len(past)
        short = 2 * S * self.heads <= self.d_model and M >= 4 * S
        exact = x.device.type == "cpu" and x.element_size() > 2 and not torch.is_autocast_enabled("cpu")
        return short and exact and self.kernel == "auto" and not self._dropping

    def _absorbed(
        self,
        query: Tensor,
        past: Tensor,
        x: Tensor,
        key_map: Affine,
        value_map: Affine,
        key_start: Tensor | None,
    ) -> Tensor:
        """Attention of ``query [S, B, D]`` over the unprojected ``past`` and ``x``. All keys have the same
        bias, which doesn't change a softmax; all values have the same bias too, which is added once."""
        K = len(past) + len(x)
        self._check_positions(K)
        w_key, w_value = (rearrange(w, "(h e) d -> h e d", h=self.heads) for w, _ in (key_map, value_map))
        terms = self.distance_terms(K)
        attended = absorbed.relative_attention(
            self.by_head(query), past, x, w_key, w_value, **terms, key_start=key_start
        )
        return self.output(rearrange(attended, "b h s e -> s b (h e)") + value_map[1])

    @property
    def _dropping(self) -> bool:
        return self.training and self.dropout_prob > 0.0

    def distance_terms(self, K: int) -> dict[str, Tensor]:
        """The kernel's r ``[H, K, E]``, u, and the scheme's s ``[H, K]`` or v, for K distances."""
        if self.positions == "learned":
            return {"r": self.r[:, :K], "s": self.s[:, :K], "u": self.u}
        features = self.position(self.sinusoids(K, self.u))  # [K, D]
        r = rearrange(features, "k (h e) -> h k e", h=self.heads)
        return {"r": r, "u": self.u, "v": self.v}

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        B, D = query.shape[1:] if query.dim() == 3 else (0, 0)
        if self.d_model != D or key.shape[1:] != (B, D) or key.shape != value.shape:
            raise UserError(
                f"expected query [S, B, {self.d_model}] and key, value [K, B, {self.d_model}], got "
                f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
            )
        S, K = query.shape[0], key.shape[0]
        if K < S:
            raise UserError(
                f"expected at least {S} keys, the last of them the queries' own, got {K} for {S} queries."
            )

    def _check_positions(self, K: int) -> None:
        if self.positions == "learned" and self.max_positions < K:
            raise UserError(
                f"expected attention over at most max_positions={self.max_positions}, whose distances are "
                f"stored, got {K} positions of memory and segment; build with max_positions={K} or more, "
                f"use positions='sinusoidal', or shorten the segment or the memory."
            )


def check_heads(heads: int, d_model: int) -> None:
    """Raise UserError, naming widths that fit, unless ``heads`` divides ``d_model``."""
    if d_model % heads:
        below, above = d_model // heads * heads, -(-d_model // heads) * heads
        raise UserError(
            f"d_model={d_model} is not divisible by heads={heads}; use a multiple of {heads}, such as "
            + (f"{below} or {above}." if below else f"{above}.")
        )


def check_mask(mask: Tensor, S: int, K: int, B: int) -> Tensor:
    """A usable boolean ``mask [S, K, B]`` or ``[S, K, 1]``; UserError for one that isn't.

    On a GPU, which would have to be waited for, its values aren't read: keys of the future are hidden there,
    since they have no distance.
    """
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        raise UserError(
            f"expected a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1] (segment, keys, batch), got "
            f"{mask.dtype} {list(mask.shape)}."
        )
    past = causal_mask(S, K, mask.device)[:, :, None]
    if mask.device.type != "cpu" or torch.compiler.is_compiling():  # a graph can't read values either
        return mask & past
    future = mask & ~past
    if future.any():
        i, j, b = future.nonzero()[0].tolist()
        raise UserError(
            f"the mask lets query {i} of stream {b} see key {j}, which lies in its future (its own "
            f"key is {K - S + i}); distances below 0 have no position, so hide those keys."
        )
    blind = ~mask.any(dim=1)
    if blind.any():
        i, b = blind.nonzero()[0].tolist()
        raise UserError(f"the mask hides every key from query {i} of stream {b}; show it one.")
    return mask


def checked(
    mask: Tensor | None, key_start: Tensor | None, S: int, K: int, B: int
) -> tuple[Tensor | None, Tensor | None]:
    """A boolean ``mask [S, K, B]`` or ``[S, K, 1]`` and ``key_start [B, S]`` as kernels take them. A mask
    becomes ``[B, 1, S, K]`` or ``[1, 1, S, K]``, and takes in what ``key_start`` hides. UserError for those
    that can't be."""
    if key_start is not None and (key_start.dtype != torch.int64 or key_start.shape != (B, S)):
        raise UserError(
            f"expected key_start as int64 [{B}, {S}], the first key that each query may see, got "
            f"{key_start.dtype} {list(key_start.shape)}."
        )
    if mask is None:
        return None, key_start
    mask = check_mask(mask, S, K, B)
    if key_start is not None:
        mask = check_mask(mask & rearrange(from_key_start(key_start, K), "b 1 s k -> s k b"), S, K, B)
    return rearrange(mask, "s k b -> b 1 s k"), None
