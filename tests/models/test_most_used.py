"""The compression that keeps what received the most attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers import CompressionAutoEncoder, MostUsedCompression
from memformers.generation.decoding import Decoder
from memformers.models import most_used
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.lengths import MemoryLengths
from memformers.models.memory import Memory
from memformers.models.most_used import attention_received
from tests.builders import SMALL, small_lm

pytestmark = pytest.mark.usefixtures("float64")


def by_hand(mem, received, c):
    """The slots, written with loops."""
    slots = torch.zeros(len(mem) // c, *mem.shape[1:])
    for n in range(len(slots)):
        for b in range(mem.shape[1]):
            slots[n, b] = mem[max(range(n * c, n * c + c), key=lambda t: float(received[t, b])), b]
    return slots


def received_by_hand(layer, context, S, key_start):
    """Each key's mean probability, by one row of the score formula at a time."""
    attention, (K, B, D) = layer.self_attn, context.shape
    H, E = attention.heads, D // attention.heads
    z, terms = layer.attention_input(context), attention.distance_terms(K)
    total, seen = torch.zeros(K, B), torch.zeros(K, B)
    for b in range(B):
        for i in range(S):
            begin, end = (0 if key_start is None else int(key_start[b, i])), K - S + i + 1
            for h in range(H):
                own = slice(h * E, (h + 1) * E)
                q = attention.query(z[end - 1, b])[own]
                k = attention.key(z[begin:end, b])[:, own]
                distances = torch.arange(end - 1 - begin, -1, -1)
                v = terms["v"][h] if "v" in terms else 0.0
                scores = k @ (q + terms["u"][h]) + terms["r"][h, distances] @ (q + v)
                scores = scores + (terms["s"][h, distances] if "s" in terms else 0.0)
                total[begin:end, b] += (scores / E**0.5).softmax(0) / H
            seen[begin:end, b] += 1
    return total / seen.clamp(min=1)


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 4), c=st.integers(1, 5), data=st.data())
def test_of_every_c_positions_the_one_with_most_attention_is_kept_and_of_equals_the_oldest(n, c, data):
    attention = data.draw(st.lists(st.integers(0, 3), min_size=2 * n * c, max_size=2 * n * c))
    mem, received = torch.randn(n * c, 2, 3), torch.tensor(attention, dtype=torch.float64).view(n * c, 2)
    assert torch.equal(MostUsedCompression(c)(mem, received), by_hand(mem, received, c))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("queries", [3, 64])
@torch.no_grad()
def test_attention_received_is_the_mean_over_heads_and_the_queries_that_may_see(
    positions, norm, queries, monkeypatch
):
    monkeypatch.setattr(most_used, "QUERIES", queries)
    layer = small_lm("compressive", positions=positions, norm=norm).transformer.layers[0]
    context = torch.randn(13, 2, 12)
    key_start = torch.tensor([[0, 0, 0, 9, 9, 9, 9], [2, 2, 2, 2, 2, 11, 12]])
    for of_queries in (None, key_start):
        wanted = received_by_hand(layer, context, 7, of_queries)
        found = attention_received(layer, context, 7, of_queries)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not found[:2, 1].any()


@pytest.mark.parametrize("lengths", [{}, {"segment_len": 9, "mem_len": 2}])
@torch.no_grad()
def test_a_model_keeps_of_each_group_the_input_that_the_newest_segment_looked_at_most(lengths):
    """Slots are inputs as they were, and those that a brute-force count of attention chooses."""
    lm, S = small_lm("compressive", compression="most-used", **lengths).eval(), lengths.get("segment_len", 7)
    memory, made, c = Memory(()), 0, SMALL.compression_rate
    for tokens in torch.randint(11, (6, S, 2)):
        _, inputs = lm.transform(tokens, memory)
        length = memory.mem_len + S
        after = lm(tokens, memory).memory
        n = (length - after.mem_len) // c
        for i, layer in enumerate(lm.transformer.layers if n else ()):
            past = [x[i] for x in (memory.c_mem, memory.mem) if x]
            received = received_by_hand(layer, torch.cat((*past, inputs[i])), S, None)
            old = torch.cat((*past[-1:], inputs[i]) if memory.mem else (inputs[i],))[: n * c]
            wanted = by_hand(old, received[memory.c_mem_len :][: n * c], c)
            assert torch.equal(after.c_mem[i][-n:], wanted[-after.c_mem_len :])
            made += n
        memory = after
    assert made > 8


