"""Multi-head attention over memory and segment, which depends on distances and not on absolute positions."""

import os
from typing import TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from memformers.common.fields import Count, Positive, Probability, check_arguments, check_value
from memformers.common.text import UserError
from memformers.kernels import KernelName, flash, is_concrete_cpu, is_flash_faster, relative_attention
from memformers.kernels.naive import attention_probabilities, causal_mask, from_key_start
from memformers.models.config import Positions, check_heads, check_positions, check_rotations, has_rotations

M = TypeVar("M", bound=nn.Module)
PLAIN_WEIGHTS = frozenset({Tensor, nn.Parameter, type(None)})
"""The classes of weights that are their numbers, and of none. Quantized and sharded weights are of other
classes, with which only a call of their module is sure to work."""
KERNEL_VARIABLE = "MEMFORMERS_KERNEL"
POSITION_BASE = 10_000.0
"""The longest wavelength of a sinusoid over 2π, as in Vaswani et al. 2017."""
SLICES = 4
"""Into how many matrices a weight is cut for one or two rows."""
MIN_SLICED_WEIGHT = 1 << 17
"""Numbers in a weight from which on that is faster: half a MiB in float32, more than a core's cache."""


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
        position_base: The longest wavelength of the sinusoids over 2π (sinusoidal).
        clamp_len: Distances beyond this have the same sinusoid (sinusoidal); all differ if not given.
        kernel: The kernel; ``"auto"``: the fastest, or the one that the variable ``MEMFORMERS_KERNEL`` names.

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
        position_base: Positive = POSITION_BASE,
        clamp_len: Count | None = None,
        kernel: KernelName = "auto",
    ):
        super().__init__()
        check_heads(heads, d_model)
        check_positions(positions, position_features, clamp_len)
        d_head = d_model // heads
        self.heads, self.d_model, self.dropout_prob = heads, d_model, dropout_prob
        self.positions, self.max_positions, self.clamp_len = positions, max_positions, clamp_len
        chosen = os.environ.get(KERNEL_VARIABLE, kernel) if kernel == "auto" else kernel
        check_value(KERNEL_VARIABLE, chosen, KernelName)
        features = position_features or d_model
        self.has_rotations = has_rotations(positions, features, clamp_len)
        if chosen == "flash":
            check_rotations(positions, features, clamp_len)
        self.kernel: KernelName = chosen  # type: ignore[assignment]
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.u = nn.Parameter(torch.empty(heads, d_head))
        if positions == "learned":
            self.r = nn.Parameter(torch.empty(heads, max_positions, d_head))
            self.s = nn.Parameter(torch.empty(heads, max_positions))
        else:
            self.position_features = features
            self.position_base = position_base
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
    ) -> Tensor:
        """Attend from ``query [S, B, D]`` to ``key`` and ``value [K, B, D]``, oldest first: ``[S, B, D]``.

        ``mask`` is boolean ``[S, K, B]`` or ``[S, K, 1]``, true where a query may look, None for causal;
        ``key_start`` int64 ``[B, S]``, the first key that each query may see, at most its own, K − S + i.
        Raises ValueError for other shapes, too many keys, and a mask that shows the future or hides all keys.
        """
        self._check_shapes(query, key, value)
        mask, key_start = visible_keys(mask, key_start, len(query), len(key), query.shape[1])
        return self.attend(self.query(query), self.key(key), self.value(value), mask, key_start)

    def forward_with_memory(
        self, x: Tensor, keys: Tensor, past: Tensor, norm: nn.LayerNorm | None, key_start: Tensor | None
    ) -> Tensor:
        """``forward`` for ``query=norm(x)`` and ``key=value=norm([past; keys])``, of ``x`` and ``keys [S, B,
        D]`` and ``past [M, B, D]``: ``[S, B, D]``, if [`can_fold`][]. With the norm's scale and shift folded
        into the maps, remembered vectors don't need their gradient: a training step with M > S takes 4 to 8 %
        less time."""
        if norm is not None:
            past, of_keys = (F.layer_norm(t, norm.normalized_shape, eps=norm.eps) for t in (past, keys))
            x = of_keys if keys is x else F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
            keys = of_keys
        query = F.linear(x, *folded(norm, self.query))  # [S, B, D]
        key, value = (
            torch.cat((F.linear(past, weight, bias), F.linear(keys, weight, bias)))  # [M + S, B, D]
            for weight, bias in (folded(norm, self.key), folded(norm, self.value))
        )
        return self.attend(query, key, value, None, key_start)

    def can_fold(self, norm: nn.Module | None) -> bool:
        """Whether the weights alone determine the output: none of the maps, ``norm`` and this module was
        wrapped, hooked or replaced."""
        maps = (self.query, self.key, self.value)
        norm_is_plain = norm is None or (is_unmodified(norm, nn.LayerNorm) and norm.bias is not None)
        return (
            norm_is_plain
            and all(is_unmodified(linear, nn.Linear) for linear in maps)
            and is_unmodified(self, RelativeMultiHeadAttention)
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, key_start: Tensor | None
    ) -> Tensor:
        """Attention of a projected ``query [S, B, D]`` to projected ``key`` and ``value [K, B, D]``, with
        ``mask [B or 1, 1, S, K]`` and ``key_start [B, S]``, and the output map: ``[S, B, D]``."""
        if mask is not None and self.kernel == "blocked":
            raise UserError("kernel='blocked' is causal and takes no mask; use kernel='auto' or 'naive'.")
        if self.kernel == "blocked" and query.device.type != "cpu":
            raise UserError(
                f"kernel='blocked' runs on a CPU, but the model is on {query.device}; use kernel='auto'."
            )
        heads = (self.by_head(x) for x in (query, key, value))
        attended = self.attend_by_head(*heads, mask=mask, key_start=key_start)
        return linear(self.output, rearrange(attended, "b h s e -> s b (h e)"))

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
        K = key.shape[2]
        dropout_prob = self.dropout_prob if self.training else 0.0
        if self.uses_flash(query, dropout_prob):
            return flash.relative_attention(
                query, key, value, *self.position_factors(K), u=self.u, v=self.v, mask=mask,
                key_start=key_start, dropout_prob=dropout_prob,
            )  # fmt: skip
        return relative_attention(
            query, key, value, **self.distance_terms(K), mask=mask, key_start=key_start,
            dropout_prob=dropout_prob, kernel=self.kernel,
        )  # fmt: skip

    def by_head(self, x: Tensor) -> Tensor:
        """``[t, B, D]`` in the order of the kernels, ``[B, H, t, E]``."""
        return rearrange(x, "t b (h e) -> b h t e", h=self.heads)

    @torch.no_grad()
    def probabilities(
        self, *, query: Tensor, key: Tensor, mask: Tensor | None = None, key_start: Tensor | None = None
    ) -> Tensor:
        """Attention ``[B, H, S, K]`` of ``query [S, B, D]`` to ``key [K, B, D]``, by head, without
        gradient."""
        self._check_shapes(query, key, key)
        mask, key_start = visible_keys(mask, key_start, len(query), len(key), query.shape[1])
        query, key = self.by_head(self.query(query)), self.by_head(self.key(key))
        terms = self.distance_terms(key.shape[2])
        return attention_probabilities(query, key, **terms, mask=mask, key_start=key_start)

    def distance_terms(self, K: int) -> dict[str, Tensor]:
        """The kernel's r ``[H, K, E]``, u, and the scheme's s ``[H, K]`` or v, for K distances."""
        if self.positions == "learned":
            if self.max_positions < K:
                raise UserError(
                    f"expected at most max_positions={self.max_positions}, got {K} positions of memory and "
                    f"segment; build with max_positions={K}, use positions='sinusoidal', or shorten either."
                )
            return {"r": self.r[:, :K], "s": self.s[:, :K], "u": self.u}
        table = sinusoid_table(K, self.position_features, self.clamp_len, self.position_base, self.u.detach())
        r = rearrange(self.position(table), "k (h e) -> h k e", h=self.heads)
        return {"r": r, "u": self.u, "v": self.v}

    def uses_flash(self, query: Tensor, dropout_prob: float) -> bool:
        """Whether the flash kernel computes attention of ``query [B, H, S, E]``: where it was named, or, by
        ``"auto"``, where it is faster. PyTorch's for CPUs drops no probabilities."""
        if self.kernel == "flash":
            return True
        return (
            self.kernel == "auto"
            and self.has_rotations
            and is_unmodified(self.position, nn.Linear)
            and not dropout_prob
            and is_flash_faster(query, self.position_features)
        )

    def position_factors(self, K: int) -> tuple[Tensor, Tensor]:
        """The factors of r for K distances: W_R by head ``[H, E, P]``, and sinusoids ``[K, P]``."""
        if not is_unmodified(self.position, nn.Linear):
            raise UserError(
                "kernel='flash' reads the weight of the map W_R, position, which was wrapped, hooked or "
                "replaced; use kernel='auto'."
            )
        table = sinusoid_table(K, self.position_features, self.clamp_len, self.position_base, self.u.detach())
        return rearrange(self.position.weight, "(h e) p -> h e p", h=self.heads), table

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        B, D = query.shape[1:] if query.dim() == 3 else (0, 0)
        if self.d_model != D or key.shape[1:] != (B, D) or key.shape != value.shape:
            got = [list(x.shape) for x in (query, key, value)]
            raise UserError(f"expected query [S, B, D], key, value [K, B, D], D={self.d_model}, got {got}.")
        if len(key) < len(query):
            raise UserError(f"expected at least {len(query)} keys, one for each query, got {len(key)}.")


