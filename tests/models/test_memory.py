"""Memory's promise: every past position is in exactly one place, in order, within bounds; and what of it is
seen where documents begin, against a list of which position is where."""

import gc
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from memformers import LayerMemory, Memory, MemoryLayer, MemorySizes, MemoryStack, TransformerXL
from memformers.models.documents import (
    UNBOUNDED,
    document_length,
    first_visible_key,
    valid_afterwards,
    visible_past_keys,
)
from memformers.models.rules.compressive import CompressiveRule, n_masked_slots
from memformers.models.rules.transformer_xl import TransformerXLRule
from tests.builders import layer_parts, small_lm
from tests.texts import documents, kept, memory_of, read, tokens, updated

LENGTHS = st.integers(0, 13)
SEGMENTS = st.lists(st.integers(1, 11), min_size=1, max_size=12)


class First(nn.Module):
    """An f_c that keeps the first of c positions."""

    def __init__(self, compression_rate):
        super().__init__()
        self.compression_rate = compression_rate

    def forward(self, mem):
        return mem[:: self.compression_rate]


def compressing(mem_len, c_mem_len, c):
    return CompressiveRule(mem_len, c_mem_len, First(c), loss="none")


def positions(start, length, layers=2, B=1):
    """Layer inputs ``[length, B, 1]`` whose value is their position in the text."""
    return [torch.arange(start, start + length, dtype=torch.float64)[:, None, None].expand(-1, B, 1)] * layers


def covered_positions(memory, layer, c):
    """The positions that each slot and each position of a layer stand for, where f_c keeps the first of c."""
    if not memory.layers:
        return [], []
    slots = []
    for first in memory.layers[layer].slots[:, 0, 0].long().tolist():
        slots.append(list(range(first, first + c)))
    mem = [[position] for position in memory.layers[layer].mem[:, 0, 0].long().tolist()]
    return slots, mem


@settings(max_examples=150)
@given(segments=SEGMENTS, mem_len=LENGTHS, c_mem_len=LENGTHS, c=st.integers(1, 7), compresses=st.booleans())
def test_every_position_is_in_exactly_one_place(segments, mem_len, c_mem_len, c, compresses):
    rules = [TransformerXLRule(MemorySizes(mem_len))] * 2
    if compresses:
        rules = [compressing(mem_len, c_mem_len, c), compressing(2, 1, 3)]
    memory = Memory()
    n_read = 0
    for S in segments:
        memory = updated(rules, memory, positions(n_read, S))
        n_read += S
        slots, mem = covered_positions(memory, 0, c)
        remembered = [*chain(*slots, *mem)]
        n_forgotten = n_read - len(remembered)
        # In order, none twice and none missing.
        assert remembered == list(range(n_forgotten, n_read))
        if not compresses:
            assert len(mem) == min(mem_len, n_read)
            continue
        assert n_forgotten % c == 0
        assert n_forgotten == 0 or len(slots) == c_mem_len  # only a full memory forgets
        assert len(slots) <= c_mem_len
        assert len(mem) <= max(mem_len, c - 1) == rules[0].size.longest_memory