def test_a_decoder_keeps_the_same_positions_also_where_documents_begin():
    lm, tokens = small_lm("compressive", compression="most-used").eval(), torch.randint(11, (45, 3))
    doc_starts = torch.zeros(45, 3, dtype=torch.bool)
    doc_starts[[9, 16, 30], [0, 1, 1]] = True
    for begins in (None, doc_starts):
        memory, decoder = Memory(()), Decoder(lm, 3)
        for t in range(0, 45, 7):
            some = None if begins is None else begins[t : t + 7]
            logits, memory, _ = lm(tokens[t : t + 7], memory, doc_starts=some)
        for t in range(0, 45, 4):
            last = decoder.read(tokens[t : t + 4], None if begins is None else begins[t : t + 4])
        torch.testing.assert_close(last, logits[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mem_len", [1, 6])
@pytest.mark.parametrize("begin", [6, 9, 13])
def test_slots_of_a_document_hold_its_positions_alone(begin, mem_len):
    """Wherever the document begins: what was read before changes nothing that is seen."""
    lm = small_lm("compressive", compression="most-used", segment_len=6, mem_len=mem_len).eval()
    doc_starts = torch.zeros(36, 1, dtype=torch.bool)
    doc_starts[begin] = True
    found, tokens = [], torch.randint(11, (36, 1))
    for text in (tokens, torch.cat(((tokens[:begin] + 1) % 11, tokens[begin:]))):
        memory, logits = Memory(()), []
        for t in range(0, 36, 6):
            output = lm(text[t : t + 6], memory, doc_starts=doc_starts[t : t + 6])
            memory = output.memory
            logits.append(output.logits)
        found.append(torch.cat(logits)[begin:])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_a_document_is_compressed_as_in_a_fresh_stream():
    lm = small_lm("compressive", compression="most-used", segment_len=6, mem_len=6).eval()
    tokens, doc_starts = torch.randint(11, (42, 1)), torch.zeros(42, 1, dtype=torch.bool)
    doc_starts[9] = True
    memory, fresh = Memory(()), Memory(())
    for t in range(0, 42, 6):
        logits, memory, loss = lm(tokens[t : t + 6], memory, doc_starts=doc_starts[t : t + 6])
        if t >= 6:
            wanted, fresh, wanted_loss = lm(tokens[max(t, 9) : t + 6], fresh)
            torch.testing.assert_close(logits[-len(wanted) :], wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, wanted_loss, rtol=0, atol=1e-10)
    assert loss > 0


def test_nothing_of_it_learns_and_all_else_does():
    lm = small_lm("compressive", compression="most-used")
    tokens, memory = torch.randint(11, (21, 2)), Memory(())
    for part in tokens.split(7):
        logits, memory, loss = lm(part, memory)
    assert loss > 0
    (logits.square().mean() + loss).backward()
    assert all(parameter.grad.any() for parameter in lm.parameters())
    assert not list(lm.transformer.layers[0].compress.parameters())


def test_a_users_own_compression_is_given_attention_where_it_says_that_it_needs_it():
    class Weighted(torch.nn.Module):
        needs_attention, compression_rate = True, 3

        def forward(self, mem, received):
            weights = received.unflatten(0, (-1, 3)).softmax(1)
            return torch.einsum("ncb,ncbd->nbd", weights, mem.unflatten(0, (-1, 3)))

    lm = small_lm("compressive")
    for layer in lm.transformer.layers:
        layer.compress = Weighted()
    inputs = [torch.randn(9, 2, 12) for _ in range(2)]
    memory, _ = lm.transformer.remember(Memory(()), inputs, MemoryLengths(3, 4, 3))
    received = attention_received(lm.transformer.layers[1], inputs[1], 9)[:6]
    torch.testing.assert_close(memory.c_mem[1], Weighted()(inputs[1][:6], received))


def test_it_is_saved_and_loaded_without_a_word_about_weights(tmp_path):
    lm = small_lm("compressive", compression="most-used", compression_loss="none")
    lm.save_pretrained(tmp_path)
    assert MemoryLM.from_pretrained(tmp_path).config == replace(
        SMALL, model="compressive", compression="most-used", compression_loss="none"
    )
    assert not [name for name in lm.state_dict() if ".compress." in name]


def test_what_it_can_not_be_given_is_an_error():
    mem = torch.zeros(6, 2, 4)
    with pytest.raises(ValueError, match="compression_rate=0"):
        MostUsedCompression(0)
    with pytest.raises(ValueError, match="7 memories don't fill whole slots"):
        MostUsedCompression(3)(torch.zeros(7, 2, 4), torch.zeros(7, 2))
    with pytest.raises(ValueError, match=r"each position received, \[6, 2\], but none came"):
        MostUsedCompression(3)(mem)
    with pytest.raises(ValueError, match=r"each position received, \[6, 2\], but \[6, 1\] came"):
        MostUsedCompression(3)(mem, torch.zeros(6, 1))
    with pytest.raises(ValueError, match="MostUsedCompression needs attention too; leave the decoder out"):
        CompressionAutoEncoder(MostUsedCompression(3), 4)
    with pytest.raises(ValueError, match="compression='most-used' has nothing to learn"):
        ModelConfig(compression="most-used", compression_loss="auto-encoding")
