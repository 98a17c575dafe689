"""Relative attention with sinusoidal positions by PyTorch's plain flash kernel, without a bias and without a
relative shift.

The position score of query i and key j is (q_i + v) · W_R · sinusoid(i − j). Let f = W_Rᵀ (q_i + v) be the
query's features, of which f_s meets the sines and f_c the cosines. For each rate ω,

    f_s sin ω(i − j) + f_c cos ω(i − j)
        = (f_s sin ωi + f_c cos ωi) cos ωj + (f_c sin ωi − f_s cos ωi) sin ωj,

since sines and cosines of a difference are sums of products. So the features, rotated by the query's index,
meet a table by the key's index, and the whole score is one product of E + P features:

    score(i, j) = [q_i + u ; rotated f] · [k_j ; cos ωj, sin ωj] / √E

It pays for few position features P, since PyTorch's kernel also wants values of E + P features.
"""

import math
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive

WORKSPACE = 1 << 18
"""Numbers in the copies of keys that one call of PyTorch's kernel gets: 1 MiB in float32, about half of a
core's cache. Copies of all keys and values would double the memory of attention."""
SPLIT = 256
"""Queries from which skipping their future saves more than a second call costs."""
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None,
    mask: Tensor | None = None, key_start: Tensor | None = None, dropout_prob: float = 0.0,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.naive.relative_attention`][] for r = W_R · sinusoid(d): ``[B, H, S, E]``.

    Shapes: ``w [H, E, P]``, W_R by head, with an even P; ``table [K, P]``, the sinusoids of 0 … K−1, first
    sines and then cosines; the others as there. Keys must be finite, hidden ones too. In half precision,
    the rotated features and the table are rounded, like queries and keys.
    """
    S, E = query.shape[2:]
    K = key.shape[2]
    key, value = _in_autocast_dtype(key, value)
    query = score_queries(query, w, table, u=u, v=v).to(key.dtype)  # [B, H, S, E + P]
    table = key_table(table).to(key.dtype)  # [K, P]
    is_plain = mask is None and key_start is None
    bias = None if is_plain and is_split(S, K) else hidden_bias(S, K, mask, key_start, query)
    if query.device.type == "cpu" and not dropout_prob:
        return flash_attention(query, key, value, table, bias)[0]
    key = _beside(key, table)
    value = _padded(value, E + table.shape[1])
    bias = hidden_bias(S, K, mask, key_start, query) if bias is None else bias
    attended = F.scaled_dot_product_attention(query, key, value, bias, dropout_prob, scale=1 / math.sqrt(E))
    return attended[..., :E]


def score_queries(query: Tensor, w: Tensor, table: Tensor, *, u: Tensor, v: Tensor | None) -> Tensor:
    """What meets keys and a [`key_table`][] in one product, of ``query [B, H, S, E]``, the last S of the
    indices in ``table [K, P]``: q + u, and the rotated features, ``[B, H, S, E + P]``."""
    # The sums and rotations are exact in half precision too: only their results are rounded.
    exact = torch.promote_types(query.dtype, torch.float32)
    query, w, u, table = query.to(exact), w.to(exact), u.to(exact), table.to(exact)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
        with_v = query if v is None else query + v.to(exact)[:, None]
        features = torch.einsum("bhse,hep->bhsp", with_v, w)  # [B, H, S, P]
    for_sines, for_cosines = features.chunk(2, dim=-1)  # [B, H, S, P / 2] each
    sines, cosines = table[len(table) - query.shape[2] :].chunk(2, dim=-1)  # [S, P / 2] each
    meets_cosines = for_sines * sines + for_cosines * cosines
    meets_sines = for_cosines * sines - for_sines * cosines
    return torch.cat((query + u[:, None], meets_cosines, meets_sines), dim=-1)


def key_table(table: Tensor) -> Tensor:
    """What the rotated features of queries meet, of the sinusoids ``table [K, P]``: first cosines, then
    sines, ``[K, P]``."""
    sines, cosines = table.chunk(2, dim=-1)
    return torch.cat((cosines, sines), dim=-1)


def is_split(S: int, K: int) -> bool:
    """Whether memory and segment are attended to by two calls, and joined: PyTorch's kernel then needs no
    mask and leaves out the future."""
    return S >= SPLIT or S == K


def hidden_bias(S: int, K: int, mask: Tensor | None, key_start: Tensor | None, like: Tensor) -> Tensor:
    """−∞ where a query does not see a key, else 0, in the dtype and on the device of ``like``: ``[S, K]``
    where only the future is hidden, else ``[B or 1, 1, S, K]``."""
    if mask is None and key_start is None:
        return like.new_full((S, K), -math.inf).triu_(K - S + 1)
    visible = naive.causal_mask(S, K, like.device) if mask is None else mask
    if key_start is not None:
        visible = visible & naive.from_key_start(key_start, K)
    return like.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)


def _in_autocast_dtype(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch's attention would compute with under autocast."""
    device = "cpu" if key.is_meta else key.device.type
    if not torch.is_autocast_enabled(device) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(device)
    return key.to(dtype), value.to(dtype)


def _pairs(key: Tensor, features: int) -> Iterator[tuple[slice, slice]]:
    """Streams and heads of ``key [B, H, K, E]`` whose copies fit the workspace: all heads of some streams, or
    some heads of one. At least one pair, and the same for all streams."""
    B, H, K, _ = key.shape
    n = max(WORKSPACE // (K * features), 1)
    streams = max(min(B, n // H), 1)
    heads = min(H, n)
    for stream in range(0, B, streams):
        for head in range(0, H, heads):
            yield slice(stream, stream + streams), slice(head, head + heads)


def _parts(S: int, K: int, bias: Tensor | None) -> list[tuple[slice, bool]]:
    """The keys of each call, and whether it is causal: all, with a ``bias``, or memory and segment."""
    if bias is not None:
        return [(slice(0, K), False)]
    segment = (slice(K - S, K), True)
    return [segment] if S == K else [(slice(0, K - S), False), segment]


def _beside(key: Tensor, table: Tensor) -> Tensor:
    """``key [B, H, K, E]`` and ``table [K, P]`` beside each other, ``[B, H, K, E + P]``."""
    return torch.cat((key, table.expand(*key.shape[:3], -1)), dim=-1)


def _padded(x: Tensor, features: int) -> Tensor:
    """``x [B, H, t, E]`` and zeros behind it, ``[B, H, t, features]``."""
    return F.pad(x, (0, features - x.shape[-1]))


def _bias_of(bias: Tensor | None, streams: slice, heads: slice) -> Tensor | None:
    """The ``bias [S, K]`` or ``[B or 1, H or 1, S, K]`` of these streams and heads."""
    if bias is None or bias.dim() == 2:
        return bias
    bias = bias[streams] if bias.shape[0] > 1 else bias
    return bias[:, heads] if bias.shape[1] > 1 else bias


def _join(outputs: list[Tensor], sums: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys, of that to each part ``[B, H, S, ·]`` and its ``sums [B, H, S]``, logarithms."""
    if len(outputs) == 1:
        return outputs[0], sums[0]
    total = torch.logaddexp(sums[0], sums[1])
    shares = ((part - total).exp()[..., None] for part in sums)
    joined = sum(output * share for output, share in zip(outputs, shares, strict=True))
    return joined, total  # type: ignore[return-value]


@torch.library.custom_op("memformers::flash_attention", mutates_args=(), device_types="cpu")
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of ``query [B, H, S, E + P]`` to ``key [B, H, K, E]`` beside ``table [K, P]``, and ``value
    [B, H, K, E]``, with ``bias [S, K]`` or ``[B or 1, H or 1, S, K]``, None for causal: ``[B, H, S, E]``,
    and the logarithms of the sums of exponentials, ``[B, H, S]``."""
    B, H, S, features = query.shape
    K, E = key.shape[2:]
    output = query.new_empty(S, B, H, E).permute(1, 2, 0, 3)
    sums = query.new_empty(B, H, S, dtype=torch.promote_types(query.dtype, torch.float32))
    for streams, heads in _pairs(key, features):
        outputs = []
        part_sums = []
        for keys, is_causal in _parts(S, K, bias):
            attended, logarithms = _FORWARD(
                query[streams, heads],
                _beside(key[streams, heads, keys], table[keys]),
                _padded(value[streams, heads, keys], features),
                0.0,
                is_causal,
                attn_mask=_bias_of(bias, streams, heads),
                scale=1 / math.sqrt(E),
            )
            outputs.append(attended[..., :E])
            part_sums.append(logarithms)
        output[streams, heads], sums[streams, heads] = _join(outputs, part_sums)
    return output, sums


@torch.library.custom_op("memformers::flash_attention_backward", mutates_args=(), device_types="cpu")
def flash_attention_backward(
    grad: Tensor, output: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, table: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, in their shapes, from that of the output, ``[B, H, S, E]``."""
    S, features = query.shape[2:]
    K, E = key.shape[2:]
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    for streams, heads in _pairs(key, features):
        part_grad = _padded(grad[streams, heads], features)
        part_output = _padded(output[streams, heads], features)
        d_queries = []
        for keys, is_causal in _parts(S, K, bias):
            # With output and sums of all keys, each call gives its share of the gradients.
            gradients = _BACKWARD(
                part_grad,
                query[streams, heads],
                _beside(key[streams, heads, keys], table[keys]),
                _padded(value[streams, heads, keys], features),
                part_output,
                sums[streams, heads],
                0.0,
                is_causal,
                attn_mask=_bias_of(bias, streams, heads),
                scale=1 / math.sqrt(E),
            )
            d_queries.append(gradients[0])
            d_key[streams, heads, keys] = gradients[1][..., :E]
            d_value[streams, heads, keys] = gradients[2][..., :E]
        d_query[streams, heads] = d_queries[0] if len(d_queries) == 1 else d_queries[0] + d_queries[1]
    return d_query, d_key, d_value


@flash_attention.register_fake
def _(query, key, value, table, bias):  # type: ignore[no-untyped-def]
    B, H, S, _ = query.shape
    output = query.new_empty(S, B, H, key.shape[3]).permute(1, 2, 0, 3)
    return output, query.new_empty(B, H, S, dtype=torch.promote_types(query.dtype, torch.float32))


@flash_attention_backward.register_fake
def _(grad, output, sums, query, key, value, table, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *flash_attention_backward(grad, *ctx.saved_tensors), None, None


def _no_second_derivative(*_: object) -> NoReturn:
    raise NotImplementedError(
        "the flash kernel, which kernel='auto' chooses for some sizes, has no second derivative; build the "
        "model with kernel='naive' to compute one."
    )


flash_attention.register_autograd(_backward, setup_context=_setup_context)
flash_attention_backward.register_autograd(_no_second_derivative)
