"""What attention can be built from and called with: each check raises ValueError for what it can't."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

from memformers.common.errors import UserError
from memformers.kernels.dispatch import KernelName, obstacle
from memformers.kernels.naive import causal_mask, from_key_start
from memformers.models.lengths import by_layer

Positions = Literal["learned", "sinusoidal"]


def check_features(features: int | None, positions: Positions) -> None:
    """Raise ValueError for position features that can't be, or not with these positions."""
    if features is not None and features < 1:
        raise UserError(f"position_features={features} can't represent distances; use at least 1.")
    if features is not None and positions == "learned":
        raise UserError(
            f"position_features={features} is for sinusoids, which positions='learned' doesn't have; leave "
            f"it out, or use positions='sinusoidal'."
        )


def check_clamp(clamp_len: int | None, positions: Positions) -> None:
    """Raise ValueError for a longest distance that can't be, or not with these positions."""
    if clamp_len is None:
        return
    if clamp_len < 1:
        raise UserError(f"clamp_len={clamp_len} is too small; use at least 1, or leave it out.")
    if positions == "learned":
        raise UserError(
            f"clamp_len={clamp_len} is for sinusoids, which positions='learned' doesn't have; leave it out, "
            f"or use positions='sinusoidal'."
        )


def check_kernel(kernel: str) -> None:
    """Raise UserError for a kernel of another name."""
    if kernel not in get_args(KernelName):
        names = ", ".join(get_args(KernelName))
        raise UserError(f"kernel={kernel!r} is unknown; use one of {names}.")


def check_can_run(
    kernel: KernelName, mask: Tensor | None, dropout_prob: float, query: Tensor, *others: Tensor | None
) -> None:
    """Raise UserError, saying why, for a named kernel that can't compute attention of ``query [B, H, S, E]``
    and the ``others``."""
    if kernel != "auto" and (reason := obstacle(kernel, mask, dropout_prob, query, *others)):
        raise UserError(f"kernel='{kernel}' {reason}; use kernel='auto' or 'naive'.")


MOST_LAYERS = 10_000
"""The largest depth, far beyond any network."""
LONGEST = 2**31
"""The most that a length or a compression rate may be: products of two fit into 64 bits."""


def check_whole_numbers(config: object, names: Sequence[str]) -> None:
    """Raise UserError for a setting that is neither an int nor None, such as True, 1.5 or NumPy's numbers."""
    for name in names:
        value = getattr(config, name)
        if value is not None and type(value) is not int:
            raise UserError(f"{name}={value!r} is a {type(value).__name__}; give a whole number, an int.")


def check_by_layer(config: object, names: Sequence[str], n_layers: int, smallest: int) -> None:
    """Raise UserError for a setting that is neither a whole number nor a tuple with one for each of
    ``n_layers`` layers, or that is below the ``smallest``, 0 or 1, or beyond [`LONGEST`][]."""
    for name in names:
        value = getattr(config, name)
        for entry in value if isinstance(value, tuple) else (value,):
            if type(entry) is not int:
                raise UserError(
                    f"{name}={value!r} is a {type(entry).__name__}; give a whole number, an int, or a "
                    f"tuple of them, one for each layer."
                )
            if entry < smallest:
                wrong = "is negative; use 0 for none" if smallest == 0 else "is too small; use at least 1"
                raise UserError(f"{name}={value} {wrong}.")
            if entry > LONGEST:
                raise UserError(f"{name}={value} is too large; use at most {LONGEST:,}.")
        by_layer(value, n_layers, name)


def check_heads(heads: int, d_model: int) -> None:
    """Raise ValueError, naming widths that fit, unless ``heads`` divides ``d_model``."""
    if heads < 1 or d_model < 1:
        raise UserError(f"heads={heads} and d_model={d_model} must both be at least 1.")
    if d_model % heads:
        below, above = d_model // heads * heads, -(-d_model // heads) * heads
        such_as = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"d_model={d_model} is not divisible by heads={heads}; "
            f"use a multiple of {heads}, such as {such_as}."
        )


def check_dropout(dropout_prob: float) -> None:
    """Raise ValueError unless ``dropout_prob`` is in [0, 1)."""
    if not 0.0 <= dropout_prob < 1.0:
        raise UserError(f"dropout_prob={dropout_prob} is outside [0, 1); use 0 for no dropout.")


def check_mask(mask: Tensor, S: int, K: int, B: int) -> Tensor:
    """A usable boolean ``mask [S, K, B]`` or ``[S, K, 1]``; ValueError for one that isn't.

    On a GPU, which would have to be waited for, its values aren't read: keys of the future are hidden there,
    since they have no distance.
    """
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(S, K, B), (S, K, 1)}:
        raise UserError(
            f"a boolean mask [{S}, {K}, {B}] or [{S}, {K}, 1] (segment, keys, batch) was expected; "
            f"this one is {mask.dtype} {list(mask.shape)}."
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
    becomes ``[B, 1, S, K]`` or ``[1, 1, S, K]``, and takes in what ``key_start`` hides. ValueError for those
    that can't be."""
    if key_start is not None and (key_start.dtype != torch.int64 or key_start.shape != (B, S)):
        raise UserError(
            f"key_start was expected as int64 [{B}, {S}], the first key that each query may see; "
            f"{key_start.dtype} {list(key_start.shape)} came."
        )
    if mask is None:
        return None, key_start
    mask = check_mask(mask, S, K, B)
    if key_start is not None:
        mask = check_mask(mask & rearrange(from_key_start(key_start, K), "b 1 s k -> s k b"), S, K, B)
    return rearrange(mask, "s k b -> b 1 s k"), None


def check_memory(name: str, mem: Sequence[Tensor], x: Tensor, n_layers: int) -> None:
    """Raise ValueError unless ``mem``, empty or one tensor a layer, fits the input ``x [S, B, D]``."""
    if not mem:
        return
    if len(mem) != n_layers:
        raise UserError(
            f"{name} of {n_layers} layers was expected, one tensor each; this one has {len(mem)}. "
            f"Use a memory of this model."
        )
    for layer, tensor in enumerate(mem):
        expected, came = ["·", *x.shape[1:]], list(tensor.shape)
        if came[1:] != expected[1:] or len(came) != 3:
            raise UserError(
                f"{name} of layer {layer} was expected as [length, batch, d_model] = "
                f"[·, {x.shape[1]}, {x.shape[2]}]; it is {came}. Start from no memory for another "
                f"batch, and use a memory with the model that made it."
            )
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise UserError(
                f"{name} of layer {layer} is {tensor.dtype} on {tensor.device}, but the model works "
                f"in {x.dtype} on {x.device}; move it there, or start from no memory."
            )
