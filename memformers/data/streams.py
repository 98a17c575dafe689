"""Reads a text, or documents, as parallel contiguous streams, segment by segment: without end, or once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.files import drop_resident_pages

Tokens = Tensor | npt.NDArray[Any]  # of a text [n]: int64, or an array of any integer type, perhaps mapped
IGNORED = -100  # the target of positions without one; `torch.nn.functional.cross_entropy` ignores it


@dataclass(frozen=True)
class Segment:
    """The next tokens of every stream, ``[S, B]`` each."""

    inputs: Tensor
    targets: Tensor  # each input's next token, or IGNORED
    starts_over: bool = False  # whether the streams begin here, with an empty memory
    end: int = 0  # where the next segment begins, in tokens of a stream
    epoch: int = 0  # how many times the text was read before
    doc_starts: Tensor | None = None  # where a stream's new document begins; None for a plain text

    def map(self, change: Callable[[Tensor], Tensor]) -> "Segment":
        """A copy with ``change`` applied to each tensor."""
        doc_starts = None if self.doc_starts is None else change(self.doc_starts)
        return replace(self, inputs=change(self.inputs), targets=change(self.targets), doc_starts=doc_starts)

    def to(self, device: torch.device) -> "Segment":
        """A copy on ``device``; to a GPU, the copy is asynchronous."""
        if device.type == "cuda":
            return self.map(lambda x: x.pin_memory().to(device, non_blocking=True))
        return self.map(lambda x: x.to(device))

    def chunk(self, n_parts: int) -> list["Segment"]:
        """The streams in ``n_parts`` equal parts, ``[S, B / n_parts]`` each."""
        size = self.inputs.shape[1] // n_parts
        return [self.streams(slice(i * size, (i + 1) * size)) for i in range(n_parts)]

    def streams(self, chosen: slice) -> "Segment":
        """The ``chosen`` streams alone."""
        return self.map(lambda x: x[:, chosen])


def training_segments(
    tokens: Tokens,
    batch_size: int,
    segment_len: int,
    begin: tuple[int, int] = (0, 0),
    *,
    chunk_len: int = 0,
    seed: int = 0,
    documents: Sequence[int] | Tensor = (),
) -> Iterator[Segment]:
    """An endless sequence of segments of ``tokens [n]``, from ``begin``: an epoch, and a position in its
    streams. All streams of an epoch end at the same time.

    With ``chunk_len=0`` each stream is one part of the text, the same in every epoch. Otherwise it consists
    of chunks of that many tokens, in an order drawn from ``seed`` and the epoch ([`ordered`][]). With lengths
    of ``documents``, it is a part of these in such an order ([`shuffled`][]).
    """
    check_length(len(tokens), batch_size, segment_len)
    total = int(torch.as_tensor(documents).sum())
    if len(documents) and total != len(tokens):
        raise UserError(f"expected documents of {len(tokens):,} tokens in all, got {total:,}.")
    epoch, position = begin
    while True:
        if len(documents):
            length, read = shuffled(tokens, documents, batch_size, seed, epoch)
        else:
            length, read = ordered(tokens, batch_size, chunk_len, seed, epoch)
        if not 0 <= position <= length:
            raise UserError(f"expected position to be from 0 to {length:,}, got {position:,}.")
        for start in range(position, length, segment_len):
            end = min(start + segment_len, length)
            inputs, targets, doc_starts = read(torch.arange(start, end))
            yield Segment(inputs, targets, start == 0, end, epoch, doc_starts)
        epoch += 1
        position = 0


Read = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""From positions ``[S]`` in the streams of an epoch to inputs, targets and starts (None for a plain text)."""


