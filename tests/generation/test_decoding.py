"""Reading with caches against the forward pass, which reads every segment with its whole memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers import RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer
from memformers.generation.decoding import Decoder, SlidingWindowDecoder, reader
from memformers.models.linear import linear
from memformers.models.memory import Memory
from tests.builders import MODELS, fill_zeros, small_lm

WITH_MEMORY = [model for model in MODELS if model != "transformer"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@torch.no_grad()
def read_by_segments(lm, text):
    """Logits ``[T, B, vocab]`` of the forward pass, and the memory after the last whole segment."""
    lm.eval()
    memory, logits, after_whole_segments = None, [], Memory(())
    for segment in text.split(lm.config.segment_len):
        output = lm(segment, memory)
        logits.append(output.logits)
        memory = output.memory
        if len(segment) == lm.config.segment_len:
            after_whole_segments = memory
    return torch.cat(logits), after_whole_segments


def read_one_by_one(lm, text):
    decoder = Decoder(lm, text.shape[1])
    return torch.stack([decoder.read(token[None]) for token in text]), decoder


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cached_logits_are_those_of_the_forward_pass_over_2000_tokens(model, positions, dtype):
    lm = small_lm(model, positions=positions).to(dtype)
    text = torch.randint(11, (2_000, 1))
    wanted, _ = read_by_segments(lm, text)
    got, _ = read_one_by_one(lm, text)
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE[dtype])
    if dtype == torch.float64:
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(WITH_MEMORY),
    segment_len=st.integers(1, 9),
    mem_len=st.integers(0, 12),
    c_mem_len=st.integers(0, 7),
    compression_rate=st.integers(1, 5),
    norm=st.sampled_from(["pre", "post"]),
    portions=st.lists(st.integers(1, 11), min_size=1, max_size=8),
    data=st.data(),
)
def test_any_lengths_in_any_portions_from_any_segment_on(
    model, segment_len, mem_len, c_mem_len, compression_rate, norm, portions, data
):
    shape = {"segment_len": segment_len, "mem_len": mem_len, "c_mem_len": c_mem_len}
    lm = small_lm(model, compression_rate=compression_rate, norm=norm, **shape).double()
    text = torch.randint(11, (sum(portions), 2))
    wanted, memory = read_by_segments(lm, text)
    start = data.draw(st.integers(0, len(text) // segment_len)) * segment_len
    _, before = read_by_segments(lm, text[:start]) if start else (None, None)
    decoder, end = Decoder(lm, 2, before), start
    for portion in portions:
        part = text[end : end + portion]
        if len(part):
            logits, end = decoder.read(part), end + len(part)
            torch.testing.assert_close(logits, wanted[end - 1], rtol=0, atol=1e-10)
    kept = decoder.memory()
    assert (kept.mem_len, kept.c_mem_len) == (memory.mem_len, memory.c_mem_len)
    got, wanted = ([t for t in (*m.mem, *m.c_mem) if len(t)] for m in (kept, memory))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert torch.equal(decoder.running, text[len(text) // segment_len * segment_len :])


@pytest.mark.parametrize("model", WITH_MEMORY)
def test_buffers_are_allocated_once_and_never_grow(model):
    lm = small_lm(model)
    decoder = Decoder(lm, 1)
    caches = [layer.cache for layer in decoder.layers]
    buffers = [b for cache in caches for b in (cache.inputs, cache.key, cache.value)]
    places, sizes = [b.data_ptr() for b in buffers], [b.numel() for b in buffers]
    for token in torch.randint(11, (300, 1)):
        decoder.read(token[None])
    kept = [b for cache in caches for b in (cache.inputs, cache.key, cache.value)]
    assert [b.data_ptr() for b in kept] == places
    assert [b.numel() for b in kept] == sizes


def test_a_model_without_memory_reads_its_newest_segment_again():
    lm = small_lm("transformer").train()
    text = torch.randint(11, (20, 2))
    stream = reader(lm, 2)
    assert isinstance(stream, SlidingWindowDecoder)
    for end in range(1, 21):
        logits = stream.read(text[end - 1 : end])
        torch.testing.assert_close(logits, lm(text[max(end - 7, 0) : end]).logits[-1])
    assert lm.training


def test_what_cannot_be_decoded_is_an_error():
    with pytest.raises(
        ValueError, match="model='transformer' keeps no memory; read with a SlidingWindowDecoder"
    ):
        Decoder(small_lm("transformer"), 1)
    for kind in MODELS:
        for batch in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=rf"batch={batch} is no number of streams; use a whole"):
                reader(small_lm(kind), batch)
    lm = small_lm("transformer-xl")
    _, memory = read_by_segments(lm, torch.randint(11, (14, 2)))
    with pytest.raises(ValueError, match=r"mem of layer 0 was expected as \[length, batch, d_model\]"):
        Decoder(lm, 3, memory)
    _, longer = read_by_segments(small_lm("transformer-xl", mem_len=9), torch.randint(11, (14, 2)))
    with pytest.raises(
        ValueError, match="memory of 9 positions was given to a model='transformer-xl', which keeps 5 at most"
    ):
        Decoder(lm, 2, longer)


@pytest.mark.parametrize("model", MODELS)
def test_tokens_that_are_no_text_are_an_error(model):
    stream = reader(small_lm(model), 2)
    with pytest.raises(ValueError, match=r"tokens of 2 streams were expected; \[3, 1\] came"):
        stream.read(torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="vocab_size=11"):
        stream.read(torch.full((1, 2), 11))
    with pytest.raises(ValueError, match="at least one of each"):
        stream.read(torch.zeros(0, 2, dtype=torch.long))


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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_users_own_layer_and_feed_forward_network_decode_as_the_forward_pass(positions):
    lm = small_lm("transformer-xl", positions=positions)
    network = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.GELU(), torch.nn.Linear(9, 12))
    attention = RelativeMultiHeadAttention(3, 12, positions=positions)
    layer = GatedLayer(d_model=12, self_attn=attention, feed_forward=network, dropout_prob=0.0)
    lm.transformer = fill_zeros(TransformerXL(layer, 2))
    text = torch.randint(11, (40, 2))
    wanted, _ = read_by_segments(lm, text)
    got, _ = read_one_by_one(lm, text)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    in_portions = Decoder(lm, 2)
    for portion in text.split(9):
        logits = in_portions.read(portion)
    torch.testing.assert_close(logits, wanted[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("layer", [0, 1])
def test_all_layers_advance_together_though_ctrl_c_comes_between_two(model, layer, monkeypatch):
    lm, text = small_lm(model), torch.randint(11, (60, 1))
    disturbed, undisturbed = Decoder(lm, 1), Decoder(lm, 1)
    for i, token in enumerate(text):
        if i % 3 == 0:
            with monkeypatch.context() as patch:
                write = disturbed.layers[layer].cache.write
                patch.setattr(disturbed.layers[layer].cache, "write", interrupted_after(write))
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
def test_greedy_text_is_what_the_forward_pass_would_write_over_2000_tokens(model):
    lm = small_lm(model).double()
    prompt = torch.randint(11, (5, 1))
    text = torch.cat((prompt, torch.stack(list(lm.generate(prompt, 2_000, temperature=0.0)))))
    wanted, _ = read_by_segments(lm, text)
    assert torch.equal(wanted.argmax(-1)[4:-1], text[5:])
    assert len(text.unique()) > 3