def visible_keys(
    mask: Tensor | None, key_start: Tensor | None, S: int, K: int, B: int
) -> tuple[Tensor | None, Tensor | None]:
    """``mask [S, K, B or 1]`` and ``key_start [B, S]`` as kernels take them: either a mask ``[B or 1, 1, S,
    K]`` that hides what any of them and causality hide, or only the ``key_start``. UserError for a mask that
    shows the future or hides every key, as far as its values can be read without waiting for a device."""
    if key_start is not None:
        if key_start.dtype != torch.int64 or key_start.shape != (B, S):
            got = f"{key_start.dtype} {list(key_start.shape)}"
            raise UserError(f"expected key_start as int64 [{B}, {S}], each query's first key, got {got}.")
        if is_concrete_cpu(key_start) and bool((key_start > torch.arange(K - S, K)).any()):
            raise UserError(f"key_start must be at most {K - S} + i: a query always sees its own key.")
    if mask is None:
        return None, key_start
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        got = f"{mask.dtype} {list(mask.shape)}"
        raise UserError(f"expected a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1], got {got}.")
    past = causal_mask(S, K, mask.device)[:, :, None]
    visible = mask & past
    if key_start is not None:
        visible = visible & rearrange(from_key_start(key_start, K), "b 1 s k -> s k b")
    if is_concrete_cpu(mask):
        if bool((future := mask & ~past).any()):
            i, j, b = future.nonzero()[0].tolist()
            raise UserError(f"the mask lets query {i} of stream {b} see the future key {j}; mask such keys.")
        if bool((blind := ~visible.any(dim=1)).any()):
            i, b = blind.nonzero()[0].tolist()
            raise UserError(
                f"the mask leaves query {i} of stream {b} with no visible key; every query must see its own."
            )
    return rearrange(visible, "s k b -> b 1 s k"), None


