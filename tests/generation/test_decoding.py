"""Reading with caches against the forward pass, which reads every segment with its whole memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from experiments.memories.averages import Averages
from memformers import AdaptiveConfig, MemoryLM, TransformerXL, TransformerXLLayer
from memformers.generation.decoding import Decoder
from memformers.generation.decoding import Decoder as reader
from memformers.generation.memory_file import MODEL, fingerprint, load_memory, save_memory
from memformers.models.linear import linear
from memformers.models.memory import Memory
from tests.builders import MODELS, SMALL, fill_zeros, layer_parts, small_lm
from tests.texts import EXACT, after_whole_segments, documents, kept, read, read_on, same, tokens

WITH_MEMORY = [model for model in MODELS if model != "transformer"]
exact = pytest.mark.usefixtures("float64")
LENGTHS = pytest.mark.parametrize("length", [300, pytest.param(2_000, marks=pytest.mark.long)])


def same_memory(got, wanted):
    parts = (kept(got), kept(Memory(wanted.mem, wanted.c_mem)))
    same(*([x for x in tensors if len(x)] for tensors in parts))
    assert (got.valid is None) == (wanted.valid is None)
    assert got.valid is None or torch.equal(got.valid, wanted.valid)


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@LENGTHS
@torch.no_grad()
def test_cached_logits_are_those_of_the_forward_pass(length, model, positions, dtype, atol):
    lm, text = small_lm(model, positions=positions).to(dtype), tokens(length, 1)
    wanted, *_ = read(lm, text)
    got = read_on(Decoder(lm, 1), text)
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
    if dtype == torch.float64:
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


CLUSTERS = {"embedding": "adaptive", "norm": "post"}
OTHERS = [
    *((model, CLUSTERS | {"adaptive": AdaptiveConfig((3, 7), 2, None, tied, tied)})
      for model in WITH_MEMORY for tied in (False, True)),
    *(("compressive", {"compression": name}) for name in ("dilated", "max", "most-used")),
    ("compressive", {"compression_loss": "auto-encoding"}), ("compressive", {"compression_start": "mean"}),
    ("compressive", {"compression": "mean", "compression_loss": "none"}),
]  # fmt: skip
"""With another vocabulary, or another compression than a convolution that learns from attention."""


@exact
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("model", "changes"), OTHERS)
def test_so_they_are_whatever_the_vocabulary_and_the_compression(model, changes, bounded):
    lm, text = small_lm(model, **changes).eval(), tokens(45, 3)
    doc_starts = documents(45, 3, (9, 0), (16, 1), (30, 1)) if bounded else None
    logits, *_ = read(lm, text, doc_starts)
    torch.testing.assert_close(read_on(Decoder(lm, 3), text, doc_starts), logits, **EXACT)


@exact
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("portion", [1, 7])
def test_so_are_those_of_a_memory_of_ones_own_whose_keys_are_kept(portion, bounded):
    lm, text = MemoryLM(replace(SMALL, model=Averages, mem_len=7)).double().eval(), tokens(60, 3)
    doc_starts = documents(60, 3, (9, 0), (16, 1), (30, 1)) if bounded else None
    logits, *_ = read(lm, text, doc_starts)
    decoder = Decoder(lm, 3)
    wanted = torch.stack([part[-1] for part in logits.split(portion)])
    torch.testing.assert_close(read_on(decoder, text, doc_starts, portion), wanted, **EXACT)


@exact
@settings(max_examples=60)
@given(
    model=st.sampled_from(WITH_MEMORY),
    positions=st.sampled_from(["learned", "sinusoidal"]),
    norm=st.sampled_from(["pre", "post"]),
    shape=st.fixed_dictionaries(
        {
            "segment_len": st.integers(1, 9),
            "mem_len": st.integers(0, 12),
            "c_mem_len": st.integers(0, 5),
            "compression_rate": st.integers(1, 5),
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
    """Logits, the memory, its ``valid``, and the running segment."""
    same_length = same_length and model == "transformer-xl" and shape["mem_len"] > 0
    lm = small_lm(model, **shape, positions=positions, norm=norm, same_length=same_length, n_layers=1).eval()
    before = 2 * shape["segment_len"]
    *_, memory = read(lm, tokens(before, 3), documents(before, 3))
    memory = Memory(memory.mem, memory.c_mem).reset(torch.tensor(done)) if any(done) else memory
    T = sum(portions)
    text, doc_starts = tokens(T, 3), documents(T, 3, *(pair for pair in begins if pair[0] < T))
    wanted, *_ = read(lm, text, doc_starts, memory)
    after = after_whole_segments(lm, text, doc_starts, memory)
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
    assert torch.equal(decoder.stepper.running, text[T // lm.config.segment_len * lm.config.segment_len :])


@pytest.mark.parametrize("model", WITH_MEMORY)
def test_buffers_are_allocated_once_and_never_grow(model):
    lm = small_lm(model)
    decoder = Decoder(lm, 1)
    buffers = [b for layer in decoder.stepper.layers for b in (layer.inputs, layer.key, layer.value)]
    places, sizes = [b.data_ptr() for b in buffers], [b.numel() for b in buffers]
    for token in torch.randint(11, (300, 1)):
        decoder.read(token[None])
    kept = [b for layer in decoder.stepper.layers for b in (layer.inputs, layer.key, layer.value)]
    assert [b.data_ptr() for b in kept] == places
    assert [b.numel() for b in kept] == sizes


def test_a_model_without_memory_reads_its_newest_segment_again():
    lm = small_lm("transformer").train()
    text = torch.randint(11, (20, 2))
    stream = reader(lm, 2)
    assert stream.stepper.slides
    for end in range(1, 21):
        logits = stream.read(text[end - 1 : end])
        torch.testing.assert_close(logits, lm(text[max(end - 7, 0) : end]).logits[-1])
    assert lm.training


def test_what_cannot_be_decoded_is_an_error():
    with pytest.raises(ValueError, match="model='transformer' keeps no memory"):
        Decoder(small_lm("transformer"), 1)
    for kind in MODELS:
        for batch in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=f"batch={batch}"):
                reader(small_lm(kind), batch)
    lm = small_lm("transformer-xl")
    *_, memory = read(lm, tokens(14))
    with pytest.raises(ValueError, match=r"mem of layer 0 as \[length, batch, d_model\]"):
        Decoder(lm, 3, memory)
    *_, longer = read(small_lm("transformer-xl", mem_len=9), tokens(14))
    with pytest.raises(ValueError, match=r"memory of 9 positions .* model='transformer-xl', which keeps 5"):
        Decoder(lm, 2, longer)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("text", "doc_starts", "message"),
    [(tokens(3, 1), None, r"tokens of 2 streams, got \[3, 1\]"),
     (torch.full((1, 2), 11), None, "vocab_size=11"),
     (tokens(0), None, "at least one of each"),
     (tokens(3), torch.zeros(3, 1, dtype=torch.bool), r"doc_starts, .* \[3, 2\] on cpu"),
     (tokens(3), torch.zeros(3, 2), r"doc_starts, .* \[3, 2\] on cpu")],
)  # fmt: skip
def test_what_is_no_text_of_these_streams_is_an_error(model, text, doc_starts, message):
    stream = reader(small_lm(model), 2)
    with pytest.raises(ValueError, match=message):
        stream.read(text, doc_starts)
    assert stream.logits is None


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("features", [12, 10, 7])
def test_a_map_of_few_rows_is_the_same_map(rows, features, monkeypatch):
    monkeypatch.setattr("memformers.models.linear.LARGE", 1)
    module, x = torch.nn.Linear(5, features), torch.randn(rows, 1, 5)
    with torch.no_grad():
        torch.testing.assert_close(linear(module, x), module(x))


class GatedLayer(TransformerXLLayer):
    """A user's own layer: a gate decides how much of each sum is new (Parisotto et al. 2020)."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.gate = torch.nn.Linear(2 * self.d_model, self.d_model)

    def transform(self, x, attend):
        for new in (attend, lambda x: self.feed_forward(self.norm_ff(x))):
            y = new(x)
            x = x + self.gate(torch.cat((x, y), dim=-1)).sigmoid() * y
        return x


