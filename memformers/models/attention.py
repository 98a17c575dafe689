"""Multi-head attention over memory and segment, aware of distances and not of absolute positions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, Probability, check_arguments, check_value
from memformers.kernels import absorbed
from memformers.kernels.dispatch import KernelName, relative_attention, unsupported_reason
from memformers.kernels.naive import attention_probabilities, causal_mask, from_key_start
from memformers.kernels.operators import has_values
from memformers.models.config import Positions, check_heads, check_positions
from memformers.models.linear import fold, is_plain, joined_linear, layer_norm_no_affine, linear
from memformers.models.positions import sinusoid_table

T = TypeVar("T")
FORCED = "MEMFORMERS_KERNEL"
BY_DISTANCE = ("r", "s")
"""The kernel's terms that have a column for each distance."""
Heads = slice | list[int]
"""Some heads of a layer."""


@dataclass(frozen=True)
class Divided:
    """Which keys before a segment a head reads, where all read the ``newest`` and divide those before: of H
    successive ones, counted from the newest, head h reads place h. Fewer than H oldest ones are not read."""

    newest: int

    def split(self, before: int, heads: int) -> tuple[int, int]:
        """How many of ``before`` keys are not read, and how many divided ones each of ``heads`` reads."""
        older = max(before - self.newest, 0)
        return older % heads, older // heads

    def of_heads(self, x: Tensor, before: int) -> Tensor:
        """What each head reads of ``x [B, H, K, E]``, whose first ``before`` keys are before the segment:
        ``[B, H, k, E]``."""
        unread, n = self.split(before, H := x.shape[1])
        old, new = x[:, :, unread : unread + n * H], x[:, :, unread + n * H :]
        own = old.unflatten(2, (n, H)).diagonal(dim1=1, dim2=3)  # [B, n, E, H]
        return torch.cat((own.permute(0, 3, 1, 2), new), dim=2)

    def first_seen(self, key_start: Tensor, before: int, heads: int) -> Tensor:
        """``key_start [B, S]`` among the keys that a head reads; of H positions, each head sees its own only
        if all are to be seen."""
        unread, n = self.split(before, heads)
        place = key_start - unread
        block = (place.clamp(min=0) + heads - 1) // heads
        return torch.where(place < n * heads, block, place - n * (heads - 1))


Reads = Sequence[int] | Divided | None
"""How many of the newest keys before the segment each head reads, or [`Divided`][]; None if all read all."""
Project = Callable[[Heads, int], tuple[Tensor, Tensor]]
"""The keys and values ``[B, h, k, E]`` of h heads, for the newest k keys."""


