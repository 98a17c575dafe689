"""Token by token in transformers' ``generate``, with rows of the same padding together."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.generation.stepper import Stepper
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory


@dataclass
class PaddingGroup:
    """The rows ``[n]`` of a batch with the same padding on the left, and the Stepper that reads them."""

    rows: Tensor
    n_padding: int
    stepper: Stepper


class Decoding:
    """What ``generate`` keeps between tokens and returns as ``cache``: a [`memformers.Stepper`][] for each
    group of rows, so that each row is continued exactly as alone, and the ids that have been read, which
    follow ``memory``."""

    is_compileable = False
    is_croppable = False
    is_linear = (True,)  # how transformers calls a cache that doesn't grow

    def __init__(self, model: MemoryLM, memory: Memory | None):
        self.model = model
        self.memory = memory
        self.groups: list[PaddingGroup] = []
        self.ids_by_call: list[Tensor] = []  # [B, ·] each, the prompts with padding
        self.is_resumed = False
        """Whether the next ids are all of the sequences, with those that have been read."""

    def read(self, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Read prompts ``[B, T]``, and then the ids ``[B, t]`` that follow, with an ``attention_mask`` for
        all ids so far: logits ``[B, 1, vocab_size]`` after the last. Raises ValueError for padding after an
        id, and after [`resume`][] for other ids than were read."""
        # What of the ids is new: a prompt, or all; or, after resume, what follows the ids that were read.
        is_prompt = not self.groups
        if is_prompt:
            self._open_groups(ids, attention_mask)
        elif self.is_resumed:
            ids = self._unread(ids, attention_mask)
            self.is_resumed = False
        else:
            check_unpadded(attention_mask, ids.shape[1])
            if ids.shape[1] == 1:  # a row that has ended gets padding, which may be outside the vocabulary
                ids = ids.where(ids < self.model.vocab_size, 0)

        # Each group's Stepper reads its rows, whose logits return to the order of the batch.
        logits = []
        for group in self.groups:
            first = group.n_padding if is_prompt else 0
            logits.append(group.stepper.read(ids[group.rows, first:].T)[-1])  # [n, vocab_size]
        self.ids_by_call.append(ids)
        order = torch.cat([group.rows for group in self.groups]).argsort()
        return torch.cat(logits)[order, None]

    def _open_groups(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        check_unpadded(attention_mask, 1)
        for rows, n_padding, _ in group_by_padding(ids, attention_mask):
            memory = None if self.memory is None else self.memory.streams(rows)
            stepper = Stepper(self.model, len(rows), memory)
            self.groups.append(PaddingGroup(rows, n_padding, stepper))

    def resume(self, batch: int, n_copies: int) -> "Decoding":
        """A copy for another ``generate`` of ``batch`` rows, each ``n_copies`` times, whose prompts start
        with the ids that were read. Raises ValueError for another number of rows."""
        rows = self._rows()
        if batch != len(rows):
            raise UserError(
                f"expected ids of the {len(rows)} rows that this cache has read, got {batch} rows."
            )
        resumed = self.select(rows.repeat_interleave(n_copies))
        resumed.is_resumed = True
        return resumed

    def _unread(self, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The columns of ``ids [B, T]`` after those that were read; ValueError unless these are the same."""
        read_ids = torch.cat(self.ids_by_call, dim=1)
        B, n_read = read_ids.shape
        if not self._continues(read_ids, ids, attention_mask):
            raise UserError(
                f"expected the {B} rows of {n_read} ids that this cache has read, as in the result's "
                f"sequences, and more after them, with their attention_mask, got {[*ids.shape]} other ids; "
                f"pass these, or no cache."
            )
        return ids[:, n_read:]

    def _continues(self, read_ids: Tensor, ids: Tensor, attention_mask: Tensor | None) -> bool:
        """Whether ``ids [B, T]`` begin with ``read_ids [B, t]``, T > t, and have the same padding."""
        B, n_read = read_ids.shape
        if len(ids) != B or ids.shape[1] <= n_read:
            return False
        is_id = torch.ones_like(ids, dtype=torch.bool)  # [B, T]
        for group in self.groups:
            is_id[group.rows, : group.n_padding] = False
        if attention_mask is None:
            has_same_padding = bool(is_id.all())
        else:
            has_same_padding = torch.equal(attention_mask.bool(), is_id)
        # What is in place of padding doesn't matter.
        is_same = (ids[:, :n_read] == read_ids) | ~is_id[:, :n_read]
        return has_same_padding and bool(is_same.all())

    def reorder_cache(self, chosen: Tensor) -> None:
        """Continue with the rows ``chosen [B]``, as beam search does within each prompt."""
        reordered = self.select(chosen)
        self.groups = reordered.groups
        self.ids_by_call = reordered.ids_by_call

    def select(self, chosen: Tensor) -> "Decoding":
        """A copy with the rows ``chosen [·]`` of this one, in this order."""
        selected = Decoding(self.model, None)
        selected.ids_by_call = [torch.cat(self.ids_by_call, dim=1)[chosen]]
        for group in self.groups:
            rows = torch.isin(chosen, group.rows).nonzero()[:, 0]  # [n], of the copy
            if len(rows):
                # group.rows is sorted, and its order is that of the Stepper's streams.
                streams = torch.searchsorted(group.rows, chosen[rows])
                stepper = select_streams(group.stepper, streams)
                selected.groups.append(PaddingGroup(rows, group.n_padding, stepper))
        return selected

    def __deepcopy__(self, _: object) -> "Decoding":
        """A copy that shares the model, whose weights are not the cache's."""
        return self.select(self._rows())

    def _rows(self) -> Tensor:
        return torch.cat([group.rows for group in self.groups]).sort().values


def select_streams(stepper: Stepper, streams: Tensor) -> Stepper:
    """A Stepper of the ``streams [n]`` of this one."""
    selected = Stepper(stepper.model, len(streams), stepper.memory().streams(streams))
    # The memory ends where the running segment begins.
    if len(stepper.running):
        selected.read(stepper.running[:, streams])
    return selected


def check_unpadded(attention_mask: Tensor | None, n: int) -> None:
    """Raise ValueError unless the last n columns of ``attention_mask [B, T]`` are ids."""
    if attention_mask is not None and not attention_mask[:, -n:].all():
        raise UserError("a text is continued at its end; pad on the left, with padding_side='left'.")


def group_by_padding(
    ids: Tensor, mask: Tensor | None, *, by_both_ends: bool = False
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """The rows ``[n]`` of ``ids [B, T]`` with the same padding on the left, how much it is, and their tokens
    ``[T', n]`` without it. Padding on the right, which no earlier token sees, is 0; with ``by_both_ends`` the
    rows have the same there, too, and it is left out. Raises ValueError for padding between ids and for a
    row of padding alone."""
    is_id = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if is_id.shape != ids.shape:
        raise UserError(f"expected attention_mask as {[*ids.shape]}, as the ids, got {[*is_id.shape]}.")
    n_before = count_leading_padding(is_id)  # [B]
    n_after = count_leading_padding(is_id.flip(1))  # [B]
    T = ids.shape[1]
    if (n_before + is_id.sum(1) + n_after != T).any():
        raise UserError("expected attention_mask with ids in every row, and zeros at its ends only.")
    ids = ids.masked_fill(~is_id, 0)
    n_cut = n_after if by_both_ends else torch.zeros_like(n_after)
    for left, right_cut in torch.stack((n_before, n_cut), dim=1).unique(dim=0).tolist():
        rows = ((n_before == left) & (n_cut == right_cut)).nonzero()[:, 0]  # [n]
        yield rows, left, ids[rows, left : T - right_cut].T


def count_leading_padding(is_id: Tensor) -> Tensor:
    """How many columns of each row of ``is_id [B, T]`` are false before the first that is true: ``[B]``."""
    return (is_id.cumsum(1) == 0).sum(1)
