"""Memory's promise: every past position is in exactly one place, in order, within bounds; and what of it is
seen where documents begin, against a list of which position is where."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from memformers import LayerMemory, Memory, MemoryLayer, MemorySizes, TransformerXL
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


def held(memory, layer, c):
    """The positions that each key of a layer stands for, where f_c keeps the first of c."""
    if not memory.layers:
        return [], []
    slots = memory.layers[layer].slots[:, 0, 0].tolist()
    mem = memory.layers[layer].mem[:, 0, 0].tolist()
    return [[int(p) + i for i in range(c)] for p in slots], [[int(p)] for p in mem]


@settings(max_examples=150)
@given(segments=SEGMENTS, mem_len=LENGTHS, c_mem_len=LENGTHS, c=st.integers(1, 7), compresses=st.booleans())
def test_every_position_is_in_exactly_one_place(segments, mem_len, c_mem_len, c, compresses):
    memory, seen = Memory(), 0
    rules = [TransformerXLRule(MemorySizes(mem_len))] * 2
    if compresses:
        rules = [compressing(mem_len, c_mem_len, c), compressing(2, 1, 3)]
    for S in segments:
        memory = updated(rules, memory, positions(seen, S))
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
        assert len(mem) <= max(mem_len, c - 1) == rules[0].size.longest_memory


@settings(max_examples=60)
@given(
    segments=st.lists(st.integers(1, 7), min_size=1, max_size=7), mem_len=st.integers(0, 9),
    c_mem_len=st.integers(0, 4), c=st.integers(1, 4), window=st.none() | st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_a_query_sees_every_key_of_its_document_and_no_other(segments, mem_len, c_mem_len, c, window, data):
    T, B, memory, at = sum(segments), 2, Memory(), 0
    rule = compressing(mem_len, c_mem_len, c)
    doc_starts = torch.tensor([[data.draw(st.integers(0, 3)) == 0 for _ in range(B)] for _ in range(T)])
    are_given = [data.draw(st.booleans()) for _ in segments]
    for part, is_given in zip(doc_starts.split(segments), are_given, strict=True):
        part &= is_given
    document = doc_starts.cumsum(0)  # [T, B]
    for S, is_given in zip(segments, are_given, strict=True):
        starts, x = doc_starts[at : at + S] if is_given else None, positions(at, S, 1, B)
        if starts is not None and memory.layers:  # as Memory.reset does, which also clears what is hidden
            memory = replace(memory, n_valid=memory.valid_positions().masked_fill(starts[0], 0))
        M, C, n_valid = memory.mem_len, memory.n_slots, memory.n_valid
        visible = None if n_valid is None else visible_past_keys(n_valid, M, C, c)
        first = first_visible_key(x[0], M + C, visible, starts, window)
        slots, mem = held(memory, 0, c)
        keys = slots + mem + [[at + i] for i in range(S)]
        for b, i in ((b, i) for b in range(B) for i in range(S)):
            last = M + C + i  # its own key
            wanted = [(document[key, b] == document[at + i, b]).all() for key in keys[: last + 1]]
            wanted = [w and (window is None or last - j < window) for j, w in enumerate(wanted)]
            begin = 0 if first is None else int(first[b, i])
            assert [j >= begin for j in range(last + 1)] == wanted

        before = memory.n_positions([rule.size])
        length = document_length(n_valid, starts, S)
        n = rule.size.n_evicted(M + S) // c
        memory = updated([rule], memory, x)
        if length is not None and n:
            oldest = ([p for (p,) in mem] + list(range(at, at + S)))[: n * c]
            masked = n_masked_slots(length, M + S, S, n, c)
            for b in range(B):
                now, within = document[at, b], document[at, b] != document[at + S - 1, b]
                hidden = [p for p in oldest if document[p, b] != now]
                assert masked[b] == (n if within else -(-len(hidden) // c))
        at += S
        n_valid = valid_afterwards(n_valid, starts, S, before, memory.n_positions([rule.size]))
        memory = replace(memory, n_valid=n_valid)
        if n_valid is not None:
            remembered = document[:at][at - memory.n_positions([rule.size]) :]
            assert n_valid.tolist() == (remembered == document[at - 1]).sum(0).tolist()


def test_a_stack_refuses_a_memory_and_starts_that_do_not_fit():
    stack = TransformerXL(MemoryLayer(**layer_parts()), 2, mem_len=4)
    x = torch.randn(5, 3, 12)
    memory, starts = stack(x)[1], torch.zeros(5, 3, dtype=torch.bool)
    mem = [layer.mem for layer in memory.layers]
    for past, begin, words in (
        (memory.streams(slice(2)), None, "mem of layer 0"),
        (memory_of(mem, mem), None, "slots of layer 0 has length 4"),
        (memory_of(mem[:1]), None, "expected a memory of 2 layers"), ([x], None, "got a list"),
        (None, starts.long(), "doc_starts"), (None, starts.T, "doc_starts"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            stack(x, past, doc_starts=begin)
    with pytest.raises(ValueError, match="2 rules, one for each layer, got 1"):
        TransformerXL.__mro__[1](MemoryLayer(**layer_parts()), 2, [TransformerXLRule(MemorySizes(4))])


@pytest.mark.parametrize(("mem_len", "shared"), [(0, False), (63, False), (64, True)])
def test_a_memory_keeps_no_segment_alive_of_which_it_is_less_than_half(mem_len, shared):
    memory = small_lm("transformer-xl", mem_len=mem_len)(tokens(128)).memory
    gc.collect()
    mem = [layer.mem for layer in memory.layers]
    assert [len(x) for x in mem] == [mem_len] * 2
    assert [x.untyped_storage().nbytes() == x.nbytes for x in mem] == [not shared] * 2


def test_streams_are_chosen_joined_and_reset():
    done = torch.tensor([1, 0, 1])
    mem = [x + torch.arange(3.0)[:, None] for x in positions(0, 5, B=3)]
    memory = memory_of(mem, n_valid=torch.tensor([1, 4, 5]))
    cleared = memory.reset(done.bool())
    assert cleared.n_valid.tolist() == [0, 4, 0]
    seen = [layer.mem[:, stream].any().item() for layer in cleared.layers for stream in range(3)]
    assert seen == [False, True, False] * 2
    assert memory.n_valid.tolist() == [1, 4, 5]
    assert memory_of(mem).reset(done.bool()).n_valid.tolist() == [0, UNBOUNDED, 0]
    assert Memory().reset(done.bool()) == Memory()
    for chosen in (slice(1), [2, 0], torch.tensor([2, 0]), done.bool()):
        part = memory.streams(chosen)
        assert torch.equal(part.layers[1].mem, mem[1][:, chosen])
        assert torch.equal(part.n_valid, memory.n_valid[chosen])
    parts = [memory.streams([i]) for i in range(3)]
    assert Memory.join(parts) == memory
    joined = Memory.join([parts[0], replace(parts[1], n_valid=None), parts[2]])  # None: all of it
    assert joined.n_valid.tolist() == [1, UNBOUNDED, 5]
    with pytest.raises(ValueError, match=r"same lengths"):
        Memory.join([parts[0], Memory(parts[1].layers[:1])])
    wrong = torch.zeros(2).bool(), torch.zeros(3), torch.zeros(3, 1).bool()
    for one in wrong:
        with pytest.raises(ValueError, match="done"):
            memory.reset(one)


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


def test_a_saved_memory_is_loaded_as_it_was_and_anything_else_is_refused(tmp_path):
    path = tmp_path / "memory"
    for memory in (Memory(), read(small_lm("compressive"), tokens(28), documents(28, 2, (3, 1)))[2]):
        memory.save(path)
        assert Memory.load(path) == memory
    same = memory.map(torch.clone)
    same.layers[1].slots[0, 0, 0] += 1
    without = memory_of([layer.mem for layer in memory.layers], n_valid=memory.n_valid)
    for other in (same, replace(memory, n_valid=None), without):
        assert memory != other
    for name in ("logits", "0.logits", "mem.0"):
        save_file(
            {"0.mem": torch.zeros(2), "0.slots": torch.zeros(2), name: torch.zeros(2)}, tmp_path / "other"
        )
        with pytest.raises(ValueError, match=rf"not a saved memory.*{name}"):
            Memory.load(tmp_path / "other")
    save_file({"0.mem": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"mem and slots of every layer"):
        Memory.load(tmp_path / "other")
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
    for model, wrong in (
        ("transformer-xl", memory_of([torch.zeros(6, 2, 12)] * 2)),
        ("transformer", memory_of([ONE] * 2)),
    ):
        with pytest.raises(ValueError, match=r"at most [05]"):
            small_lm(model)(tokens(7), wrong)
