"""What a query may see: ``doc_starts [S, B]`` is true where a document begins, ``valid [B]`` of the newest
positions, ``rate`` (c) in a slot, are of the running one. All before, its slots too, is kept but hidden."""

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.kernels.operators import has_values

EVERYTHING = 1 << 62
"""A number of positions for all that a memory has, of any length."""


def check_streams(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    """Raise UserError unless ``tensor``, of any shape, is None or has this dtype, shape and device."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise UserError(f"expected {name} as a torch.Tensor, got {type(tensor).__name__}; convert it.")
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise UserError(
            f"expected {name} as {dtype} {list(shape)} on {device}, got {tensor.dtype} {list(tensor.shape)} "
            f"on {tensor.device}; it must fit the model, batch and device of the input."
        )


def newest_start(doc_starts: Tensor) -> Tensor:
    """The index of the newest of ``doc_starts [S, B]`` by each position, or −1: int64 ``[S, B]``."""
    indices = torch.arange(len(doc_starts), device=doc_starts.device)[:, None]
    return torch.where(doc_starts, indices, -1).cummax(0).values


def seen_of_past(valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
    """How many keys of a past of M and C belong to the running document, of ``valid [B]``: int64 ``[B]``."""
    slots = (valid - mem_len).div(rate, rounding_mode="floor")
    return valid.clamp(0, mem_len) + slots.clamp(0, c_mem_len)


def first_seen(
    doc_starts: Tensor | None, seen: Tensor | None, window: int | None, x: Tensor, past: int
) -> Tensor | None:
    """The first key each query of ``x [S, B, ·]`` may see, int64 ``[B, S]``, None for 0: of its document,
    by ``doc_starts [S, B]`` and ``seen [B]`` of ``past`` keys, and of the ``window`` newest, its own too."""
    (S, B), device = x.shape[:2], x.device
    found = None if seen is None else (past - seen)[:, None].expand(-1, S)
    if doc_starts is not None:
        newest = newest_start(doc_starts).T  # [B, S]
        found = torch.where(newest < 0, 0 if found is None else found, past + newest)
    if window is None or window >= past + S:
        return found
    nearest = torch.arange(past + 1, past + S + 1, device=device).sub(window).clamp(min=0).expand(B, S)
    return nearest if found is None else torch.maximum(found, nearest)


def valid_afterwards(
    valid: Tensor | None, doc_starts: Tensor | None, segment_len: int, before: int, after: int
) -> Tensor | None:
    """The ``valid [B]`` of the memory after a segment with ``doc_starts [S, B]``, where ``before`` positions
    were remembered and ``after`` are: int64 ``[B]``; None where both are None."""
    if doc_starts is None:
        return None if valid is None else (valid.clamp(0, before) + segment_len).clamp(max=after)
    newest = newest_start(doc_starts)[-1]  # [B]
    old = newest.new_full(newest.shape, before) if valid is None else valid.clamp(0, before)
    return torch.where(newest < 0, old + segment_len, segment_len - newest).clamp(max=after)


def n_masked_slots(
    valid: Tensor | None, doc_starts: Tensor | None, mem_len: int, slots: int, rate: int
) -> Tensor:
    """How many of the oldest of ``slots`` new slots their loss leaves out, int64 ``[B]``: those of positions
    before the document of ``valid [B]``; all if one begins in the segment after ``doc_starts[0]``, since some
    queries belong to that before it. One of ``valid`` and ``doc_starts [S, B]`` may be None."""
    hidden = torch.zeros((), dtype=torch.int64) if valid is None else mem_len - valid  # positions
    if doc_starts is not None:
        hidden = torch.where(doc_starts[0], mem_len, hidden)
    masked = (hidden + rate - 1).div(rate, rounding_mode="floor").clamp(0, slots)
    return masked if doc_starts is None else masked.masked_fill(doc_starts[1:].any(0), slots)


def without_hidden(x: Tensor, hidden: Tensor) -> Tensor:
    """``x [t, B, D]`` with 0 for what is not finite where ``hidden [t, B]``: it would reach a gradient."""
    if has_values(x) and bool(x.sum().isfinite()):
        return x
    return x.masked_fill(hidden[..., None] & ~x.isfinite(), 0.0)