_TABLES: dict[tuple[object, ...], Tensor] = {}
"""The longest table of each kind that was asked for; all layers and models share it."""


def sinusoids(
    distances: int, features: int, clamp_len: int | None = None, base: float = POSITION_BASE
) -> Tensor:
    """Features of 0 … distances−1, at most ``clamp_len``: ``[distances, features]`` in float64, first
    sines, then cosines, of wavelengths from 2π to almost ``base``·2π (Vaswani et al. 2017, section 3.5)."""
    rates = base ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    at = torch.arange(distances, dtype=torch.float64).clamp(max=distances if clamp_len is None else clamp_len)
    angles = at[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :features]


def sinusoid_table(distances: int, features: int, clamp_len: int | None, base: float, like: Tensor) -> Tensor:
    """[`sinusoids`][] in the dtype and on the device of ``like``, a tensor of any shape: ``[distances,
    features]`` of a table that is computed once in a process; programs of ``torch.export`` compute it."""
    if torch.compiler.is_exporting():
        return sinusoids(distances, features, clamp_len, base).to(like)
    if torch.compiler.is_compiling():
        return copied_table(distances, features, clamp_len, base, like)
    mode = like.fake_mode if isinstance(like, FakeTensor) else None
    kind = (features, clamp_len, base, like.dtype, like.device, mode)
    if kind not in _TABLES or len(_TABLES[kind]) < distances:
        with torch.inference_mode(False):  # a tensor of inference mode can't be used in training
            _TABLES[kind] = sinusoids(distances, features, clamp_len, base).to(like.device, like.dtype)
    return _TABLES[kind][:distances]