@exact
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_users_own_layer_and_feed_forward_network_decode_as_the_forward_pass(positions):
    lm = small_lm("transformer-xl", positions=positions)
    network = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.GELU(), torch.nn.Linear(9, 12))
    layer = GatedLayer(**(layer_parts(positions=positions) | {"feed_forward": network}))
    lm.transformer = fill_zeros(TransformerXL(layer, 2)).eval()
    text = torch.randint(11, (40, 2))
    wanted, *_ = read(lm, text)
    torch.testing.assert_close(read_on(Decoder(lm, 2), text), wanted, **EXACT)
    torch.testing.assert_close(read_on(Decoder(lm, 2), text, portion=9)[-1], wanted[-1], **EXACT)


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("layer", [0, 1])
def test_all_layers_advance_together_though_ctrl_c_comes_between_two(model, layer, monkeypatch):
    lm, text = small_lm(model), torch.randint(11, (60, 1))
    disturbed, undisturbed = Decoder(lm, 1), Decoder(lm, 1)
    for i, token in enumerate(text):
        if i % 3 == 0:
            with monkeypatch.context() as patch:
                take_in = disturbed.stepper.layers[layer].take_in
                patch.setattr(disturbed.stepper.layers[layer], "take_in", interrupted_after(take_in))
                with pytest.raises(KeyboardInterrupt):
                    disturbed.read(token[None])
        wanted, got = undisturbed.read(token[None]), disturbed.read(token[None])
        assert torch.equal(got, wanted)
    a, b = disturbed.memory(), undisturbed.memory()
    assert all(map(torch.equal, (*a.mem, *a.c_mem), (*b.mem, *b.c_mem)))


