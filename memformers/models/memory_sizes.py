"""How much each layer remembers: positions as they are, and slots of older ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from memformers.common.errors import UserError
from memformers.common.fields import Count, Range, check_fields

LONGEST = 2**31
"""The most that a length or a compression rate may be: products of two fit into 64 bits."""
Length = Annotated[int, Range(0, LONGEST)]
Rate = Annotated[int, Range(1, LONGEST)]
ByHead = Length | tuple[Length, ...]
"""A length for all heads of a layer, or one for each; few long ones may do (arXiv 1905.07799)."""
ByLayer = Length | tuple[ByHead, ...]
"""A length for all layers, or one for each from the first; one by head alone is for all layers. Few long
ones, late, may do (arXiv 2007.03356)."""


@dataclass(frozen=True)
class MemorySizes:
    """How much one layer remembers; uncompressed, C is 0 and c is 1. Raises ValueError for what can't be.

    Examples:
        >>> from memformers import MemorySizes
        >>> sizes = MemorySizes(mem_len=64, c_mem_len=16, compression_rate=4)
        >>> sizes.keys, sizes.positions
        (80, 128)
    """

    mem_len: Length
    """M, in positions."""
    c_mem_len: Length = 0
    """C, in slots."""
    compression_rate: Rate = 1
    """c, the positions that a slot stands for."""
    bptt: Length = 0
    """How many compressions back f_c learns from the language model's loss."""
    segment_len: Count = 1
    """S, in positions."""
    window: Length | None = None
    """How many of the newest keys a query sees, its own among them; None for all."""
    heads: tuple[tuple[int, int], ...] | None = None
    """M and C of each head, of which the layer remembers the longest; None where they are alike."""
    divided: Length = 0
    """How many of the oldest of the M positions the heads divide among them: each is read by one."""
    divided_by: Count = 1
    """By how many heads."""

    def __post_init__(self) -> None:
        """Raise UserError for what can't be."""
        check_fields(self)
        plain = (self.c_mem_len, self.heads, self.window) == (0, None, None)
        if (n := self.divided) and not (plain and n <= self.mem_len and n % self.divided_by == 0):
            raise UserError(
                f"expected a multiple of divided_by={self.divided_by} up to mem_len={self.mem_len}, without "
                f"slots, lengths by head or window, got divided={n}."
            )

    def n_evicted(self, length: int) -> int:
        """How many of a memory's ``length`` positions leave it after a segment: n·c, as n slots or forgotten,
        with n = ⌈(length − M) / c⌉ ≤ ⌊length / c⌋, as up to c − 1 may wait for a whole slot."""
        c, overflow = self.compression_rate, max(length - self.mem_len, 0)
        return min(-(-overflow // c), length // c) * c

    @property
    def slots_a_segment(self) -> int:
        """⌈S / c⌉, how many slots a compression makes after a whole segment."""
        return -(-self.segment_len // self.compression_rate)

    @property
    def slot_input_positions(self) -> int:
        """How many positions a memory keeps of its newest slots, for f_c to learn from a later loss."""
        return min(self.bptt * self.slots_a_segment, self.c_mem_len) * self.compression_rate

    @property
    def longest_memory(self) -> int:
        """The most positions of a memory between segments, those that wait for a whole slot included."""
        return max(self.mem_len, self.compression_rate - 1)

    @property
    def carried(self) -> int:
        """The vectors ``[D]`` that a full memory carries: positions, slots, and what f_c reads again."""
        return self.mem_len + self.c_mem_len + self.slot_input_positions

    @property
    def newest(self) -> int:
        """How many of the newest positions no heads divide."""
        return self.mem_len - self.divided

    def positions_of(self, keys: int) -> int:
        """How many positions a memory has of which a head reads the newest ``keys``."""
        if keys < self.newest:
            return keys - keys % self.compression_rate
        return self.newest + (keys - self.newest) * self.divided_by if self.divided else self.longest_memory

    @property
    def most_keys(self) -> int:
        """The keys of the head that reads the most, without those that wait for a whole slot."""
        return self.newest + self.divided // self.divided_by + self.c_mem_len

    @property
    def keys(self) -> int:
        """The number of keys without the segment's, M + C less what other heads read of what they divide; the
        mean over heads, rounded."""
        each = [M + C for M, C in self.heads or [(self.mem_len, self.c_mem_len)]]
        return round(sum(each) / len(each)) - self.divided + self.divided // self.divided_by

    def of_heads(self, M: int, C: int) -> list[tuple[int, int]] | None:
        """How many of the newest of ``M`` positions and ``C`` slots each head reads; None where all read all.
        A head with slots reads all positions, those that wait for a whole slot included."""
        each = [(M if m == self.mem_len else min(m, M), min(c, C)) for m, c in self.heads or ()]
        return each if any(own != (M, C) for own in each) else None

    def of_group(self, heads: slice | list[int], M: int, C: int) -> tuple[int, int]:
        """[`of_heads`][] for ``heads`` that read as many, a slice or list."""
        each = self.of_heads(M, C)
        return each[heads.start if isinstance(heads, slice) else heads[0]] if each else (M, C)

    @property
    def positions(self) -> int:
        """The number of positions that are remembered, where a slot counts as c positions."""
        return self.mem_len + self.c_mem_len * self.compression_rate


Sizes = Sequence[MemorySizes]
"""Those of each layer."""