@settings(max_examples=60)
@given(
    segments=st.lists(st.integers(1, 7), min_size=1, max_size=7), mem_len=st.integers(0, 9),
    c_mem_len=st.integers(0, 4), c=st.integers(1, 4), window=st.none() | st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_a_query_sees_every_key_of_its_document_and_no_other(segments, mem_len, c_mem_len, c, window, data):
    T = sum(segments)
    B = 2
    rule = compressing(mem_len, c_mem_len, c)

    # Starts of documents, which some of the segments don't have.
    doc_starts = torch.tensor([[data.draw(st.integers(0, 3)) == 0 for _ in range(B)] for _ in range(T)])
    have_starts = [data.draw(st.booleans()) for _ in segments]
    for part, has_starts in zip(doc_starts.split(segments), have_starts, strict=True):
        part &= has_starts
    document = doc_starts.cumsum(0)  # [T, B]

    memory = Memory()
    begin = 0
    for S, has_starts in zip(segments, have_starts, strict=True):
        end = begin + S
        starts = doc_starts[begin:end] if has_starts else None
        x = positions(begin, S, 1, B)
        # As Memory.reset does, but it also clears hidden positions.
        if starts is not None and memory.layers:
            memory = replace(memory, n_valid=memory.valid_positions().masked_fill(starts[0], 0))

        # What queries see.
        slots, mem = covered_positions(memory, 0, c)
        keys = [*slots, *mem, *([position] for position in range(begin, end))]
        key_start = first_key_of(memory, x[0], starts, window, c)
        for b in range(B):
            check_visible_keys(keys, document[:, b], range(begin, end), key_start[b], window)

        # What is remembered, and how much of it belongs to the current document.
        n_valid = memory.n_valid
        n_positions = memory.n_positions([rule.size])
        length = document_length(n_valid, starts, S)
        n_new_slots = rule.size.n_evicted(memory.mem_len + S) // c
        if length is not None and n_new_slots:
            evicted = [*chain(*mem), *range(begin, end)][: n_new_slots * c]
            masked = n_masked_slots(length, memory.mem_len + S, S, n_new_slots, c)
            check_masked_slots(masked, evicted, document[:end], begin, c)
        memory = updated([rule], memory, x)
        n_valid = valid_afterwards(n_valid, starts, S, n_positions, memory.n_positions([rule.size]))
        memory = replace(memory, n_valid=n_valid)
        if n_valid is not None:
            remembered = document[end - memory.n_positions([rule.size]) : end]
            assert n_valid.tolist() == (remembered == document[end - 1]).sum(0).tolist()
        begin = end


def first_key_of(memory, x, starts, window, c):
    """The first key that each query of ``x [S, B, 1]`` sees, ``[B, S]``."""
    S, B, _ = x.shape
    visible = None
    if memory.n_valid is not None:
        visible = visible_past_keys(memory.n_valid, memory.mem_len, memory.n_slots, c)
    key_start = first_visible_key(x, memory.mem_len + memory.n_slots, visible, starts, window)
    return torch.zeros(B, S, dtype=torch.int64) if key_start is None else key_start


def check_visible_keys(keys, document, queries, key_start, window):
    """A query sees the keys all of whose positions are of its document, and within its window."""
    for i, query in enumerate(queries):
        n_keys = len(keys) - len(queries) + i + 1  # up to its own
        for j in range(n_keys):
            is_of_document = bool((document[keys[j]] == document[query]).all())
            is_in_window = window is None or n_keys - 1 - j < window
            assert (j >= key_start[i]) == (is_of_document and is_in_window)


def check_masked_slots(masked, evicted, document, begin, c):
    """New slots are hidden that have a position of an earlier document than the segment's first; all of them
    if a document starts within the segment."""
    for b in range(document.shape[1]):
        current = document[begin, b]
        if current != document[-1, b]:
            assert masked[b] == len(evicted) // c
            continue
        n_hidden = sum(bool(document[position, b] != current) for position in evicted)
        assert masked[b] == -(-n_hidden // c)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda memory, mem: memory.streams(slice(2)), "mem of layer 0"),
     (lambda memory, mem: memory_of(mem, mem), "slots of layer 0 has length 4"),
     (lambda memory, mem: memory_of(mem[:1]), "expected a memory of 2 layers"),
     (lambda memory, mem: mem, "got a list")],
)  # fmt: skip
def test_a_stack_refuses_a_memory_that_does_not_fit(change, message):
    stack = TransformerXL(MemoryLayer(**layer_parts()), 2, mem_len=4)
    x = torch.randn(5, 3, 12)
    _, memory, _ = stack(x)
    mem = [layer.mem for layer in memory.layers]
    with pytest.raises(ValueError, match=message):
        stack(x, change(memory, mem))


@pytest.mark.parametrize("doc_starts", [torch.zeros(5, 3).long(), torch.zeros(3, 5, dtype=torch.bool)])
def test_a_stack_refuses_starts_that_do_not_fit(doc_starts):
    stack = TransformerXL(MemoryLayer(**layer_parts()), 2, mem_len=4)
    with pytest.raises(ValueError, match="doc_starts"):
        stack(torch.randn(5, 3, 12), doc_starts=doc_starts)


