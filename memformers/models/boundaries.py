"""Where documents begin: what a query may see then, and how much of a memory belongs to its document.

Several documents follow each other in a stream. ``doc_starts [S, B]`` is true where a new one begins in a
segment, and a memory's ``valid [B]`` says how many of each stream's newest positions belong to the running
document, where a slot stands for ``rate`` (c) of them. What lies before is hidden, but kept, so that shapes
stay the same. A slot is seen only if every position that it stands for belongs to the running document.
"""

import torch
from torch import Tensor

from memformers.common.errors import UserError

EVERYTHING = 1 << 62
"""A number of positions for all that a memory has, of any length."""


def check_starts(doc_starts: Tensor | None, x: Tensor) -> None:
    """Raise UserError unless ``doc_starts`` is boolean ``[S, B]`` for a segment ``x [S, B, ·]``, or None."""
    said = "doc_starts, true where a document begins,"
    check_streams(said, doc_starts, torch.bool, x.shape[:2], x.device)


def check_streams(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    """Raise UserError, with the ``name``, unless ``tensor``, of any shape, is None or has this dtype,
    shape and device."""
    if tensor is None:
        return
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise UserError(
            f"expected {name} as {dtype} {list(shape)} on {device}, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}."
        )


def newest_start(doc_starts: Tensor) -> Tensor:
    """For each position of ``doc_starts [S, B]``, the index of the newest start at or before it, −1 where
    there is none: int64 ``[S, B]``."""
    indices = torch.arange(len(doc_starts), device=doc_starts.device)[:, None]
    return torch.where(doc_starts, indices, -1).cummax(0).values


def seen_of_past(valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
    """How many keys of a past of ``mem_len`` positions and ``c_mem_len`` slots belong to the running document
    with ``valid [B]`` positions: int64 ``[B]``."""
    slots = (valid - mem_len).div(rate, rounding_mode="floor")
    return valid.clamp(0, mem_len) + slots.clamp(0, c_mem_len)


def first_of_document(
    doc_starts: Tensor | None, seen: Tensor | None, segment_len: int, past: int
) -> Tensor | None:
    """The first key that each query of a segment may see: the first of its document, int64 ``[B, S]``, of
    ``doc_starts [S, B]``, where of ``past`` keys the newest ``seen [B]`` belong to the running document; None
    where both are None, and all is seen."""
    before = None if seen is None else past - seen  # [B]
    if doc_starts is None:
        return None if before is None else before[:, None].expand(-1, segment_len)
    newest = newest_start(doc_starts).T  # [B, S]
    before = newest.new_zeros(len(newest)) if before is None else before
    return torch.where(newest < 0, before[:, None], past + newest)


def first_in_window(x: Tensor, key_start: Tensor | None, K: int, window: int | None) -> Tensor | None:
    """``key_start [B, S]``, or later: the first of the ``window`` newest keys up to the query's own, of each
    query of ``x [S, B, ·]`` among K keys; None where every query sees all keys up to its own."""
    if window is None or window >= K:
        return key_start
    S, B = x.shape[:2]
    nearest = torch.arange(K - S + 1, K + 1, device=x.device).sub(window).clamp(min=0).expand(B, S)
    return nearest if key_start is None else torch.maximum(key_start, nearest)


def valid_afterwards(
    valid: Tensor | None, doc_starts: Tensor | None, segment_len: int, before: int, after: int
) -> Tensor | None:
    """The ``valid [B]`` of the memory after a segment with ``doc_starts [S, B]``, where ``before`` positions
    were remembered and ``after`` are: int64 ``[B]``, at most ``after``; None where both are None."""
    if valid is None and doc_starts is None:
        return None
    if doc_starts is None:
        assert valid is not None
        return (valid.clamp(0, before) + segment_len).clamp(max=after)
    newest = newest_start(doc_starts)[-1]  # [B]
    old = newest.new_full(newest.shape, before) if valid is None else valid.clamp(0, before)
    return torch.where(newest < 0, old + segment_len, segment_len - newest).clamp(max=after)


def slots_left_out(
    valid: Tensor | None, doc_starts: Tensor | None, mem_len: int, slots: int, rate: int
) -> Tensor:
    """How many of the oldest of ``slots`` new slots the reconstruction loss leaves out, int64 ``[B]``, for
    ``valid [B]`` and ``doc_starts [S, B]``, of which one may be None.

    These are the slots that represent any of the ``mem_len`` remembered positions before the running
    document. If a document begins within the segment, they are all slots, since some queries belong to the
    document before it.
    """
    if doc_starts is None:
        assert valid is not None
        return slots_to_cover(mem_len - valid, rate).clamp(0, slots)
    hidden = torch.zeros_like(doc_starts[0], dtype=torch.int64) if valid is None else mem_len - valid
    hidden = hidden.masked_fill(doc_starts[0], mem_len)  # positions
    return slots_to_cover(hidden, rate).clamp(0, slots).masked_fill(doc_starts[1:].any(0), slots)


def slots_to_cover(positions: Tensor, rate: int) -> Tensor:
    """The number of slots of ``rate`` positions that hold ``positions``, of any shape, rounded up."""
    return (positions + rate - 1).div(rate, rounding_mode="floor")