class RelativeMultiHeadAttention(nn.Module):
    """Causal attention with relative positions over K keys, of which the last S are the queries' own and all
    before are memory (Dai et al. 2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860), section 3.3).
    Raises ValueError for arguments out of their range.

    Args:
        heads: The number of heads, H, which must divide ``d_model``.
        d_model: The width of the model, D.
        dropout_prob: Probability of dropping an attention probability while training.
        positions: ``"learned"``, a vector r_d and a scalar s_d for each head and distance d; or
            ``"sinusoidal"``, r_d = W_R · sinusoid(d) and learned u and v for each head, as in the paper.
        max_positions: How many distances the learned scheme stores, at least the largest K = C + M + S.
        position_features: Numbers in a sinusoid, P; ``d_model`` if not given (sinusoidal).
        clamp_len: Distances beyond this have the same sinusoid (sinusoidal); all differ if not given.
        kernel: What computes it; ``"auto"``: the fastest, or what the variable ``MEMFORMERS_KERNEL`` names.

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
        self.heads, self.d_model, self.dropout_prob = heads, d_model, dropout_prob
        self.positions, self.max_positions, self.clamp_len = positions, max_positions, clamp_len
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
            self.position_features = position_features or d_model
            self.position = nn.Linear(self.position_features, d_model, bias=False)  # W_R
            self.v = nn.Parameter(torch.empty(heads, d_head))
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
        reads: Reads = None,
    ) -> Tensor:
        """Attend from ``query [S, B, D]`` to ``key`` and ``value [K, B, D]``, oldest first: ``[S, B, D]``.

        ``mask`` is boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look, None for causal;
        ``key_start`` int64 ``[B, S]``, the first key that each may see, at most its own, K − S + i;
        ``reads`` how many of the newest K − S keys each head may see, or how heads divide them, None for all.
        Raises ValueError for what doesn't fit, too many keys, and a mask that shows the future or hides all.
        """
        self._check_shapes(query, key, value, reads)
        query, key, value = self.query(query), self.by_head(self.key(key)), self.by_head(self.value(value))
        mask, key_start = checked(mask, key_start, len(query), key.shape[2], query.shape[1])
        if isinstance(reads, Divided):
            before = key.shape[2] - len(query)
            mask, key_start = self.divided_bounds(reads, mask, key_start, before)
            key, value, reads = reads.of_heads(key, before), reads.of_heads(value, before), None

        def project(heads: Heads, k: int) -> tuple[Tensor, Tensor]:
            return key[:, heads, -k:], value[:, heads, -k:]

        return self.attend(query, project, key.shape[2], mask, key_start, reads)

    def forward_with_memory(
        self,
        x: Tensor,
        past: Tensor,
        norm: nn.LayerNorm | None,
        mask: Tensor | None,
        key_start: Tensor | None,
        reads: Reads = None,
    ) -> Tensor:
        """``forward`` for ``query=norm(x)`` and ``key=value=norm([past; x])``, of ``x [S, B, D]`` and ``past
        [M, B, D]``: ``[S, B, D]``, for a norm that [`can_fold`][]. With its scale and shift in the maps, no
        remembered position needs their gradient: a training step with M > S takes 4 to 8 % less time. Of
        each head, only the keys that it reads are projected."""
        x, past = layer_norm_no_affine(norm, x), layer_norm_no_affine(norm, past)  # x̂
        query = F.linear(x, *fold(norm, self.query))  # [S, B, D]
        key_map, value_map = fold(norm, self.key), fold(norm, self.value)
        mask, key_start = checked(mask, key_start, len(x), len(past) + len(x), x.shape[1])
        if mask is None and reads is None and self._worth_absorbing(x, past):
            # All keys have one bias, which changes no softmax; all values have one, which is added once.
            maps = [rearrange(weight, "(h e) d -> h e d", h=self.heads) for weight, _ in (key_map, value_map)]
            terms = self.distance_terms(len(past) + len(x))
            how = terms | ({} if key_start is None else {"key_start": key_start})
            attended = absorbed.relative_attention(self.by_head(query), past, x, *maps, **how)
            return self.output(rearrange(attended, "b h s e -> s b (h e)") + value_map[1])

        H, older = self.heads, past[:0]
        if isinstance(reads, Divided):
            mask, key_start = self.divided_bounds(reads, mask, key_start, len(past))
            unread, n = reads.split(len(past), H)
            older, past, reads = past[unread : unread + n * H], past[unread + n * H :], None

        def project(heads: Heads, k: int) -> tuple[Tensor, Tensor]:
            seen, both = past[max(len(past) + len(x) - k, 0) :], []
            for weight, bias in (key_map, value_map):
                w, b = weight.unflatten(0, (H, -1)), bias.unflatten(0, (H, -1))  # [H, E, D], [H, E]
                projected = joined_linear(seen, x, w[heads].flatten(0, 1), b[heads].flatten())  # [k, B, h·E]
                if len(older):  # of each H positions, a head projects its own
                    own = [F.linear(older[h::H], w[h], b[h]) for h in range(H)]  # [n, B, E] each
                    projected = torch.cat((torch.cat(own, dim=-1), projected))
                both.append(rearrange(projected, "k b (h e) -> b h k e", e=self.d_model // H))
            return both[0], both[1]

        return self.attend(query, project, len(older) // H + len(past) + len(x), mask, key_start, reads)

    def _worth_absorbing(self, x: Tensor, past: Tensor) -> bool:
        """Whether to project the queries and not the memory: for a segment at most half as long as a head is
        wide and a quarter of its memory, where it was measured, on CPU in float32, without dropout."""
        S, M, drops = len(x), len(past), self.training and self.dropout_prob > 0
        short = 2 * S * self.heads <= self.d_model and M >= 4 * S and self.kernel == "auto" and not drops
        exact = short and has_values(x) and x.element_size() > 2 and not torch.is_autocast_enabled("cpu")
        return exact and bool((x.detach().sum() + past.detach().sum()).isfinite())

    def can_fold(self, norm: nn.Module | None) -> bool:
        """Whether the maps may be read with ``norm``: nobody wrapped, hooked or replaced them, or this."""
        maps_are_plain = all(is_plain(each, nn.Linear) for each in (self.query, self.key, self.value))
        norm_is_plain = norm is None or (is_plain(norm, nn.LayerNorm) and norm.bias is not None)
        return maps_are_plain and norm_is_plain and is_plain(self, RelativeMultiHeadAttention)

    def attend(
        self,
        query: Tensor,
        project: Project,
        K: int,
        mask: Tensor | None,
        key_start: Tensor | None,
        reads: Sequence[int] | None,
    ) -> Tensor:
        """``forward`` of a projected ``query [S, B, D]``: ``[S, B, D]``. One kernel computes all heads that
        read as many keys, which ``project`` gives, with values, for the newest k of all K. The bounds are
        [`checked`][]."""
        query, S, kernel = self.by_head(query), len(query), self.kernel
        terms, drop = self.distance_terms(K), self.dropout_prob if self.training else 0.0
        parts: list[Tensor] = []
        groups: list[Heads] = []
        # Without lengths by head, none is asked for its value: a compiled model would be built for each.
        for heads, n in grouped(reads) if reads else [(slice(None), K - S)]:
            k, before = n + S, K - S - n  # how many keys these heads read, and how many are older
            own = {name: x[heads, :k] if name in BY_DISTANCE else x[heads] for name, x in terms.items()}
            given = query[:, heads], *project(heads, k)  # [B, h, S, E] and twice [B, h, k, E]
            seen = None if mask is None else mask[..., before:]
            first = key_start if key_start is None or not before else (key_start - before).clamp(min=0)
            if seen is not None and has_values(seen) and not bool(seen.any(dim=-1).all()):
                raise UserError("the mask hides every key that a head reads from a query; show it its own.")
            if kernel != "auto" and (why := unsupported_reason(kernel, seen, *given, *own.values())):
                raise UserError(f"kernel='{kernel}' {why}; use kernel='auto' or 'naive'.")
            how: dict[str, Any] = {**own, "mask": seen, "key_start": first, "dropout_prob": drop}
            parts.append(relative_attention(*given, kernel=kernel, **how))
            groups.append(heads)
        return linear(self.output, rearrange(in_order(parts, groups), "b h s e -> s b (h e)"))

    def divided_bounds(
        self, reads: Divided, mask: Tensor | None, key_start: Tensor | None, before: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """A [`checked`][] ``mask [B or 1, 1, S, K]`` and ``key_start [B, S]``, of the keys of each head."""
        if mask is not None:
            by_key = mask.expand(-1, self.heads, -1, -1).mT  # [B or 1, H, K, S]
            mask = reads.of_heads(by_key, before).mT
        return mask, None if key_start is None else reads.first_seen(key_start, before, self.heads)

    def by_head(self, x: Tensor) -> Tensor:
        """``[t, B, D]`` in the order of the kernels, ``[B, H, t, E]``."""
        return rearrange(x, "t b (h e) -> b h t e", h=self.heads)

    @torch.no_grad()
    def probabilities(
        self, *, query: Tensor, key: Tensor, mask: Tensor | None = None, key_start: Tensor | None = None,
        reads: Reads = None,
    ) -> Tensor:  # fmt: skip
        """Attention ``[B, H, S, K]`` of ``query [S, B, D]`` to ``key [K, B, D]``, by head, no gradient."""
        self._check_shapes(query, key, key, reads)
        S, K = len(query), len(key)
        mask, key_start = checked(mask, key_start, S, K, query.shape[1])
        query, key = self.by_head(self.query(query)), self.by_head(self.key(key))
        if isinstance(reads, Divided):
            where = torch.arange(K, device=key.device).expand(1, self.heads, 1, K).mT  # [1, H, K, 1]
            where = reads.of_heads(where, K - S).mT  # [1, H, 1, k]
            mask, key_start = self.divided_bounds(reads, mask, key_start, K - S)
            key = reads.of_heads(key, K - S)
            bounds: dict[str, Any] = {"mask": mask, "key_start": key_start}
            found = attention_probabilities(query, key, **self.distance_terms(key.shape[2]), **bounds)
            return found.new_zeros(*found.shape[:3], K).scatter(3, where.expand_as(found), found)
        if reads is not None:
            mask = seen_by_heads(reads, S, K, key.device) & (True if mask is None else mask)
        terms = self.distance_terms(K)
        return attention_probabilities(query, key, **terms, mask=mask, key_start=key_start)

    def distance_terms(self, K: int) -> dict[str, Tensor]:
        """The kernel's r ``[H, K, E]``, u, and the scheme's s ``[H, K]`` or v, for K distances."""
        if self.positions == "learned" and self.max_positions < K:
            raise UserError(
                f"expected at most max_positions={self.max_positions}, got {K} positions of memory and "
                f"segment; build with max_positions={K}, use positions='sinusoidal', or shorten either."
            )
        if self.positions == "learned":
            return {"r": self.r[:, :K], "s": self.s[:, :K], "u": self.u}
        table = sinusoid_table(K, self.position_features, self.clamp_len, self.u.detach())
        r = rearrange(self.position(table), "k (h e) -> h k e", h=self.heads)
        return {"r": r, "u": self.u, "v": self.v}

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor, reads: Reads) -> None:
        B, D = query.shape[1:] if query.dim() == 3 else (0, 0)
        if self.d_model != D or key.shape[1:] != (B, D) or key.shape != value.shape:
            came = [list(each.shape) for each in (query, key, value)]
            raise UserError(f"expected query [S, B, D], key, value [K, B, D], D={self.d_model}, got {came}.")
        if len(key) < len(query):
            raise UserError(f"expected at least {len(query)} keys, one for each query, got {len(key)}.")
        past = len(key) - len(query)
        wrong = isinstance(reads, Sequence) and not all(0 <= n <= past for n in reads)
        if wrong or (isinstance(reads, Sequence) and len(reads) != self.heads):
            raise UserError(f"expected {self.heads} numbers of 0 to {past} keys as reads, got {reads}.")


def in_order(parts: Sequence[Tensor], groups: Sequence[Heads]) -> Tensor:
    """The ``parts [B, h, S, E]`` of groups of heads, as one ``[B, H, S, E]`` in the order of the heads."""
    if len(parts) == 1:
        return parts[0]
    order = [
        head
        for heads in groups
        for head in (range(heads.start, heads.stop) if isinstance(heads, slice) else heads)
    ]
    whole = torch.cat(list(parts), dim=1)
    return whole if order == sorted(order) else whole[:, sorted(range(len(order)), key=order.__getitem__)]


def grouped(reads: Sequence[T]) -> list[tuple[Heads, T]]:
    """The heads for which ``reads`` has the same, and what."""
    groups: dict[T, list[int]] = {}
    for head, n in enumerate(reads):
        groups.setdefault(n, []).append(head)
    together = {n: slice(heads[0], heads[-1] + 1) for n, heads in groups.items()}
    return [
        (together[n] if len(heads) == heads[-1] + 1 - heads[0] else heads, n) for n, heads in groups.items()
    ]


def seen_by_heads(reads: Sequence[int], S: int, K: int, device: torch.device) -> Tensor:
    """The definition of lengths by head, as a boolean mask ``[H, S, K]``: a head sees the newest keys before
    the segment, as many as it ``reads``, and of the segment all up to the query's own."""
    first = K - S - torch.tensor(reads, device=device)  # [H]
    return (torch.arange(K, device=device) >= first[:, None, None]) & causal_mask(S, K, device)


