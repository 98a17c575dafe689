"""Reads a text, or many documents, as B parallel contiguous streams, segment after segment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError

IGNORED = -100
"""The target of positions without one; ``torch.nn.functional.cross_entropy`` ignores it."""


@dataclass(frozen=True)
class Segment:
    """The next tokens of every stream."""

    inputs: Tensor
    """``[S, B]``, int64."""
    targets: Tensor
    """``[S, B]``: each input's next token, or IGNORED."""
    starts_over: bool
    """Whether the streams begin here, with an empty memory."""
    end: int
    """Where the next segment begins, in tokens of a stream."""
    epoch: int
    """How many times the text was read before."""
    doc_starts: Tensor | None = None
    """``[S, B]``, boolean: where a stream's new document begins; None for a plain text."""

    @property
    def predictions(self) -> int:
        """The number of positions that have a target."""
        return int((self.targets != IGNORED).sum())


def training_segments(
    tokens: Tensor,
    batch_size: int,
    segment_len: int,
    place: tuple[int, int] = (0, 0),
    *,
    chunk_len: int = 0,
    seed: int = 0,
    documents: Sequence[int] = (),
) -> Iterator[Segment]:
    """An endless sequence of segments of ``tokens [n]``, which begins at ``place``: an epoch, and a position
    in its streams. All streams of an epoch end at the same time, and those of the next epoch follow.

    With ``chunk_len=0`` each stream is one part of the text, the same in every epoch, and fewer than B tokens
    are not used. Otherwise each stream is a sequence of chunks of ``chunk_len`` tokens, in an order drawn
    from ``seed`` and the epoch ([`chunks`][]). A chunk is never longer than 1 / B of the text.

    ``documents`` are the lengths, in tokens, of the documents that make up the text. With them, each epoch
    joins the documents in an order drawn from ``seed`` and the epoch, and each stream is one part of the
    result ([`shuffled`][]); ``chunk_len`` is not used.

    Raises ValueError for a text with less than one segment for each stream, and for a position outside
    of the streams.
    """
    check_length(len(tokens), batch_size, segment_len)
    if documents and sum(documents) != len(tokens):
        raise UserError(f"the documents must have {len(tokens):,} tokens in total; {sum(documents):,} came.")
    epoch, position = place
    while True:
        inputs, targets, doc_starts = (
            shuffled(tokens, documents, batch_size, seed, epoch)
            if documents
            else ordered(tokens, batch_size, chunk_len, seed, epoch)
        )
        if not 0 <= position <= len(inputs):
            raise UserError(
                f"position={position:,} must be from 0 to {len(inputs):,}, the tokens of a stream."
            )
        yield from iter_segments(inputs, targets, segment_len, position, epoch, doc_starts)
        epoch, position = epoch + 1, 0


def ordered(
    tokens: Tensor, batch_size: int, chunk_len: int, seed: int, epoch: int
) -> tuple[Tensor, Tensor, None]:
    """The streams of an epoch of a plain text ``tokens [n]``: inputs and targets ``[length, B]``, and None
    for starts."""
    begins, length = chunks(len(tokens), batch_size, chunk_len, seed, epoch)
    at = (begins[:, None] + torch.arange(length)[:, None]).flatten(0, 1)  # [length of a stream, B]
    return tokens[at], tokens[at + 1], None


def shuffled(
    tokens: Tensor, documents: Sequence[int], batch_size: int, seed: int, epoch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The streams of an epoch of ``documents``, the lengths of those that make up ``tokens [n]``: inputs,
    targets and starts, ``[⌊n / B⌋, B]`` each.

    The documents are joined in an order drawn from ``seed`` and ``epoch`` and divided into B equal streams,
    so a document may begin in one stream and end in the next. Fewer than B tokens at the end are not used.
    The first token of each document and of each stream is a start. The last token of a document has no
    target, since another document follows.
    """
    lengths = torch.tensor(documents)
    order = torch.randperm(len(lengths), generator=generator_of(seed, epoch))
    first, length = (lengths.cumsum(0) - lengths)[order], lengths[order]  # old places and lengths
    end = length.cumsum(0)  # where each ends now
    n = len(tokens) // batch_size * batch_size
    at = torch.repeat_interleave(first - (end - length), length) + torch.arange(len(tokens))
    doc_starts = torch.zeros(len(tokens), dtype=torch.bool)
    doc_starts[end - length] = True
    targets = torch.full_like(tokens, IGNORED)
    targets[:-1] = torch.where(doc_starts[1:], IGNORED, tokens[at[1:]])
    inputs, targets, doc_starts = (
        x[:n].view(batch_size, -1).T.contiguous() for x in (tokens[at], targets, doc_starts)
    )
    doc_starts[0] = True
    return inputs, targets, doc_starts


def chunks(n_tokens: int, batch_size: int, chunk_len: int, seed: int, epoch: int) -> tuple[Tensor, int]:
    """Where the chunks of an epoch begin in a text, ``[rounds, B]``, in the order in which each stream
    reads them, and the length of each.

    The place of the first is drawn for each epoch, so that each epoch divides the text at other places. The
    tokens before it and after the last round, which are not used, are fewer than a round and a chunk.
    """
    part = (n_tokens - 1) // batch_size
    if not chunk_len or chunk_len >= part:
        return (torch.arange(batch_size) * part)[None], part
    generator = generator_of(seed, epoch)
    left = n_tokens - 1 - chunk_len * batch_size
    first = int(torch.randint(min(chunk_len, left + 1), (), generator=generator))
    count = (n_tokens - 1 - first) // chunk_len
    order = torch.randperm(count, generator=generator)[: count // batch_size * batch_size]
    return first + chunk_len * order.view(-1, batch_size), chunk_len


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """The random generator for the order of an epoch."""
    return torch.Generator().manual_seed((seed + epoch * 0x9E3779B97F4A7C15) % 2**63)


def iter_segments(
    inputs: Tensor,
    targets: Tensor,
    segment_len: int,
    position: int = 0,
    epoch: int = 0,
    doc_starts: Tensor | None = None,
) -> Iterator[Segment]:
    """Consecutive segments of streams ``[length, B]``, beginning at ``position``; the last may be shorter."""
    for start in range(position, len(inputs), segment_len):
        end = min(start + segment_len, len(inputs))
        yield Segment(
            inputs[start:end],
            targets[start:end],
            starts_over=start == 0,
            end=end,
            epoch=epoch,
            doc_starts=None if doc_starts is None else doc_starts[start:end],
        )


def check_length(n_tokens: int, batch_size: int, segment_len: int) -> None:
    """Raise ValueError unless every stream gets at least one whole segment."""
    needed = batch_size * segment_len + 1
    if n_tokens < needed:
        raise UserError(
            f"a text of {n_tokens:,} tokens is too short for {batch_size} streams of a segment of "
            f"{segment_len}, which need {needed:,}; use a longer text, a smaller batch_size or a "
            f"shorter segment_len."
        )
