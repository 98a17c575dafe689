"""Parts of a held-out text that are read side by side, each from an empty memory: equal parts of a plain
text, or the beginnings of documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 16
"""Streams of a text that is long enough, and documents that are read at once."""


@dataclass(frozen=True)
class Streams:
    """Streams of a text, of which each group of [`AT_ONCE`][] is read at once."""

    at: Tensor
    """Where each of their tokens stands in the text, int64 ``[1 + T, B]``; past a stream's end, any place."""
    lengths: tuple[int, ...]
    """How many tokens each has. The longest come first; and each group's longest two are as long, so that no
    stream is ever read alone."""

    @property
    def there(self) -> Tensor:
        """Whether a stream has a token at each place, boolean ``[1 + T, B]``."""
        return torch.arange(len(self.at))[:, None] < torch.tensor(self.lengths)

    @property
    def groups(self) -> list[slice]:
        """Which streams are read at once."""
        return [slice(i, min(i + AT_ONCE, len(self.lengths))) for i in range(0, len(self.lengths), AT_ONCE)]


def streams_of_text(n_tokens: int, warm_up: int, least: int, tokens: int) -> Streams | None:
    """At most [`AT_ONCE`][] equal parts of a text, of which the tokens after the first ``warm_up`` count, at
    least ``least`` in each and about ``tokens`` in all; None where there would be fewer than two."""
    streams = min(AT_ONCE, (n_tokens - 1) // (warm_up + least))
    if streams < 2:
        return None
    length = (n_tokens - 1) // streams
    counted = min(max(tokens // streams, least), length - warm_up)
    at = torch.arange(streams) * length + torch.arange(warm_up + counted + 1)[:, None]
    return Streams(at, (len(at),) * streams)


def streams_of_documents(documents: Sequence[int], warm_up: int, least: int, tokens: int) -> Streams | None:
    """The beginnings of ``documents``, the lengths in tokens of those that make up a text. Of each, the
    tokens after the first ``warm_up`` count, at least ``least`` of them and about ``tokens`` in all at most;
    None where fewer than two are that long. Of many documents it is every k-th."""
    enough = [number for number, length in enumerate(documents) if length > warm_up + least]
    if len(enough) < 2:
        return None
    chosen = enough[:: -(-len(enough) // max(tokens // least, 2))]
    longest = 1 + warm_up + max(tokens // len(chosen), least)
    chosen.sort(key=lambda number: (-min(documents[number], longest), number))
    if len(chosen) % AT_ONCE == 1:
        chosen.pop()
    lengths = [min(documents[number], longest) for number in chosen]
    for group in range(0, len(lengths), AT_ONCE):
        lengths[group] = lengths[group + 1]
    ends = torch.tensor(documents).cumsum(0)
    begins = (ends - torch.tensor(documents))[chosen]
    at = torch.minimum(begins + torch.arange(max(lengths))[:, None], ends[chosen] - 1)
    return Streams(at, tuple(lengths))
