"""What is seen and what is counted where documents begin, against a list of which position is where."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers.models.documents import EVERYTHING, first_of_document, seen_of_past
from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes
from memformers.models.memory_update import compress_memory, truncate_memory
from tests.builders import small_compressive, small_lm, small_xl

LENGTHS = st.integers(0, 9)


def inputs(begin, S, B):
    """Layer inputs ``[S, B, 1]`` whose value is their position in the stream."""
    return [torch.arange(begin, begin + S, dtype=torch.float64)[:, None, None].expand(S, B, 1)]


def seen_by_list(held, document, now):
    """The keys of ``held``, lists of positions, that all lie in document ``now``."""
    return [all(document[p] == now for p in positions) for positions in held]


@settings(max_examples=100)
@given(
    segments=st.lists(st.integers(1, 7), min_size=1, max_size=7),
    mem_len=LENGTHS,
    c_mem_len=st.integers(0, 4),
    c=st.integers(1, 4),
    compresses=st.booleans(),
    data=st.data(),
)
def test_a_query_sees_every_key_of_its_document_and_no_other(
    segments, mem_len, c_mem_len, c, compresses, data
):
    """f_c here keeps a slot's first position, which tells the c positions that it stands for."""
    c = c if compresses else 1
    T, B, memory, at = sum(segments), 2, Memory(()), 0
    lengths = [MemorySizes(mem_len, c_mem_len, c)]
    doc_starts = torch.tensor([[data.draw(st.integers(0, 3)) == 0 for _ in range(B)] for _ in range(T)])
    given = [data.draw(st.booleans()) for _ in segments]
    for part, is_given in zip(doc_starts.split(segments), given, strict=True):
        part &= is_given
    documents = doc_starts.cumsum(0)  # [T, B]
    for S, is_given in zip(segments, given, strict=True):
        of_segment = doc_starts[at : at + S] if is_given else None
        M, C = memory.mem_len, memory.c_mem_len
        seen_now = None if memory.valid is None else seen_of_past(memory.valid, M, C, c)
        key_start = first_of_document(of_segment, seen_now, S, M + C)
        mem = [[int(p)] for p in memory.mem[0][:, 0, 0]] if memory.mem else []
        slots = [[int(p) + i for i in range(c)] for p in memory.c_mem[0][:, 0, 0]] if memory.c_mem else []
        held = slots + mem + [[at + i] for i in range(S)]
        for b in range(B):
            for i in range(S):
                seen = seen_by_list(held, documents[:, b], documents[at + i, b])
                before = 0 if key_start is None else int(key_start[b, i])
                assert [j >= before for j in range(len(held) - S + i + 1)] == seen[: len(held) - S + i + 1]
        if compresses:
            memory, _ = compress_memory(memory, inputs(at, S, B), [lambda old: old[::c]], lengths, of_segment)
        else:
            memory = truncate_memory(memory, inputs(at, S, B), lengths, of_segment)
        at += S
        if memory.valid is not None:
            remembered = documents[:at][at - memory.positions(lengths) :]
            assert memory.valid.tolist() == (remembered == documents[at - 1]).sum(0).tolist()


def test_streams_that_are_done_remember_nothing_and_the_others_all_that_they_did():
    memory, done = Memory(tuple(inputs(0, 5, 3)), valid=torch.tensor([1, 4, 5])), torch.tensor([1, 0, 1])
    assert memory.reset(done.bool()).valid.tolist() == [0, 4, 0]
    assert memory.valid.tolist() == [1, 4, 5]
    assert Memory(memory.mem).reset(done.bool()).valid.tolist() == [0, EVERYTHING, 0]
    assert Memory(()).reset(done.bool()) == Memory(())


@pytest.mark.parametrize("done", [torch.zeros(2).bool(), torch.zeros(3), torch.zeros(3, 1).bool()])
def test_what_does_not_say_which_streams_are_done_is_an_error(done):
    with pytest.raises(ValueError, match=r"done as torch.bool \[3\] on cpu"):
        Memory(tuple(inputs(0, 5, 3))).reset(done)


STARTS = r"doc_starts, .* as torch.bool \[5, 2\] on cpu"
VALID = r"valid as torch.int64 \[2\] on cpu"


@pytest.mark.parametrize(
    ("doc_starts", "valid", "message"),
    [*((torch.zeros(5, *more).bool(), None, STARTS) for more in ((3,), (1,), ())),
     (torch.zeros(5, 2), None, STARTS),
     (torch.zeros(5, 2, device="meta").bool(), None, STARTS),
     *((None, valid, VALID) for valid in (torch.zeros(3).long(), torch.zeros(2, 1).long(), torch.zeros(2)))],
)  # fmt: skip
def test_what_does_not_fit_the_streams_is_an_error_of_one_line(doc_starts, valid, message):
    x, memory = torch.randn(5, 2, 12), Memory((torch.randn(3, 2, 12),) * 2, valid=valid)
    for call in (
        lambda: small_xl()(x, None, doc_starts=doc_starts, valid=valid),
        lambda: small_compressive()(x, None, None, doc_starts=doc_starts, valid=valid),
        lambda: small_lm("transformer-xl")(torch.zeros(5, 2).long(), memory, doc_starts=doc_starts),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_compression_that_does_not_say_its_rate_is_asked_for_it_only_where_it_matters():
    stack = small_compressive()
    for layer in stack.layers:
        layer.compress = torch.nn.Identity()
    x, past = torch.randn(5, 2, 12), [torch.randn(4, 2, 12)] * 2
    stack(x, past, past)
    stack(x, past, None, valid=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="Identity has no compression_rate"):
        stack(x, past, past, valid=torch.tensor([1, 2]))
