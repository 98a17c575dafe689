"""Memory's promise: every past position is in exactly one place, in order, within bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes
from memformers.models.memory_update import compress_memory, truncate_memory

LENGTHS = st.integers(0, 13)
SEGMENTS = st.lists(st.integers(1, 11), min_size=1, max_size=12)


def positions(start: int, length: int, layers: int = 2) -> list[torch.Tensor]:
    """Layer inputs ``[length, 1, 1]`` whose value is their position in the text."""
    return [torch.arange(start, start + length, dtype=torch.float64)[:, None, None]] * layers


@settings(max_examples=300)
@given(segments=SEGMENTS, mem_len=LENGTHS)
def test_transformer_xl_remembers_the_newest_positions_in_order(segments, mem_len):
    memory, seen = Memory(()), 0
    for S in segments:
        memory = truncate_memory(memory, positions(seen, S), [MemorySizes(mem_len)] * 2)
        seen += S
        for mem in memory.mem:
            assert mem.flatten().tolist() == list(range(max(seen - mem_len, 0), seen))


@settings(max_examples=500)
@given(segments=SEGMENTS, mem_len=LENGTHS, c_mem_len=LENGTHS, c=st.integers(1, 7))
def test_every_position_is_in_exactly_one_place(segments, mem_len, c_mem_len, c):
    """f_c here keeps a slot's first position, so each slot tells which c positions it stands for."""
    memory, seen = Memory(()), 0
    for S in segments:
        memory, _ = compress_memory(
            memory, positions(seen, S), [lambda old: old[::c]] * 2, [MemorySizes(mem_len, c_mem_len, c)] * 2
        )
        seen += S
        for layer in range(2):
            mem = memory.mem[layer].flatten().tolist()
            slots = memory.c_mem[layer].flatten().tolist() if memory.c_mem else []
            held = [p for slot in slots for p in range(int(slot), int(slot) + c)] + mem
            forgotten = seen - len(held)
            assert held == list(range(forgotten, seen))  # in order, none twice, none missing
            assert forgotten % c == 0
            assert forgotten == 0 or len(slots) == c_mem_len  # only a full memory forgets
            assert len(slots) <= c_mem_len
            assert len(mem) <= max(mem_len, c - 1)


@given(length=st.integers(0, 100), mem_len=LENGTHS, c=st.integers(1, 9))
def test_as_many_slots_as_needed_and_never_more_than_there_is(length, mem_len, c):
    leaving = MemorySizes(mem_len, compression_rate=c).leaving(length)
    assert 0 <= leaving <= length
    assert leaving % c == 0
    assert length - leaving <= mem_len or length - leaving < c  # back within bounds, or less than a slot
    assert leaving == 0 or length - leaving + c > mem_len  # one slot less would not do


def test_compressed_slots_are_remembered_without_gradient_and_returned_with_it():
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    memory, compressed = compress_memory(
        Memory(()), positions(0, 6, layers=1), [lambda old: scale * old[::2]], [MemorySizes(2, 4, 2)]
    )
    assert compressed is not None
    assert compressed.new[0].requires_grad
    assert not memory.c_mem[0].requires_grad


def test_a_memory_no_longer_than_a_segment_is_that_segments_inputs_without_a_copy():
    inputs = positions(5, 5)
    memory = truncate_memory(Memory(tuple(positions(0, 5))), inputs, [MemorySizes(4)] * 2)
    assert [m.flatten().tolist() for m in memory.mem] == [[6, 7, 8, 9]] * 2
    assert memory.mem[0].untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("mem_len", [0, 7])
def test_any_other_memory_holds_no_more_than_it_shows(mem_len):
    memory = truncate_memory(Memory(tuple(positions(0, 6))), positions(6, 5), [MemorySizes(mem_len)] * 2)
    assert [m.untyped_storage().nbytes() for m in memory.mem] == [m.nbytes for m in memory.mem]