def checked(
    mask: Tensor | None, key_start: Tensor | None, S: int, K: int, B: int
) -> tuple[Tensor | None, Tensor | None]:
    """``mask [S, K, B or 1]`` and ``key_start [B, S]`` as kernels take them: a mask ``[B or 1, 1, S, K]``,
    with what the other and causality hide. UserError for what can't be, as far as values may be read."""
    if key_start is not None:
        if key_start.dtype != torch.int64 or key_start.shape != (B, S):
            came = f"{key_start.dtype} {list(key_start.shape)}"
            raise UserError(f"expected key_start as int64 [{B}, {S}], each query's first key, got {came}.")
        if has_values(key_start) and bool((key_start > torch.arange(K - S, K)).any()):
            raise UserError(f"key_start hides a query's own key, {K - S} + i; show it that one at least.")
    if mask is None:
        return None, key_start
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        came = f"{mask.dtype} {list(mask.shape)}"
        raise UserError(f"expected a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1], got {came}.")
    past = causal_mask(S, K, mask.device)[:, :, None]
    visible = mask & past
    if key_start is not None:
        visible = visible & rearrange(from_key_start(key_start, K), "b 1 s k -> s k b")
    if has_values(mask) and bool((future := mask & ~past).any()):
        i, j, b = future.nonzero()[0].tolist()
        raise UserError(f"the mask shows query {i} of stream {b} key {j}, in its future; hide such keys.")
    if has_values(mask) and bool((blind := ~visible.any(dim=1)).any()):
        i, b = blind.nonzero()[0].tolist()
        raise UserError(f"the mask hides every key from query {i} of stream {b}; show it one.")
    return rearrange(visible, "s k b -> b 1 s k"), None