def test_a_stack_has_a_rule_for_each_layer():
    with pytest.raises(ValueError, match="2 rules, one for each layer, got 1"):
        MemoryStack(MemoryLayer(**layer_parts()), 2, [TransformerXLRule(MemorySizes(4))])


@pytest.mark.parametrize(("mem_len", "shared"), [(0, False), (63, False), (64, True)])
def test_a_memory_keeps_no_segment_alive_of_which_it_is_small(mem_len, shared):
    memory = small_lm("transformer-xl", mem_len=mem_len)(tokens(128)).memory
    gc.collect()
    mem = [layer.mem for layer in memory.layers]
    assert [len(x) for x in mem] == [mem_len] * 2
    assert [x.untyped_storage().nbytes() == x.nbytes for x in mem] == [not shared] * 2


def memory_of_three_streams():
    """A memory that is nowhere zero, with other documents in each stream."""
    mem = [x + torch.arange(1.0, 4.0)[:, None] for x in positions(0, 5, B=3)]
    return memory_of(mem, n_valid=torch.tensor([1, 4, 5]))


DONE = torch.tensor([True, False, True])


def test_a_reset_stream_is_cleared():
    memory = memory_of_three_streams()
    cleared = memory.reset(DONE)
    assert cleared.n_valid.tolist() == [0, 4, 0]
    for layer in cleared.layers:
        assert [layer.mem[:, stream].any().item() for stream in range(3)] == [False, True, False]
    assert memory.n_valid.tolist() == [1, 4, 5]
    without_documents = replace(memory, n_valid=None)
    assert without_documents.reset(DONE).n_valid.tolist() == [0, UNBOUNDED, 0]
    assert Memory().reset(DONE) == Memory()


@pytest.mark.parametrize("done", [torch.zeros(2).bool(), torch.zeros(3), torch.zeros(3, 1).bool()])
def test_a_reset_says_of_each_stream_whether_it_is_done(done):
    with pytest.raises(ValueError, match="done"):
        memory_of_three_streams().reset(done)


@pytest.mark.parametrize("chosen", [slice(1), [2, 0], torch.tensor([2, 0]), DONE])
def test_streams_are_chosen(chosen):
    memory = memory_of_three_streams()
    part = memory.streams(chosen)
    assert torch.equal(part.layers[1].mem, memory.layers[1].mem[:, chosen])
    assert torch.equal(part.n_valid, memory.n_valid[chosen])


def test_streams_are_joined():
    memory = memory_of_three_streams()
    first, second, third = (memory.streams([i]) for i in range(3))
    assert Memory.join([first, second, third]) == memory
    without_documents = replace(second, n_valid=None)  # all of it counts
    assert Memory.join([first, without_documents, third]).n_valid.tolist() == [1, UNBOUNDED, 5]
    with pytest.raises(ValueError, match=r"same lengths"):
        Memory.join([first, Memory(second.layers[:1])])


def test_a_rules_own_state_is_joined_reset_detached_and_saved(tmp_path):
    state = {"matrix": torch.randn(4, 3, 4, requires_grad=True), "counts": torch.ones(1, 3)}
    x = torch.randn(2, 3, 12)
    memory = Memory((LayerMemory(x, x[:0], state=state),))
    memory.save(tmp_path / "memory")
    assert Memory.load(tmp_path / "memory") == memory
    assert Memory.join([memory.streams([0]), memory.streams([1, 2])]) == memory
    reset = memory.reset(torch.tensor([True, False, True])).layers[0].state
    assert [bool(reset["matrix"][:, i].any()) for i in range(3)] == [False, True, False]
    assert reset["counts"].tolist() == [[0, 1, 0]]
    assert not memory.detach().layers[0].state["matrix"].requires_grad


def test_a_memory_is_printed_in_one_line():
    lm = small_lm("compressive", mem_len=(6, 3), segment_len=6, c_mem_len=4)
    memory = read(lm, tokens(72, 3))[2]
    assert repr(memory) == f"Memory(2 layers, mem_len=6|3, n_slots=4, streams=3, {torch.float32})"
    assert repr(memory.reset(torch.ones(3).bool())).endswith("documents)")
    assert repr(Memory()) == "Memory(empty)"


def memory_with_documents():
    _, _, memory = read(small_lm("compressive"), tokens(28), documents(28, 2, (3, 1)))
    return memory


