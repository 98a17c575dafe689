"""Documents that begin in the streams of a decoder: each is read as the forward pass reads it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from memformers.generation import decoding
from memformers.generation.decoding import Decoder, reader
from memformers.generation.memory_file import MODEL, fingerprint, load_memory, save_memory
from memformers.models.memory import Memory
from tests.builders import MODELS, small_lm

pytestmark = pytest.mark.usefixtures("float64")

WITH_MEMORY = [model for model in MODELS if model != "transformer"]
EXACT = {"rtol": 0, "atol": 1e-10}


def tokens(T, B):
    return torch.randint(11, (T, B))


def documents(T, B, *begins):
    """Starts ``[T, B]`` at these pairs of position and stream."""
    doc_starts = torch.zeros(T, B, dtype=torch.bool)
    for position, stream in begins:
        doc_starts[position, stream] = True
    return doc_starts


@torch.no_grad()
def read_by_segments(lm, text, doc_starts, memory=None):
    """Logits ``[T, B, 11]`` of the forward pass, and the memory after the last whole segment."""
    S, logits, after_whole_segments = lm.config.segment_len, [], memory
    for segment, begins in zip(text.split(S), doc_starts.split(S), strict=True):
        output = lm.eval()(segment, memory, doc_starts=begins)
        logits.append(output.logits)
        memory = output.memory
        after_whole_segments = memory if len(segment) == S else after_whole_segments
    return torch.cat(logits), after_whole_segments


def same_memory(got, wanted):
    assert (got.mem_len, got.c_mem_len) == (wanted.mem_len, wanted.c_mem_len)
    for a, b in zip((*got.mem, *got.c_mem), (*wanted.mem, *wanted.c_mem), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert (got.valid is None) == (wanted.valid is None)
    assert got.valid is None or torch.equal(got.valid, wanted.valid)


@settings(deadline=None, max_examples=40)
@given(
    model=st.sampled_from(WITH_MEMORY),
    positions=st.sampled_from(["learned", "sinusoidal"]),
    norm=st.sampled_from(["pre", "post"]),
    shape=st.fixed_dictionaries(
        {
            "segment_len": st.integers(1, 7),
            "mem_len": st.integers(1, 9),
            "c_mem_len": st.integers(1, 5),
            "compression_rate": st.integers(1, 4),
        }
    ),
    same_length=st.booleans(),
    portions=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    begins=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=5),
    done=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_any_documents_in_any_portions_after_any_memory(
    model, positions, norm, shape, same_length, portions, begins, done
):
    """Logits, the memory, and its ``valid``."""
    same_length = same_length and model == "transformer-xl"
    lm = small_lm(model, **shape, positions=positions, norm=norm, same_length=same_length, n_layers=1)
    before = 2 * shape["segment_len"]
    _, memory = read_by_segments(lm, tokens(before, 3), documents(before, 3))
    memory = Memory(memory.mem, memory.c_mem).reset(torch.tensor(done)) if any(done) else memory
    T = sum(portions)
    text, doc_starts = tokens(T, 3), documents(T, 3, *(pair for pair in begins if pair[0] < T))
    wanted, after = read_by_segments(lm, text, doc_starts, memory)
    decoder, end = Decoder(lm, 3, memory), 0
    same_memory(decoder.memory(), memory)
    for portion in portions:
        part = slice(end, end + portion)
        begin_here = doc_starts[part].any()
        logits, end = decoder.read(text[part], doc_starts[part] if begin_here else None), end + portion
        torch.testing.assert_close(logits, wanted[end - 1], **EXACT)
    if after.valid is not None and decoder.memory().valid is None:  # nothing began, and nothing was reset
        assert not doc_starts.any()
        after = Memory(after.mem, after.c_mem)
    same_memory(decoder.memory(), after)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_stream_that_has_ended_is_given_a_new_document_while_others_go_on(model, positions):
    lm, text = small_lm(model, positions=positions), tokens(70, 3)
    begins = [(21, 0), (42, 0), (42, 2)]  # where a segment and a slot begin
    doc_starts = documents(70, 3, *begins)
    together = reader(lm, 3)
    logits = torch.stack([together.read(text[t, None], doc_starts[t, None]) for t in range(70)])
    for position, stream in [(0, 0), (0, 1), (0, 2), *begins]:
        end = min([p for p, b in begins if b == stream and p > position], default=70)
        alone = reader(lm, 1)
        wanted = torch.stack([alone.read(text[t, None, stream, None]) for t in range(position, end)])
        torch.testing.assert_close(logits[position:end, stream, None], wanted, **EXACT)


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_in_which_no_document_begins_does_not_see_that_of_another(model):
    lm, text = small_lm(model), tokens(40, 2)
    doc_starts = documents(40, 2, (9, 0), (25, 0))
    plain, split = reader(lm, 2), reader(lm, 2)
    for t in range(40):
        wanted, got = plain.read(text[t, None]), split.read(text[t, None], doc_starts[t, None])
        torch.testing.assert_close(got[1], wanted[1], **EXACT)
        assert t not in (9, 25) or not torch.allclose(got[0], wanted[0])


def test_without_documents_nothing_is_computed_for_them(monkeypatch):
    monkeypatch.setattr(decoding, "first_of_document", None)
    for model in WITH_MEMORY:
        decoder = Decoder(small_lm(model), 2)
        for portion in tokens(30, 2).split(4):
            decoder.read(portion)
        assert decoder.doc_starts is None
        assert decoder.memory().valid is None


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("read", [9, 14, 33, 37])
def test_a_saved_memory_goes_on_in_its_document(model, read, tmp_path):
    """Whether that began in the running segment or before it."""
    lm, path, text = small_lm(model).eval(), tmp_path / "memory.safetensors", tokens(60, 1)
    doc_starts = documents(60, 1, (8, 0), (36, 0))
    first = Decoder(lm, 1)
    first.read(text[:read], doc_starts[:read])
    save_memory(first, path)
    second = load_memory(lm, path)
    same_memory(second.memory(), first.memory())
    for t in range(read, 60):
        wanted, got = (
            first.read(text[t, None], doc_starts[t, None]),
            second.read(text[t, None], doc_starts[t, None]),
        )
        torch.testing.assert_close(got, wanted, **EXACT)


def test_a_memory_without_documents_is_saved_as_before(tmp_path):
    decoder = Decoder(small_lm("transformer-xl"), 1)
    decoder.read(tokens(9, 1))
    save_memory(decoder, tmp_path / "memory.safetensors")
    assert set(load_file(tmp_path / "memory.safetensors")) == {"mem.0", "mem.1", "running", "logits"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"doc_starts": torch.zeros(3, 1, dtype=torch.bool)}, r"expected doc_starts as boolean \[2, 1\]"),
        ({"valid": torch.zeros(2, dtype=torch.int64)}, r"valid was expected as int64 \[1\]"),
    ],
)
def test_a_file_whose_documents_do_not_fit_is_an_error(changed, message, tmp_path):
    lm, path = small_lm("transformer-xl"), tmp_path / "memory.safetensors"
    decoder = Decoder(lm, 1)
    decoder.read(tokens(9, 1))
    save_memory(decoder, path)
    save_file(load_file(path) | changed, path, metadata={MODEL: fingerprint(lm)})
    with pytest.raises(ValueError, match=f"is not a complete memory: .*{message}"):
        load_memory(lm, path)


@pytest.mark.parametrize("model", MODELS)
def test_starts_of_another_kind_are_an_error(model):
    stream = reader(small_lm(model), 2)
    for doc_starts in (torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 2)):
        with pytest.raises(ValueError, match=r"expected doc_starts as boolean \[3, 2\] on cpu"):
            stream.read(tokens(3, 2), doc_starts)
    assert stream.logits is None
