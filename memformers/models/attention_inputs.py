"""Checks of attention's arguments, and the masks that kernels take."""

import torch
from einops import rearrange
from torch import Tensor

from memformers.common.errors import UserError
from memformers.kernels import is_concrete_cpu
from memformers.kernels.naive import causal_mask, from_key_start


def check_shapes(query: Tensor, key: Tensor, value: Tensor, d_model: int) -> None:
    """UserError unless ``query`` is ``[S, B, D]``, and ``key`` and ``value`` are ``[K, B, D]`` with K ≥ S."""
    B, D = query.shape[1:] if query.dim() == 3 else (0, 0)
    if d_model != D or key.shape[1:] != (B, D) or key.shape != value.shape:
        shapes = [list(x.shape) for x in (query, key, value)]
        raise UserError(f"expected query [S, B, D], key, value [K, B, D], D={d_model}, got {shapes}.")
    if len(key) < len(query):
        raise UserError(f"expected at least {len(query)} keys, one for each query, got {len(key)}.")


def check_blocked(query: Tensor, mask: Tensor | None) -> None:
    """UserError for arguments that the blocked kernel doesn't support."""
    if mask is not None:
        raise UserError("kernel='blocked' is causal and takes no mask; use kernel='auto' or 'naive'.")
    if query.device.type != "cpu":
        raise UserError(
            f"kernel='blocked' runs on a CPU, but the model is on {query.device}; use kernel='auto'."
        )


def visible_keys(
    mask: Tensor | None, key_start: Tensor | None, S: int, K: int, B: int
) -> tuple[Tensor | None, Tensor | None]:
    """``mask [S, K, B or 1]`` and ``key_start [B, S]`` as kernels take them: either one mask ``[B or 1, 1, S,
    K]`` that combines both with causality, or only the ``key_start``. UserError for a mask that shows the
    future or hides every key, if its values can be read without waiting for a device."""
    if key_start is not None:
        check_key_start(key_start, S, K, B)
    if mask is None:
        return None, key_start

    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        raise UserError(
            f"expected a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1], got {mask.dtype} {list(mask.shape)}."
        )
    # Combine mask, causality and documents: each hides keys.
    causal = causal_mask(S, K, mask.device)[:, :, None]  # [S, K, 1]
    visible = mask & causal  # [S, K, B or 1]
    if key_start is not None:
        visible = visible & rearrange(from_key_start(key_start, K), "b 1 s k -> s k b")
    if is_concrete_cpu(mask):
        check_mask(mask & ~causal, visible)
    return rearrange(visible, "s k b -> b 1 s k"), None


def check_key_start(key_start: Tensor, S: int, K: int, B: int) -> None:
    if key_start.dtype != torch.int64 or key_start.shape != (B, S):
        raise UserError(
            f"expected key_start as int64 [{B}, {S}], each query's first key, got {key_start.dtype} "
            f"{list(key_start.shape)}."
        )
    if is_concrete_cpu(key_start) and bool((key_start > torch.arange(K - S, K)).any()):
        raise UserError(f"key_start must be at most {K - S} + i: a query always sees its own key.")


def check_mask(future: Tensor, visible: Tensor) -> None:
    """UserError if a mask shows a ``future`` key, or leaves a query without a ``visible`` key. Both are
    boolean, ``[S, K, B or 1]``."""
    if bool(future.any()):
        i, j, b = future.nonzero()[0].tolist()
        raise UserError(f"the mask lets query {i} of stream {b} see the future key {j}; mask such keys.")
    is_blind = ~visible.any(dim=1)  # [S, B or 1]
    if bool(is_blind.any()):
        i, b = is_blind.nonzero()[0].tolist()
        raise UserError(
            f"the mask leaves query {i} of stream {b} with no visible key; every query must see its own."
        )