def test_a_saved_memory_is_loaded_as_it_was(tmp_path):
    for memory in (Memory(), memory_with_documents()):
        memory.save(tmp_path / "memory")
        assert Memory.load(tmp_path / "memory") == memory


def test_memories_are_equal_only_in_all_parts():
    memory = memory_with_documents()
    changed = memory.map(torch.clone)
    assert changed == memory
    changed.layers[1].slots[0, 0, 0] += 1
    without_slots = memory_of([layer.mem for layer in memory.layers], n_valid=memory.n_valid)
    for different in (changed, replace(memory, n_valid=None), without_slots):
        assert memory != different


@pytest.mark.parametrize("name", ["logits", "0.logits", "mem.0"])
def test_a_file_with_other_tensors_is_no_memory(name, tmp_path):
    path = tmp_path / "other"
    save_file({"0.mem": torch.zeros(2), "0.slots": torch.zeros(2), name: torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=rf"not a saved memory.*{name}"):
        Memory.load(path)


def test_a_file_without_slots_is_no_memory(tmp_path):
    save_file({"0.mem": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"mem and slots of every layer"):
        Memory.load(tmp_path / "other")


def test_a_memory_that_cant_be_read_is_an_error(tmp_path):
    path = tmp_path / "memory"
    memory_with_documents().save(path)
    path.write_bytes(path.read_bytes()[:50])
    for broken in (path, tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match="can't be read"):
            Memory.load(broken)


def test_an_empty_memory_has_the_lengths_of_a_full_one():
    lengths = {"segment_len": 6, "mem_len": (7, 4), "c_mem_len": (4, 3), "compression_rate": (3, 2)}
    lm = small_lm("compressive", **lengths, bptt=1)
    empty = Memory.empty(lm.config, 3, dtype=torch.float64)
    lengths = [(layer.mem_len, layer.n_slots, len(layer.bptt_inputs)) for layer in empty.layers]
    assert lengths == [(6, 4, 6), (4, 3, 6)]
    assert {x.dtype for x in kept(empty)} == {torch.float64}
    assert {x.shape[1:] for x in kept(empty)} == {(3, 12)}
    assert empty.n_valid.tolist() == [0, 0, 0]


ONE = torch.zeros(3, 2, 12)


@pytest.mark.parametrize(
    ("memory", "word"),
    [(memory_of([ONE]), "2 layers"), (memory_of([torch.zeros(3, 4, 12)] * 2), "batch"), (5, "int"),
     (((ONE,) * 2, ()), "tuple|length"), (memory_of([torch.zeros(3, 2, 8)] * 2), r"\[3, 2, 8\]"),
     (Memory((ONE,) * 2), "LayerMemory of layer 0, got a Tensor"),
     (memory_of([ONE.double()] * 2), "float64"),
     (memory_of([ONE, torch.tensor(3.0)], [ONE[:0]] * 2), r"got torch.float32 \[\]"),
     (memory_of([ONE, torch.zeros(4, 2, 12)]), "layer 1"),
     (memory_of([ONE] * 2, [ONE] * 2), "slots"),
     (memory_of([ONE] * 2, n_valid=torch.zeros(3).long()), "valid"),
     (memory_of([ONE] * 2, n_valid=torch.zeros(2)), "valid"),
     (memory_of([ONE] * 2, bptt_inputs=[ONE] * 2), "bptt_inputs"),
     (memory_of([ONE] * 2, state=[{"matrix": torch.zeros(3)}] * 2), "'matrix' in the state of layer 0")],
)  # fmt: skip
def test_a_memory_that_does_not_fit_is_an_error(memory, word):
    with pytest.raises(ValueError, match=word):
        small_lm("transformer-xl", mem_len=5)(tokens(7), memory)


@pytest.mark.parametrize(
    ("model", "memory"),
    [("transformer-xl", memory_of([torch.zeros(6, 2, 12)] * 2)), ("transformer", memory_of([ONE] * 2))],
)
def test_a_memory_that_is_too_long_is_an_error(model, memory):
    with pytest.raises(ValueError, match=r"at most [05]"):
        small_lm(model)(tokens(7), memory)
