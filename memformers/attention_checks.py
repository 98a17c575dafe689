"""What attention can be built from and called with: each check raises ValueError for what it can't."""

from typing import Literal

import torch
from torch import Tensor

from memformers.kernels.dispatch import KernelName
from memformers.kernels.naive import causal_mask

Positions = Literal["learned", "sinusoidal"]


def check_features(features: int, positions: Positions, kernel: KernelName) -> None:
    """Raise ValueError for position features that can't be, or not with this kernel."""
    if features < 1:
        raise ValueError(f"position_features={features} tells no distances apart; use at least 1.")
    if kernel == "augmented" and positions == "learned":
        raise ValueError(
            "kernel='augmented' splits sines and cosines, and positions='learned' has none; use "
            "positions='sinusoidal' or another kernel."
        )
    if kernel == "augmented" and features % 2:
        raise ValueError(
            f"kernel='augmented' pairs each sine with its cosine; position_features={features} is odd."
        )


def check_clamp(clamp_len: int | None, positions: Positions, kernel: KernelName) -> None:
    """Raise ValueError for a longest distance that can't be, or not with these positions or this kernel."""
    if clamp_len is None:
        return
    if clamp_len < 1:
        raise ValueError(f"clamp_len={clamp_len} tells no distances apart; use at least 1, or leave it out.")
    if positions == "learned":
        raise ValueError(
            f"clamp_len={clamp_len} is for sinusoids, and positions='learned' has none; leave it out, or "
            f"use positions='sinusoidal'."
        )
    if kernel == "augmented":
        raise ValueError(
            f"kernel='augmented' splits distances into positions, which clamp_len={clamp_len} forbids; use "
            f"kernel='auto', or leave clamp_len out."
        )


def check_heads(heads: int, d_model: int) -> None:
    """Raise ValueError, naming widths that fit, unless ``heads`` divides ``d_model``."""
    if heads < 1 or d_model < 1:
        raise ValueError(f"heads={heads} and d_model={d_model} must both be at least 1.")
    if d_model % heads:
        below, above = d_model // heads * heads, -(-d_model // heads) * heads
        such_as = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"d_model={d_model} is not divisible by heads={heads}; "
            f"use a multiple of {heads}, such as {such_as}."
        )


def check_dropout(dropout_prob: float) -> None:
    """Raise ValueError unless ``dropout_prob`` is in [0, 1)."""
    if not 0.0 <= dropout_prob < 1.0:
        raise ValueError(f"dropout_prob={dropout_prob} is outside [0, 1); use 0 for no dropout.")


def check_mask(mask: Tensor, S: int, K: int, B: int) -> None:
    """Raise ValueError unless ``mask`` is a usable boolean ``[S, K, B]`` or ``[S, K, 1]``."""
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        raise ValueError(
            f"a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1] (segment, keys, batch) was expected; "
            f"this one is {mask.dtype} {list(mask.shape)}."
        )
    if torch.compiler.is_compiling():  # the checks below read values, which a graph can't
        return
    future = mask & ~causal_mask(S, K, mask.device)[:, :, None]
    if future.any():
        i, j, b = future.nonzero()[0].tolist()
        raise ValueError(
            f"the mask lets query {i} of stream {b} see key {j}, which lies in its future (its own "
            f"key is {K - S + i}); distances below 0 have no position, so hide those keys."
        )
    blind = ~mask.any(dim=1)
    if blind.any():
        i, b = blind.nonzero()[0].tolist()
        raise ValueError(f"the mask hides every key from query {i} of stream {b}; show it one.")
