"""A text read as B parallel streams, each contiguous, segment after segment."""

from collections.abc import Iterator
from dataclasses import dataclass

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


def training_segments(
    tokens: Tensor, batch_size: int, segment_len: int, position: int = 0
) -> Iterator[Segment]:
    """Segments of ``tokens [n]`` without end, from ``position`` of the streams on: when the streams end
    (all at once, within one stream's rest of fewer than B tokens), they start over.

    Raises ValueError for a text with less than one segment for each stream, and for a position outside
    of them.
    """
    length = (len(tokens) - 1) // batch_size
    check_length(len(tokens), batch_size, segment_len)
    inputs = tokens[: length * batch_size].view(batch_size, length).T.contiguous()
    targets = tokens[1 : length * batch_size + 1].view(batch_size, length).T.contiguous()
    if not 0 <= position <= length:
        raise UserError(f"position={position:,} is outside of streams of {length:,} tokens.")
    yield from cut(inputs, targets, segment_len, position)
    while True:
        yield from cut(inputs, targets, segment_len)


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


def cut(inputs: Tensor, targets: Tensor, segment_len: int, position: int = 0) -> Iterator[Segment]:
    """Consecutive segments of ``[length, B]`` from ``position`` on; the last may be shorter."""
    for start in range(position, len(inputs), segment_len):
        end = min(start + segment_len, len(inputs))
        yield Segment(inputs[start:end], targets[start:end], starts_over=start == 0, end=end)


def check_length(n_tokens: int, batch_size: int, segment_len: int) -> None:
    """Raise ValueError unless every stream gets at least one whole segment."""
    needed = batch_size * segment_len + 1
    if n_tokens < needed:
        raise UserError(
            f"a text of {n_tokens:,} tokens is too short for {batch_size} streams of a segment of "
            f"{segment_len}, which take {needed:,}; use a longer text, a smaller batch_size or a "
            f"shorter segment_len."
        )
