"""Documents in a batch of streams: which keys a query may see, and how much of a memory belongs to the
current document of each stream."""

import torch
from torch import Tensor


def newest_start(doc_starts: Tensor) -> Tensor:
    """The index of the newest of ``doc_starts [S, B]`` by each position, or −1: int64 ``[S, B]``."""
    indices = torch.arange(len(doc_starts), device=doc_starts.device)[:, None]
    return torch.where(doc_starts, indices, -1).cummax(0).values


def first_visible_key(
    x: Tensor, past: int, visible: Tensor | None, doc_starts: Tensor | None, window: int | None
) -> Tensor | None:
    """The first key that each query of ``x [S, B, ·]`` may see, int64 ``[B, S]``, None for 0: of its
    document, by ``doc_starts [S, B]`` and ``visible [B]`` of ``past`` keys, and of the ``window`` newest
    keys."""
    S, B = x.shape[:2]
    first = None if visible is None else (past - visible)[:, None].expand(-1, S)
    if doc_starts is not None:
        newest = newest_start(doc_starts).T  # [B, S]
        first = torch.where(newest < 0, 0 if first is None else first, past + newest)
    if window is None or window >= past + S:
        return first
    nearest = torch.arange(past + 1, past + S + 1, device=x.device).sub(window).clamp(min=0).expand(B, S)
    return nearest if first is None else torch.maximum(first, nearest)


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
    """How many of the oldest of ``slots`` new slots their loss ignores, int64 ``[B]``: those of positions
    before the document of ``valid [B]``; all if one starts in the segment after ``doc_starts[0]``, since some
    queries belong to that before it. One of ``valid`` and ``doc_starts [S, B]`` may be None."""
    if valid is None:
        assert doc_starts is not None
        return doc_starts[1:].any(0) * slots
    masked = (mem_len - valid + rate - 1).div(rate, rounding_mode="floor").clamp(0, slots)
    return masked if doc_starts is None else masked.masked_fill(doc_starts[1:].any(0), slots)