@torch.library.custom_op("memformers::sinusoid_table", mutates_args=())
def copied_table(distances: int, features: int, clamp_len: int | None, base: float, like: Tensor) -> Tensor:
    """A copy of it, ``[distances, features]``: ``torch.compile`` takes a function's constant only once."""
    return sinusoid_table(distances, features, clamp_len, base, like).clone()


@copied_table.register_fake
def _(distances: int, features: int, clamp_len: int | None, base: float, like: Tensor) -> Tensor:
    return like.new_empty(distances, features)


def is_unmodified(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether ``module`` is exactly of this ``kind`` and calling it computes what its weights say: it has no
    hooks, nor are there global ones, its ``forward`` was not replaced, and its weights are plain tensors.
    Wrapped and parametrized modules are of another kind; weight norm and pruning are hooks; quantized and
    sharded modules are of another kind or have other tensors."""
    if type(module) is not kind or is_hooked(module):
        return False
    for weight in module._parameters.values():
        if type(weight) not in PLAIN_WEIGHTS and not isinstance(weight, FakeTensor):  # of torch.export
            return False
    return True


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its class says, or is seen by somebody."""
    state = module.__dict__
    return bool(
        "forward" in state
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _has_any_global_hook()
    )


def folded(norm: nn.LayerNorm | None, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight ``[out, in]`` and bias ``[out]`` of ``linear`` after the scale γ and the shift β of ``norm``, if
    there is one: W(γ ∘ x̂ + β) = (W ∘ γ)x̂ + Wβ."""
    weight, bias = linear.weight, linear.bias
    if norm is None:
        return weight, weight.new_zeros(linear.out_features) if bias is None else bias
    shift = weight @ norm.bias
    return weight * norm.weight, shift if bias is None else shift + bias


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, ``[·, in]`` to ``[·, out]``; without gradient by [`product`][], if nobody changed it."""
    if torch.is_grad_enabled() or not is_unmodified(module, nn.Linear):
        return module(x)
    return product(x, module.weight, module.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [·, in]`` times ``weight [out, in]``, plus ``bias [out]``: ``[·, out]``. For one or two rows, as in
    generation, PyTorch uses a single core; as a batched product with slices of the weight it uses all (on a
    CPU, in float32)."""
    inputs = x.shape[-1]
    is_large = weight.numel() >= MIN_SLICED_WEIGHT and len(weight) % SLICES == 0
    if x.numel() > 2 * inputs or not is_large or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, inputs)
    out = torch.bmm(rows.expand(SLICES, *rows.shape), weight.view(SLICES, -1, inputs).mT)
    out = out.transpose(0, 1).reshape(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias
