"""Documents in a batch of streams: which keys a query may see, and how much of a memory belongs to the
current document of each stream."""

import torch
from torch import Tensor

UNBOUNDED = 1 << 62
"""A number of positions larger than any memory: all of them are valid."""


def newest_start(doc_starts: Tensor) -> Tensor:
    """For each position, the index of the newest of ``doc_starts [S, B]`` up to it, or −1: int64 ``[S,
    B]``."""
    indices = torch.arange(len(doc_starts), device=doc_starts.device)[:, None]
    return torch.where(doc_starts, indices, -1).cummax(0).values


def first_visible_key(
    x: Tensor, n_past: int, n_visible: Tensor | None, doc_starts: Tensor | None, window: int | None
) -> Tensor | None:
    """The first key that each query of ``x [S, B, ·]`` may see, int64 ``[B, S]``; None for 0. It belongs to
    the query's document (``doc_starts [S, B]``, and ``n_visible [B]`` of ``n_past`` keys) and to the
    ``window`` newest keys."""
    # The current document's start in memory.
    S, B = x.shape[:2]
    first = None
    if n_visible is not None:
        first = (n_past - n_visible)[:, None].expand(-1, S)
    # After a document start in the segment, that start counts.
    if doc_starts is not None:
        newest = newest_start(doc_starts).T  # [B, S]
        in_memory = 0 if first is None else first
        first = torch.where(newest < 0, in_memory, n_past + newest)
    # A shorter window hides more.
    if window is None or window >= n_past + S:
        return first
    own_key = torch.arange(n_past, n_past + S, device=x.device)  # [S]
    nearest = (own_key + 1 - window).clamp(min=0).expand(B, S)
    return nearest if first is None else torch.maximum(first, nearest)


def visible_past_keys(n_valid: Tensor, mem_len: int, n_slots: int, slot_positions: int | None) -> Tensor:
    """How many of the newest keys of M positions and C slots belong to the current document, which has
    ``n_valid [B]`` positions: int64 ``[B]``. A slot is visible only if every position that it summarizes
    belongs to the document: ``slot_positions`` of them, or for None all that are older than the newest M."""
    in_slots = n_valid - mem_len  # [B]
    if slot_positions is None:
        n_visible_slots = n_slots * (in_slots > 0)
    else:
        n_visible_slots = in_slots.div(slot_positions, rounding_mode="floor").clamp(0, n_slots)
    return n_valid.clamp(0, mem_len) + n_visible_slots


def document_length(n_valid: Tensor | None, doc_starts: Tensor | None, segment_len: int) -> Tensor | None:
    """The number of positions, int64 ``[B]``, of the document at the end of a segment with ``doc_starts [S,
    B]`` after a memory with ``n_valid [B]``. It is exact as far as the memory reaches, and a lower bound
    beyond. None if both are None: everything belongs to the document."""
    return valid_afterwards(n_valid, doc_starts, segment_len, UNBOUNDED, 2 * UNBOUNDED - 1)


def valid_afterwards(
    n_valid: Tensor | None, doc_starts: Tensor | None, segment_len: int, n_before: int, n_after: int
) -> Tensor | None:
    """The ``n_valid [B]`` of the memory after a segment with ``doc_starts [S, B]``, where ``n_before``
    positions were remembered and ``n_after`` are: int64 ``[B]``; None where both are None."""
    if doc_starts is None:
        if n_valid is None:
            return None
        return (n_valid.clamp(0, n_before) + segment_len).clamp(max=n_after)
    # Without a start, a stream's document continues; otherwise it begins at the newest start.
    newest = newest_start(doc_starts)[-1]  # [B]
    if n_valid is None:
        old = newest.new_full(newest.shape, n_before)
    else:
        old = n_valid.clamp(0, n_before)
    return torch.where(newest < 0, old + segment_len, segment_len - newest).clamp(max=n_after)
