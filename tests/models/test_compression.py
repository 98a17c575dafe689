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
    Memory,
    MemorySizes,
    MostUsedCompression,
    StridedCompression,
    WeightedCompression,
)
from memformers.models.compression import attention_received
from tests.builders import small_lm


@pytest.mark.parametrize("rate", [1, 2, 5])
def test_compressions_equal_pytorchs_pooling_and_convolution(rate):
    mem, f_c = torch.randn(3 * rate, 2, 4), Conv1dCompression(rate, 4)
    streams = rearrange(mem, "t b d -> b d t")
    wanted = {
        MeanCompression(rate): F.avg_pool1d(streams, rate),
        MaxCompression(rate): F.max_pool1d(streams, rate),
        StridedCompression(rate): streams[..., rate - 1 :: rate],
        f_c: F.conv1d(streams, f_c.conv.weight, f_c.conv.bias, stride=rate),
    }
    for found, slots in wanted.items():
        torch.testing.assert_close(found(mem), rearrange(slots, "b d n -> n b d"))


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


ALL = [MeanCompression, MaxCompression, StridedCompression, MostUsedCompression]
ALL += [partial(f_c, d_model=4) for f_c in (Conv1dCompression, DilatedConvCompression, WeightedCompression)]


@pytest.mark.parametrize(
    ("given", "message"),
    [*((lambda f_c=f_c: f_c(0), "rate=0") for f_c in ALL),
     *((lambda f_c=f_c: f_c(3)(torch.randn(7, 1, 4)), "7 memories") for f_c in ALL),
     (lambda: DilatedConvCompression(3, 4, dilations=(1, 0)), "dilations"),
     (lambda: MostUsedCompression(3)(torch.zeros(6, 2, 4)), "got none"),
     (lambda: MostUsedCompression(3)(torch.zeros(6, 2, 4), torch.zeros(6, 1)), r"got \[6, 1\]"),
     (lambda: CompressionAutoEncoder(MostUsedCompression(3), 4), "needs attention")],
)  # fmt: skip
def test_what_a_compression_can_not_be_given_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        given()


@pytest.mark.usefixtures("float64")
def test_a_weighted_mean_weighs_each_feature_of_each_place():
    f_c, mem = WeightedCompression(3, 4), torch.randn(6, 2, 4)
    torch.nn.init.normal_(f_c.place)
    for slot in range(2):
        x = mem[3 * slot : 3 * slot + 3]  # [c, B, D]
        weights = torch.stack([(x[i] @ f_c.score.weight.T + f_c.place[i]).exp() for i in range(3)])
        torch.testing.assert_close(f_c(mem)[slot], (weights * x).sum(0) / weights.sum(0))


@pytest.mark.parametrize("f_c", [Conv1dCompression, DilatedConvCompression, WeightedCompression])
def test_learned_compressions_that_start_as_the_mean_are_the_mean_and_learn(f_c):
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
    """Each key's mean probability over heads and the queries that see it."""
    z = layer.attention_input(context)
    looks = layer.self_attn.probabilities(query=z[-S:], key=z, key_start=key_start).mean(1)  # [B, S, K]
    return (looks.sum(1) / (looks > 0).sum(1).clamp(min=1)).T


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
