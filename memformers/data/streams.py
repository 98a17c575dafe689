"""A text read as B parallel streams, each contiguous, segment after segment."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.errors import UserError

IGNORED = -100
"""Target of a position that has none; ``torch.nn.functional.cross_entropy`` skips it."""


@dataclass(frozen=True)
class Segment:
    """The next tokens of every stream."""

    inputs: Tensor
    """``[S, B]``, int64."""
    targets: Tensor
    """``[S, B]``: each input's next token, or IGNORED."""
    starts_over: bool
    """Whether the streams begin here: forget everything before."""
    end: int
    """Where the next segment begins, in tokens of a stream."""
    epoch: int
    """How many times the text was read before."""


def training_segments(
    tokens: Tensor,
    batch_size: int,
    segment_len: int,
    place: tuple[int, int] = (0, 0),
    *,
    stretch: int = 0,
    seed: int = 0,
) -> Iterator[Segment]:
    """Segments of ``tokens [n]`` without end, from ``place`` on, an epoch and a position in its streams. When
    the streams of an epoch end, all at once, those of the next begin.

    With ``stretch=0`` each stream is one part of the text, the same in every epoch, and fewer than B tokens
    are left over. Otherwise each stream is a sequence of stretches of ``stretch`` tokens, in an order drawn
    from ``seed`` and the epoch ([`stretches`][]). A stretch is never longer than 1 / B of the text.

    Raises ValueError for a text with less than one segment for each stream, and for a position outside
    of them.
    """
    check_length(len(tokens), batch_size, segment_len)
    epoch, position = place
    while True:
        starts, length = stretches(len(tokens), batch_size, stretch, seed, epoch)
        if not 0 <= position <= len(starts) * length:
            raise UserError(
                f"position={position:,} is outside of streams of {len(starts) * length:,} tokens."
            )
        at = (starts[:, None] + torch.arange(length)[:, None]).flatten(0, 1)  # [length of a stream, B]
        yield from cut(tokens[at], tokens[at + 1], segment_len, position, epoch)
        epoch, position = epoch + 1, 0


def stretches(n_tokens: int, batch_size: int, stretch: int, seed: int, epoch: int) -> tuple[Tensor, int]:
    """Where the stretches of an epoch begin in a text, ``[rounds, B]``, in the order in which each stream
    reads them, and how long each of them is.

    The first begins where the epoch's draw says, so that the cuts lie elsewhere in each epoch; what is left
    over, before it and after the last round, is less than a round and a stretch.
    """
    part = (n_tokens - 1) // batch_size
    if not stretch or stretch >= part:
        return (torch.arange(batch_size) * part)[None], part
    generator = torch.Generator().manual_seed((seed + epoch * 0x9E3779B97F4A7C15) % 2**63)
    left = n_tokens - 1 - stretch * batch_size
    first = int(torch.randint(min(stretch, left + 1), (), generator=generator))
    count = (n_tokens - 1 - first) // stretch
    order = torch.randperm(count, generator=generator)[: count // batch_size * batch_size]
    return first + stretch * order.view(-1, batch_size), stretch


def evaluation_segments(tokens: Tensor, batch_size: int, segment_len: int) -> Iterator[Segment]:
    """Segments that cover every token of ``tokens [n]`` once; the last stream is filled up with
    IGNORED targets.

    Stream b's target at position t is token ``b·length + t + 1`` of the text, where ``length`` is
    [`stream_length`][]. Raises ValueError for fewer than two tokens.
    """
    length = stream_length(len(tokens), batch_size)
    missing = length * batch_size - (len(tokens) - 1)
    inputs = F.pad(tokens[:-1], (0, missing)).view(batch_size, length).T.contiguous()
    targets = F.pad(tokens[1:], (0, missing), value=IGNORED).view(batch_size, length).T.contiguous()
    yield from cut(inputs, targets, segment_len)


def stream_length(n_tokens: int, batch_size: int) -> int:
    """Tokens in each of ``batch_size`` streams that together predict all but the first token."""
    if n_tokens < 2:
        raise UserError(f"a text of {n_tokens} tokens has nothing to predict; use 2 at least.")
    return -(-(n_tokens - 1) // batch_size)


def cut(
    inputs: Tensor, targets: Tensor, segment_len: int, position: int = 0, epoch: int = 0
) -> Iterator[Segment]:
    """Consecutive segments of ``[length, B]`` from ``position`` on; the last may be shorter."""
    for start in range(position, len(inputs), segment_len):
        end = min(start + segment_len, len(inputs))
        yield Segment(inputs[start:end], targets[start:end], starts_over=start == 0, end=end, epoch=epoch)


def check_length(n_tokens: int, batch_size: int, segment_len: int) -> None:
    """Raise ValueError unless every stream gets at least one whole segment."""
    needed = batch_size * segment_len + 1
    if n_tokens < needed:
        raise UserError(
            f"a text of {n_tokens:,} tokens is too short for {batch_size} streams of a segment of "
            f"{segment_len}, which take {needed:,}; use a longer text, a smaller batch_size or a "
            f"shorter segment_len."
        )
