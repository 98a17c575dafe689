"""Memory's promise: every past position is in exactly one place, in order, within bounds; and what of it is
seen where documents begin, against a list of which position is where."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from memformers import (
    CompressiveTransformer,
    Memory,
    MemorySizes,
    TransformerXL,
    TransformerXLLayer,
)
from memformers.models.documents import first_visible_key, n_masked_slots, valid_afterwards
from memformers.models.memory import UNBOUNDED, compress_memory, truncate_memory
from memformers.models.stack import MemoryStack
from tests.builders import layer_parts, small_lm
from tests.texts import documents, kept, read, tokens

LENGTHS = st.integers(0, 13)
SEGMENTS = st.lists(st.integers(1, 11), min_size=1, max_size=12)


def positions(start, length, layers=2, B=1):
    """Layer inputs ``[length, B, 1]`` whose value is their position in the text."""
    return [torch.arange(start, start + length, dtype=torch.float64)[:, None, None].expand(-1, B, 1)] * layers


def held(memory, layer, c):
    """The positions that each key of a layer stands for, where f_c keeps the first of c."""
    slots = memory.c_mem[layer][:, 0, 0].tolist() if memory.c_mem else []
    mem = memory.mem[layer][:, 0, 0].tolist() if memory.mem else []
    return [[int(p) + i for i in range(c)] for p in slots], [[int(p)] for p in mem]


@settings(max_examples=150)
@given(segments=SEGMENTS, mem_len=LENGTHS, c_mem_len=LENGTHS, c=st.integers(1, 7), compresses=st.booleans())
def test_every_position_is_in_exactly_one_place(segments, mem_len, c_mem_len, c, compresses):
    memory, seen, sizes = Memory(), 0, [MemorySizes(mem_len, c_mem_len, c), MemorySizes(2, 1, 3)]
    for S in segments:
        if compresses:
            f_cs = [lambda old: old[::c], lambda old: old[::3]]
            memory, _ = compress_memory(memory, positions(seen, S), f_cs, sizes)
        else:
            memory = truncate_memory(memory, positions(seen, S), [MemorySizes(mem_len)] * 2)
        seen += S
        slots, mem = held(memory, 0, c)
        kept = [p for places in slots + mem for p in places]
        forgotten = seen - len(kept)
        assert kept == list(range(forgotten, seen))  # in order, none twice, none missing
        if not compresses:
            assert len(mem) == min(mem_len, seen)
            continue
        assert forgotten % c == 0
        assert forgotten == 0 or len(slots) == c_mem_len  # only a full memory forgets
        assert len(slots) <= c_mem_len
        assert len(mem) <= max(mem_len, c - 1) == sizes[0].longest_memory


@settings(max_examples=60)
@given(
    segments=st.lists(st.integers(1, 7), min_size=1, max_size=7), mem_len=st.integers(0, 9),
    c_mem_len=st.integers(0, 4), c=st.integers(1, 4), window=st.none() | st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_a_query_sees_every_key_of_its_document_and_no_other(segments, mem_len, c_mem_len, c, window, data):
    T, B, memory, at, sizes = sum(segments), 2, Memory(), 0, [MemorySizes(mem_len, c_mem_len, c)]
    doc_starts = torch.tensor([[data.draw(st.integers(0, 3)) == 0 for _ in range(B)] for _ in range(T)])
    are_given = [data.draw(st.booleans()) for _ in segments]
    for part, is_given in zip(doc_starts.split(segments), are_given, strict=True):
        part &= is_given
    document = doc_starts.cumsum(0)  # [T, B]
    for S, is_given in zip(segments, are_given, strict=True):
        starts, x = doc_starts[at : at + S] if is_given else None, positions(at, S, 1, B)
        if starts is not None and memory.mem:  # as Memory.reset does, which also clears what is hidden
            memory = replace(memory, valid=memory.valid_positions().masked_fill(starts[0], 0))
        M, C, valid = memory.mem_len, memory.c_mem_len, memory.valid
        visible = None if valid is None else MemoryStack.visible_past_keys(None, valid, M, C, c)
        first = first_visible_key(x[0], M + C, visible, starts, window)
        slots, mem = held(memory, 0, c)
        keys = slots + mem + [[at + i] for i in range(S)]
        for b, i in ((b, i) for b in range(B) for i in range(S)):
            last = M + C + i  # its own key
            wanted = [(document[key, b] == document[at + i, b]).all() for key in keys[: last + 1]]
            wanted = [w and (window is None or last - j < window) for j, w in enumerate(wanted)]
            begin = 0 if first is None else int(first[b, i])
            assert [j >= begin for j in range(last + 1)] == wanted
        before = memory.positions(sizes)
        memory, compressed = compress_memory(memory, x, [lambda old: old[::c]], sizes, starts)
        n = 0 if compressed is None else len(compressed.new[0])
        if valid is not None or starts is not None:
            oldest = ([p for (p,) in mem] + list(range(at, at + S)))[: n * c]
            masked = n_masked_slots(valid, starts, M, n, c).expand(B)
            for b in range(B):
                now, within = document[at, b], document[at, b] != document[at + S - 1, b]
                hidden = [p for p in oldest if document[p, b] != now]
                assert masked[b] == (n if within else -(-len(hidden) // c))
        at += S
        valid = valid_afterwards(valid, starts, S, before, memory.positions(sizes))
        memory = Memory(memory.mem, memory.c_mem, valid)
        if valid is not None:
            remembered = document[:at][at - memory.positions(sizes) :]
            assert valid.tolist() == (remembered == document[at - 1]).sum(0).tolist()


def test_a_stack_refuses_a_memory_and_starts_that_do_not_fit():
    stack = TransformerXL(TransformerXLLayer(**layer_parts(), size=MemorySizes(4)), 2)
    x = torch.randn(5, 3, 12)
    memory, starts = stack(x)[1], torch.zeros(5, 3, dtype=torch.bool)
    slots = replace(memory, c_mem=memory.mem)
    for past, begin, words in (
        (memory.streams(slice(2)), None, "mem of layer 0"), (slots, None, "c_mem has length 4"),
        (replace(memory, mem=memory.mem[:1]), None, "expected mem of 2 layers"), ([x], None, "got a list"),
        (None, starts.long(), "doc_starts"), (None, starts.T, "doc_starts"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            stack(x, past, doc_starts=begin)
    with pytest.raises(ValueError, match="needs layers of class CompressiveTransformerLayer"):
        CompressiveTransformer(TransformerXLLayer(**layer_parts()), 2)


@pytest.mark.parametrize(("mem_len", "shared"), [(0, False), (63, False), (64, True)])
def test_a_memory_keeps_no_segment_alive_of_which_it_is_less_than_half(mem_len, shared):
    mem = small_lm("transformer-xl", mem_len=mem_len)(tokens(128)).memory.mem
    gc.collect()
    assert [len(x) for x in mem] == [mem_len] * 2
    assert [x.untyped_storage().nbytes() == x.nbytes for x in mem] == [not shared] * 2


def test_streams_are_chosen_joined_and_reset():
    memory, done = Memory(tuple(positions(0, 5, B=3)), valid=torch.tensor([1, 4, 5])), torch.tensor([1, 0, 1])
    memory = Memory(tuple(x + torch.arange(3.0)[:, None] for x in memory.mem), valid=memory.valid)
    cleared = memory.reset(done.bool())
    assert cleared.valid.tolist() == [0, 4, 0]
    assert [x[:, stream].any().item() for x in cleared.mem for stream in range(3)] == [False, True, False] * 2
    assert memory.valid.tolist() == [1, 4, 5]
    assert Memory(memory.mem).reset(done.bool()).valid.tolist() == [0, UNBOUNDED, 0]
    assert Memory().reset(done.bool()) == Memory()
    for chosen in (slice(1), [2, 0], torch.tensor([2, 0]), done.bool()):
        part = memory.streams(chosen)
        assert torch.equal(part.mem[1], memory.mem[1][:, chosen])
        assert torch.equal(part.valid, memory.valid[chosen])
    parts = [memory.streams([i]) for i in range(3)]
    assert Memory.join(parts) == memory
    joined = Memory.join([parts[0], Memory(parts[1].mem), parts[2]])  # valid None: all of it
    assert joined.valid.tolist() == [1, UNBOUNDED, 5]
    with pytest.raises(ValueError, match=r"same lengths"):
        Memory.join([parts[0], Memory(parts[1].mem[:1])])
    wrong = torch.zeros(2).bool(), torch.zeros(3), torch.zeros(3, 1).bool()
    for one in wrong:
        with pytest.raises(ValueError, match="done"):
            memory.reset(one)


def test_a_saved_memory_is_loaded_as_it_was_and_anything_else_is_refused(tmp_path):
    path = tmp_path / "memory"
    for memory in (Memory(), read(small_lm("compressive"), tokens(28), documents(28, 2, (3, 1)))[2]):
        memory.save(path)
        assert Memory.load(path) == memory
    same = memory.map(torch.clone)
    same.c_mem[1][0, 0, 0] += 1
    for other in (same, Memory(memory.mem, memory.c_mem), Memory(memory.mem, valid=memory.valid)):
        assert memory != other
    save_file({"mem.0": torch.zeros(2), "logits": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"not a saved memory.*logits"):
        Memory.load(tmp_path / "other")
    path.write_bytes(path.read_bytes()[:50])
    for broken in (path, tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match="can't be read"):
            Memory.load(broken)


def test_an_empty_memory_has_the_lengths_of_a_full_one():
    lengths = {"segment_len": 6, "mem_len": (7, 4), "c_mem_len": (4, 3), "compression_rate": (3, 2)}
    lm = small_lm("compressive", **lengths, bptt=1)
    empty = Memory.empty(lm.config, 3, dtype=torch.float64)
    assert [x.shape for x in empty.mem + empty.c_mem] == [(n, 3, 12) for n in (6, 4, 4, 3)]
    assert [len(x) for x in empty.slot_inputs] == [6, 6]
    assert {x.dtype for x in kept(empty)} == {torch.float64}
    assert empty.valid.tolist() == [0, 0, 0]


ONE = torch.zeros(3, 2, 12)


@pytest.mark.parametrize(
    ("memory", "word"),
    [(Memory((ONE,)), "2 layers"), (Memory((torch.zeros(3, 4, 12),) * 2), "batch"), (5, "int"),
     (((ONE,) * 2, ()), "tuple|length"), (Memory((torch.zeros(3, 2, 8),) * 2), r"\[3, 2, 8\]"),
     (Memory((ONE.double(),) * 2), "float64"),
     (Memory((ONE, torch.tensor(3.0))), r"got torch.float32 \[\]"),
     (Memory((ONE, torch.zeros(4, 2, 12))), "layer 1"),
     (Memory((ONE,) * 2, (ONE,) * 2), "c_mem"), (Memory((ONE,) * 2, valid=torch.zeros(3).long()), "valid"),
     (Memory((ONE,) * 2, valid=torch.zeros(2)), "valid"),
     (Memory((ONE,) * 2, slot_inputs=(ONE,) * 2), "slot_inputs")],
)  # fmt: skip
def test_a_memory_that_does_not_fit_is_an_error(memory, word):
    with pytest.raises(ValueError, match=word):
        small_lm("transformer-xl", mem_len=5)(tokens(7), memory)
    for model, wrong in (
        ("transformer-xl", Memory((torch.zeros(6, 2, 12),) * 2)),
        ("transformer", Memory((ONE,) * 2)),
    ):
        with pytest.raises(ValueError, match=r"at most [05]"):
            small_lm(model)(tokens(7), wrong)
