"""The order in which whole texts are read once: parts of a plain text, or documents, as parallel streams."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED, Segment


@dataclass(frozen=True)
class Reading:
    """Streams of a text, which are read group by group, the streams of a group in parallel."""

    begins: tuple[int, ...]
    """Where the first token of each stream stands in the text."""
    lengths: tuple[int, ...]
    """How many tokens of each stream are predicted: all but its first one."""
    groups: tuple[tuple[int, ...], ...]
    """The numbers of the streams of each group, the longest first; each is in one group at most."""
    segment_len: int
    """Tokens that are read at once of each stream."""
    of_documents: bool = False
    """Whether each stream is a document, which leaves its group when it ends. The streams of a plain text are
    padded to the longest one."""

    @cached_property
    def steps(self) -> list[tuple[list[int], int]]:
        """The segments in the order of reading: the numbers of the streams that are read, and the position in
        them at which the segment begins."""
        return [
            ([n for n in group if self.lengths[n] > start or not self.of_documents], start)
            for group in self.groups
            for start in range(0, self.lengths[group[0]], self.segment_len)
        ]

    def predicted(self, steps: int | None = None) -> tuple[int, ...]:
        """How many tokens of each stream are predicted in the first ``steps``, or in all."""
        counts = [0] * len(self.lengths)
        for numbers, start in self.steps[:steps]:
            for number in numbers:
                counts[number] = min(start + self.segment_len, self.lengths[number])
        return tuple(counts)

    def segments(self, tokens: Tensor, steps: int | None = None) -> Iterator[Segment]:
        """The first ``steps``, or all, as segments of the text ``tokens [n]``. A segment of fewer streams
        than the one before goes on with the first of them; past the end of a stream, inputs are 0 and targets
        are IGNORED."""
        begins, lengths = torch.tensor(self.begins), torch.tensor(self.lengths)
        for numbers, start in self.steps[:steps]:
            end = min(start + self.segment_len, self.lengths[numbers[0]])
            place = torch.arange(start, end)[:, None]
            there = place < lengths[numbers]  # [S, B]
            at = (begins[numbers] + place).where(there, 0)
            inputs, targets = tokens[at].where(there, 0), tokens[at + 1].where(there, IGNORED)
            yield Segment(inputs, targets, starts_over=start == 0, end=end, epoch=0)

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """What was found for each prediction, stream after stream ``[n]``; ``parts [S, B]`` are what was
        found in each of the first steps."""
        found: list[list[Tensor]] = [[] for _ in self.lengths]
        for (numbers, start), part in zip(self.steps, parts, strict=False):
            for column, number in enumerate(numbers):
                found[number].append(part[: max(self.lengths[number] - start, 0), column])
        return torch.cat([part for of_stream in found for part in of_stream])


def plain_reading(n_tokens: int, batch_size: int, segment_len: int) -> Reading:
    """How to read a text in ``batch_size`` equal streams that together predict each token but the first
    once. Raises UserError for fewer than two tokens."""
    if n_tokens < 2:
        raise UserError(f"a text of {n_tokens} tokens has nothing to predict; use at least 2.")
    batch_size = min(batch_size, n_tokens - 1)
    length = -(-(n_tokens - 1) // batch_size)
    begins = tuple(length * b for b in range(batch_size))
    lengths = tuple(min(max(n_tokens - 1 - begin, 0), length) for begin in begins)
    return Reading(begins, lengths, (tuple(range(batch_size)),), segment_len)


def documents_reading(
    documents: Sequence[int], batch_size: int, segment_len: int, parts: Sequence[Sequence[int]] = ()
) -> Reading:
    """How to read ``documents``, the lengths in tokens of those that make up a text, ``batch_size`` in
    parallel; of each, all tokens but the first are predicted. With ``parts``, only the documents of these
    numbers are read, part after part.

    Documents of similar length are in the same group, so that few wait for the longest one. A document of a
    single token is in no group. Raises UserError where nothing can be predicted.
    """
    if max(documents, default=0) < 2:
        raise UserError("documents of a single token have nothing to predict; use at least 2 tokens.")
    groups = []
    for part in parts or [range(len(documents))]:
        longest_first = sorted((n for n in part if documents[n] > 1), key=lambda n: (-documents[n], n))
        groups += [tuple(longest_first[i : i + batch_size]) for i in range(0, len(longest_first), batch_size)]
    begins = tuple(accumulate(documents, initial=0))[:-1]
    return Reading(begins, tuple(length - 1 for length in documents), tuple(groups), segment_len, True)


def streams_and_places(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each of the tokens of streams of these ``lengths``, which follow each other: the number of its
    stream, and its position there; int64 ``[n]`` each."""
    of_each = torch.tensor(lengths)
    first = of_each.cumsum(0) - of_each
    stream = torch.arange(len(of_each)).repeat_interleave(of_each)
    return stream, torch.arange(len(stream)) - first[stream]
