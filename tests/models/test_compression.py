"""Compression functions, and how a config names them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers import (
    CompressionAutoEncoder,
    Conv1dCompression,
    DilatedConvCompression,
    MaxCompression,
    MeanCompression,
    MostUsedCompression,
)
from memformers.models.compression import attention_received
from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes
from tests.builders import SMALL, small_lm
from tests.texts import tokens


def functions(rate=3, d_model=4):
    """One of each f_c, by name."""
    return {
        "conv": Conv1dCompression(rate, d_model),
        "dilated": DilatedConvCompression(rate, d_model),
        "mean": MeanCompression(rate),
        "max": MaxCompression(rate),
    }


@pytest.mark.parametrize("rate", [1, 2, 5])
def test_compressions_equal_pytorchs_pooling_and_convolution(rate):
    mem, f_c = torch.randn(3 * rate, 2, 4), functions(rate)
    streams = rearrange(mem, "t b d -> b d t")
    wanted = {
        "mean": F.avg_pool1d(streams, rate),
        "max": F.max_pool1d(streams, rate),
        "conv": F.conv1d(streams, f_c["conv"].conv.weight, f_c["conv"].conv.bias, stride=rate),
    }
    for name, slots in wanted.items():
        torch.testing.assert_close(f_c[name](mem), rearrange(slots, "b d n -> n b d"))


@pytest.mark.usefixtures("float64")
def test_a_dilated_convolution_adds_what_lies_its_dilation_later_and_zeros_after_the_end():
    f_c, mem = DilatedConvCompression(2, 4, dilations=(1, 3)), torch.randn(6, 2, 4)
    x = mem
    for convolution, dilation in zip(f_c.dilated, (1, 3), strict=True):
        here, later = convolution.weight.unbind(-1)  # [D, D] each
        gelu = torch.cat((F.gelu(x), torch.zeros(dilation, 2, 4)))
        x = torch.stack(
            [x[t] + gelu[t] @ here.T + gelu[t + dilation] @ later.T + convolution.bias for t in range(6)]
        )
    torch.testing.assert_close(f_c(mem), f_c.slots(x))


@pytest.mark.parametrize(("name", "later"), [("conv", 0), ("mean", 0), ("max", 0), ("dilated", 7)])
def test_a_slot_depends_on_its_own_positions_and_in_a_dilated_convolution_on_the_next(name, later):
    f_c, mem = functions()[name], torch.randn(15, 2, 64 if name == "max" else 4, requires_grad=True)
    for slot, made in enumerate(f_c(mem)):
        (gradient,) = torch.autograd.grad(made[0].sum(), mem, retain_graph=True)
        assert not gradient[:, 1].any()  # another stream
        reached = gradient[:, 0].any(dim=-1).nonzero().flatten().tolist()
        assert reached == list(range(3 * slot, min(3 * slot + 3 + later, 15)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", functions())
def test_the_gradients_of_a_compression_agree_with_finite_differences(name):
    f_c, mem = functions(2, 3)[name], torch.randn(4, 1, 3, requires_grad=True)
    inputs = (mem, *f_c.parameters())
    names = [name for name, _ in f_c.named_parameters()]
    assert torch.autograd.gradcheck(
        lambda mem, *weights: torch.func.functional_call(f_c, dict(zip(names, weights, strict=True)), mem),
        inputs,
    )


@pytest.mark.parametrize(
    "f_c",
    [MeanCompression,
     MaxCompression,
     MostUsedCompression,
     *(partial(f_c, d_model=4) for f_c in (Conv1dCompression, DilatedConvCompression))],
)  # fmt: skip
def test_every_compression_refuses_a_rate_below_one_and_a_rest(f_c):
    with pytest.raises(ValueError, match="compression_rate=0"):
        f_c(0)
    with pytest.raises(ValueError, match="7 memories"):
        f_c(3)(torch.randn(7, 1, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [(lambda: DilatedConvCompression(3, 4, dilations=(1, 0)), "dilations"),
     (lambda: MostUsedCompression(3)(torch.zeros(6, 2, 4)), "got none"),
     (lambda: MostUsedCompression(3)(torch.zeros(6, 2, 4), torch.zeros(6, 1)), r"got \[6, 1\]"),
     (lambda: CompressionAutoEncoder(MostUsedCompression(3), 4), "needs attention")],
)  # fmt: skip
def test_what_a_compression_can_not_be_given_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        given()


@pytest.mark.parametrize("f_c", [Conv1dCompression, DilatedConvCompression])
def test_convolutions_that_start_as_the_mean_are_the_mean_and_learn(f_c):
    f_c, mem = f_c(3, 4, start="mean"), torch.randn(6, 2, 4)
    torch.testing.assert_close(f_c(mem), MeanCompression(3)(mem))
    f_c(mem).square().sum().backward()
    assert all(p.grad.any() for p in f_c.parameters())


def most_used_by_hand(mem, received, c):
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


@pytest.mark.usefixtures("float64")
@settings(max_examples=50)
@given(n=st.integers(1, 4), c=st.integers(1, 5), data=st.data())
def test_of_every_c_positions_the_one_with_most_attention_is_kept_and_of_equals_the_oldest(n, c, data):
    attention = data.draw(st.lists(st.integers(0, 3), min_size=2 * n * c, max_size=2 * n * c))
    mem, received = torch.randn(n * c, 2, 3), torch.tensor(attention, dtype=torch.float64).view(n * c, 2)
    assert torch.equal(MostUsedCompression(c)(mem, received), most_used_by_hand(mem, received, c))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("queries", [3, 64])
@torch.no_grad()
def test_attention_received_is_the_mean_over_heads_and_the_queries_that_may_see(
    positions, norm, queries, monkeypatch
):
    monkeypatch.setattr("memformers.models.compression.QUERIES", queries)
    layer = small_lm("compressive", positions=positions, norm=norm).transformer.layers[0]
    context = torch.randn(13, 2, 12)
    key_start = torch.tensor([[0, 0, 0, 9, 9, 9, 9], [2, 2, 2, 2, 2, 11, 12]])
    for of_queries in (None, key_start):
        wanted = received_by_hand(layer, context, 7, of_queries)
        found = attention_received(layer, context, 7, of_queries)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not found[:2, 1].any()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("lengths", [{}, {"segment_len": 9, "mem_len": 2}])
@torch.no_grad()
def test_a_model_keeps_of_each_group_the_input_that_the_newest_segment_looked_at_most(lengths):
    """Slots are inputs as they were, and those that a brute-force count of attention chooses."""
    lm, S = small_lm("compressive", compression="most-used", **lengths).eval(), lengths.get("segment_len", 7)
    memory, made, c = Memory(), 0, SMALL.compression_rate
    for segment in tokens(6 * S).split(S):
        _, inputs = lm.transformer(lm.embed(segment), memory, sizes=lm.config.memory_sizes)
        length = memory.mem_len + S
        after = lm(segment, memory).memory
        n = (length - after.mem_len) // c
        for i, layer in enumerate(lm.transformer.layers if n else ()):
            past = [x[i] for x in (memory.c_mem, memory.mem) if x]
            received = received_by_hand(layer, torch.cat((*past, inputs[i])), S, None)
            old = torch.cat((*past[-1:], inputs[i]) if memory.mem else (inputs[i],))[: n * c]
            wanted = most_used_by_hand(old, received[memory.c_mem_len :][: n * c], c)
            assert torch.equal(after.c_mem[i][-n:], wanted[-after.c_mem_len :])
            made += n
        memory = after
    assert made > 8


@pytest.mark.usefixtures("float64")
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
    memory, _ = lm.transformer.remember(Memory(), inputs, [MemorySizes(3, 4, 3)] * 2)
    received = attention_received(lm.transformer.layers[1], inputs[1], 9)[:6]
    torch.testing.assert_close(memory.c_mem[1], Weighted()(inputs[1][:6], received))
