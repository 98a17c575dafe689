"""How much a layer remembers, in numbers. Configs check them, reports show them, and shapes follow from
them."""

import math
from dataclasses import dataclass
from typing import Annotated

from memformers.common.fields import Count, Range, check_fields

MAX_LENGTH = 2**31
"""The largest length or compression rate: products of two fit into 64 bits."""
Length = Annotated[int, Range(0, MAX_LENGTH)]
Rate = Annotated[int, Range(1, MAX_LENGTH)]


@dataclass(frozen=True)
class MemorySizes:
    """How much one layer remembers. Raises ValueError for values out of range.

    Examples:
        >>> from memformers import MemorySizes
        >>> size = MemorySizes(mem_len=64, c_mem_len=16, compression_rate=4)
        >>> size.keys, size.positions
        (80, 128)
    """

    mem_len: Length = 0
    """M, in positions."""
    c_mem_len: Length = 0
    """C, in slots."""
    compression_rate: Rate = 1
    """c, how many positions a slot adds to those that the layer covers."""
    slot_positions: Count | None = None
    """Positions per slot. So many leave the newest M together. None if every slot summarizes all older
    positions of the document."""
    bptt_len: Length = 0
    """How many inputs of the newest slots are kept, so that f_c can learn from a later loss."""
    has_shift_state: bool = False
    """Whether the layer also stores its newest input for the token shift."""
    n_keys: Length | None = None
    """How many keys a query attends to besides the segment's; None for all positions and slots."""
    extra_state: Length = 0
    """Numbers of 4 bytes in a stream's state besides positions and slots."""
    extra_operations: Length = 0
    """Operations of a token in other matrix products of this layer's memory; a multiply-add is two."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def group(self) -> int:
        """How many positions leave together."""
        return self.slot_positions or 1

    def n_evicted(self, length: int) -> int:
        """How many of a memory's ``length`` positions leave it after a segment: n·c, as n slots or forgotten,
        with n = ⌈(length − M) / c⌉ ≤ ⌊length / c⌋, as up to c − 1 may wait for a whole slot."""
        # Whole groups leave, until at most M positions stay.
        overflow = max(length - self.mem_len, 0)
        n_groups = min(-(-overflow // self.group), length // self.group)  # ⌈⌉ of integers
        return n_groups * self.group

    @property
    def longest_memory(self) -> int:
        """The most positions of a memory between segments, those that wait for a whole slot included."""
        return max(self.mem_len, self.group - 1)

    def full_positions(self, n_tokens: int) -> int:
        """How many positions a full memory has after ``n_tokens`` tokens. What has left is whole groups of c,
        so n_tokens mod c more than a multiple of c stay, and M of them at most, or c − 1 that wait."""
        return self.longest_memory - (self.longest_memory - n_tokens) % self.group

    def most_positions(self, segment_len: int) -> int:
        """The most of [`full_positions`][] after segments of ``segment_len`` tokens: n_tokens mod c is then a
        multiple of gcd(S, c)."""
        return self.longest_memory - self.longest_memory % math.gcd(segment_len, self.group)

    def mean_positions(self, segment_len: int) -> float:
        """The mean of [`full_positions`][] after segments of ``segment_len`` tokens: n_tokens mod c is then
        each multiple of gcd(S, c) below c in turn."""
        step = math.gcd(segment_len, self.group)
        return self.most_positions(segment_len) - (self.group - step) / 2

    def mean_keys(self, segment_len: int) -> float:
        """The keys besides the segment's that a query attends to, on average over segments."""
        if self.n_keys is not None:
            return self.n_keys
        return self.mean_positions(segment_len) + self.c_mem_len

    @property
    def most_keys(self) -> int:
        """The most keys besides the segment's that a query can attend to."""
        return max(self.longest_memory + self.c_mem_len, self.n_keys or 0)

    def full_reach(self, segment_len: int) -> int:
        """How many positions a full memory covers at most, those of its slots included, after segments of
        ``segment_len`` tokens."""
        return self.most_positions(segment_len) + self.c_mem_len * self.compression_rate

    @property
    def keys(self) -> int:
        """M + C, the number of keys without the segment's. A memory holds other numbers if c does not divide
        both M and S."""
        return self.mem_len + self.c_mem_len

    @property
    def positions(self) -> int:
        """The number of positions that are remembered, where a slot counts as c positions."""
        return self.mem_len + self.c_mem_len * self.compression_rate