def interrupted_after(call):
    def interrupted(*arguments):
        call(*arguments)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("model", WITH_MEMORY)
@LENGTHS
def test_greedy_text_is_what_the_forward_pass_would_write(length, model):
    lm = small_lm(model).double()
    prompt = torch.randint(11, (5, 1))
    text = torch.cat((prompt, torch.stack(list(lm.generate(prompt, length, temperature=0.0)))))
    wanted, *_ = read(lm, text)
    assert torch.equal(wanted.argmax(-1)[4:-1], text[5:])
    assert len(text.unique()) > 3


@exact
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_stream_that_has_ended_is_given_a_new_document_while_others_go_on(model, positions):
    lm, text = small_lm(model, positions=positions), tokens(70, 3)
    begins = [(21, 0), (42, 0), (42, 2)]  # where a segment and a slot begin
    doc_starts = documents(70, 3, *begins)
    logits = read_on(reader(lm, 3), text, doc_starts)
    for position, stream in [(0, 0), (0, 1), (0, 2), *begins]:
        end = min([p for p, b in begins if b == stream and p > position], default=70)
        wanted = read_on(reader(lm, 1), text[position:end, stream, None])
        torch.testing.assert_close(logits[position:end, stream, None], wanted, **EXACT)


@exact
def test_without_documents_nothing_is_computed_for_them(monkeypatch):
    monkeypatch.setattr("memformers.models.stack.MemoryStack.first_seen", None)
    for model in WITH_MEMORY:
        decoder = Decoder(small_lm(model), 2)
        read_on(decoder, tokens(30, 2), portion=4)
        assert decoder.stepper.doc_starts is None
        assert decoder.memory().valid is None


@exact
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
    wanted, got = (read_on(reader, text[read:], doc_starts[read:]) for reader in (first, second))
    torch.testing.assert_close(got, wanted, **EXACT)


def test_a_memory_without_documents_is_saved_as_before(tmp_path):
    decoder = Decoder(small_lm("transformer-xl"), 1)
    decoder.read(tokens(9, 1))
    save_memory(decoder, tmp_path / "memory.safetensors")
    assert set(load_file(tmp_path / "memory.safetensors")) == {"mem.0", "mem.1", "running", "logits"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"doc_starts": torch.zeros(3, 1, dtype=torch.bool)}, r"doc_starts, .* \[2, 1\]"),
     ({"valid": torch.zeros(2, dtype=torch.int64)}, r"valid as torch.int64 \[1\]"),
     *(({"mem.0": tensor}, r"mem of layer 0 as \[length, batch, d_model\]")
       for tensor in (torch.tensor(3.0), torch.zeros(0), torch.zeros(4, 1)))],
)  # fmt: skip
def test_a_file_whose_tensors_do_not_fit_is_an_error(changed, message, tmp_path):
    lm, path = small_lm("transformer-xl"), tmp_path / "memory.safetensors"
    decoder = Decoder(lm, 1)
    decoder.read(tokens(9, 1))
    save_memory(decoder, path)
    tensors = load_file(path) | changed
    save_file(tensors, path, metadata={MODEL: fingerprint(lm)})
    with pytest.raises(ValueError, match=f"is not a complete memory: .*{message}"):
        load_memory(lm, path)