def ordered(tokens: Tokens, batch_size: int, chunk_len: int, seed: int, epoch: int) -> tuple[int, Read]:
    """The length of the streams of an epoch of a plain text, and what reads them. Where the first chunk
    begins is drawn, so that each epoch divides the text at other positions."""
    n = len(tokens) - 1
    length = n // batch_size
    begins = (torch.arange(batch_size) * length)[None]  # [rounds, B]
    if 0 < chunk_len < length:
        generator = generator_of(seed, epoch)
        first = int(torch.randint(min(chunk_len, n - chunk_len * batch_size + 1), (), generator=generator))
        count = (n - first) // chunk_len
        order = torch.randperm(count, generator=generator)[: count // batch_size * batch_size]
        begins = first + chunk_len * order.view(-1, batch_size)
        length = chunk_len

    def read(positions: Tensor) -> tuple[Tensor, Tensor, None]:
        indices = begins[positions // length] + (positions % length)[:, None]  # [S, B]
        return read_tokens(tokens, indices), read_tokens(tokens, indices + 1), None

    return len(begins) * length, read


def shuffled(
    tokens: Tokens, documents: Sequence[int] | Tensor, batch_size: int, seed: int, epoch: int
) -> tuple[int, Read]:
    """The length of the streams of an epoch of documents with these lengths, and what reads them. A document
    may begin in one stream and end in the next, with a start in both; its last token has no target."""
    lengths = torch.as_tensor(documents)
    order = torch.randperm(len(lengths), generator=generator_of(seed, epoch))
    # Where each document, in the new order, begins in the text, and where it ends in the joined streams.
    text_begin = (lengths.cumsum(0) - lengths)[order]
    joined_end = lengths[order].cumsum(0)
    length = len(tokens) // batch_size
    streams = torch.arange(batch_size) * length

    def read(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined = positions[:, None] + streams  # [S, B]
        document = torch.searchsorted(joined_end, joined, right=True)
        position = joined - joined_end[document] + lengths[order[document]]
        indices = text_begin[document] + position
        is_last = joined + 1 == joined_end[document]
        targets = read_tokens(tokens, (indices + 1).where(~is_last, 0)).masked_fill(is_last, IGNORED)
        doc_starts = (position == 0) | (positions == 0)[:, None]
        return read_tokens(tokens, indices), targets, doc_starts

    return length, read


def read_tokens(tokens: Tokens, indices: Tensor) -> Tensor:
    """The tokens at these ``indices``; of a file that is mapped, no others are read, and none stay in
    memory."""
    if isinstance(tokens, Tensor):
        return tokens[indices]
    read = torch.from_numpy(tokens[indices.numpy()].astype(np.int64))
    if isinstance(tokens, np.memmap):
        drop_resident_pages(tokens._mmap)  # type: ignore[attr-defined]
    return read


def generator_of(seed: int, epoch: int) -> torch.Generator:
    # 2⁶⁴ divided by the golden ratio, so that neighboring seeds and epochs share no state.
    return torch.Generator().manual_seed((seed + epoch * 0x9E3779B97F4A7C15) % 2**63)


def check_length(n_tokens: int, batch_size: int, segment_len: int) -> None:
    needed = batch_size * segment_len + 1
    if n_tokens < needed:
        raise UserError(
            f"a text of {n_tokens:,} tokens is too short for {batch_size} streams of a segment of "
            f"{segment_len}, which need {needed:,}; use a longer text, a smaller batch_size or segment_len."
        )


@dataclass(frozen=True)
class Reading:
    """Streams of a text, which are read group by group, the streams of a group in parallel."""

    begins: tuple[int, ...]  # where the first token of each stream is in the text
    lengths: tuple[int, ...]  # how many tokens of each stream are predicted: all but its first one
    groups: tuple[tuple[int, ...], ...]  # the numbers of the streams of each, the longest first
    segment_len: int
    of_documents: bool = False
    """Whether each stream is a document, which leaves its group when it ends; others are padded."""

    @cached_property
    def steps(self) -> list[tuple[list[int], int]]:
        """Of each segment, in order: the numbers of the streams that are read, and its start in them."""
        steps = []
        for group in self.groups:
            for start in range(0, self.lengths[group[0]], self.segment_len):
                numbers = [n for n in group if self.lengths[n] > start or not self.of_documents]
                steps.append((numbers, start))
        return steps

    def segments(self, tokens: Tokens) -> Iterator[Segment]:
        """All steps as segments of the text ``tokens [n]``; past the end of a stream, targets are IGNORED."""
        begins = torch.tensor(self.begins)
        lengths = torch.tensor(self.lengths)
        for numbers, start in self.steps:
            end = min(start + self.segment_len, self.lengths[numbers[0]])
            positions = torch.arange(start, end)[:, None]
            is_inside = positions < lengths[numbers]  # [S, B]
            indices = (begins[numbers] + positions).where(is_inside, 0)
            inputs = read_tokens(tokens, indices).where(is_inside, 0)
            targets = read_tokens(tokens, (indices + 1).where(is_inside, 0)).where(is_inside, IGNORED)
            yield Segment(inputs, targets, starts_over=start == 0, end=end, epoch=0)

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """What belongs to each prediction, stream after stream ``[n]``, of the ``parts [S, B]`` of steps."""
        by_stream: list[list[Tensor]] = [[] for _ in self.lengths]
        for (numbers, start), part in zip(self.steps, parts, strict=False):
            for column, number in enumerate(numbers):
                by_stream[number].append(part[: max(self.lengths[number] - start, 0), column])
        return torch.cat([part for parts_of_one in by_stream for part in parts_of_one])


def plain_reading(n_tokens: int, batch_size: int, segment_len: int) -> Reading:
    """How to read a text in ``batch_size`` equal streams that predict each token but the first once."""
    if n_tokens < 2:
        raise UserError(f"a text of {n_tokens} tokens has nothing to predict; use at least 2.")
    batch_size = min(batch_size, n_tokens - 1)
    length = -(-(n_tokens - 1) // batch_size)
    begins = tuple(length * b for b in range(batch_size))
    lengths = tuple(min(max(n_tokens - 1 - begin, 0), length) for begin in begins)
    return Reading(begins, lengths, (tuple(range(batch_size)),), segment_len)


def documents_reading(documents: Sequence[int], batch_size: int, segment_len: int) -> Reading:
    """How to read ``documents`` of these lengths, of which all tokens but the first are predicted. Those of
    similar length share a group, so that few wait for the longest one."""
    if max(documents, default=0) < 2:
        raise UserError("documents of a single token have nothing to predict; use at least 2 tokens.")
    numbers = [n for n, length in enumerate(documents) if length > 1]
    longest_first = sorted(numbers, key=lambda n: (-documents[n], n))
    groups = []
    for first in range(0, len(longest_first), batch_size):
        groups.append(tuple(longest_first[first : first + batch_size]))
    begins = tuple(accumulate(documents, initial=0))[:-1]
    n_predicted = tuple(max(length - 1, 0) for length in documents)
    return Reading(begins, n_predicted, tuple(groups), segment_len, True)


def streams_and_places(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The number of each token's stream, of those of these ``lengths``, and its position there."""
    sizes = torch.tensor(lengths)
    stream = torch.arange(len(sizes)).repeat_interleave(sizes)
    return stream, torch.arange(len(stream)) - (sizes.cumsum(0) - sizes)[stream]
