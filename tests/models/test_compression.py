"""Compression functions against PyTorch's; what they learn from, against the formulas."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from memformers import (
    AttentionReconstructionLoss,
    CompressiveTransformer,
    Conv1dCompression,
    DilatedConvCompression,
    MaxCompression,
    MeanCompression,
)
from tests.builders import fill_zeros, small_compressive, small_lm
from tests.texts import EXACT, documents, gradients, read, tokens


@pytest.mark.parametrize("rate", [1, 2, 5])
def test_compressions_equal_pytorchs_pooling_and_convolution(rate):
    mem = torch.randn(3 * rate, 2, 4)
    f_c = Conv1dCompression(rate, 4)
    streams = rearrange(mem, "t b d -> b d t")
    wanted = {
        MeanCompression(rate): F.avg_pool1d(streams, rate),
        MaxCompression(rate): F.max_pool1d(streams, rate),
        f_c: F.conv1d(streams, f_c.conv.weight, f_c.conv.bias, stride=rate),
    }
    for compression, slots in wanted.items():
        torch.testing.assert_close(compression(mem), rearrange(slots, "b d n -> n b d"))


@pytest.mark.usefixtures("float64")
def test_a_dilated_convolution_reads_what_is_its_dilation_later():
    """And zeros after the end."""
    f_c = DilatedConvCompression(2, 4, dilations=(1, 3))
    mem = torch.randn(6, 2, 4)
    x = mem
    for convolution, dilation in zip(f_c.dilated, (1, 3), strict=True):
        own_weight, later_weight = convolution.weight.unbind(-1)  # [D, D] each
        gelu = torch.cat((F.gelu(x), torch.zeros(dilation, 2, 4)))
        outputs = []
        for t in range(6):
            y = gelu[t] @ own_weight.T + gelu[t + dilation] @ later_weight.T + convolution.bias
            outputs.append(x[t] + y)
        x = torch.stack(outputs)
    torch.testing.assert_close(f_c(mem), f_c.slots(x))


@pytest.mark.parametrize("f_c", [Conv1dCompression, DilatedConvCompression])
def test_compressions_that_start_as_the_mean_are_it_and_learn(f_c):
    f_c = f_c(3, 4, start="mean")
    mem = torch.randn(6, 2, 4)
    torch.testing.assert_close(f_c(mem), MeanCompression(3)(mem))
    f_c(mem).square().sum().backward()
    assert all(p.grad.any() for p in f_c.parameters())


X = torch.randn(9, 2, 12)


class WithRate(nn.Sequential):
    """A user's f_c, which says how many positions it makes a slot of."""

    compression_rate = 3


MAPPED = WithRate(MaxCompression(3), nn.Linear(12, 12))


def stack_of(compress, *loss):
    """A stack of two layers with copies of this f_c."""
    return fill_zeros(CompressiveTransformer(small_compressive().layers[0], 2, 5, 4, compress, *loss))


def loss_of(stack):
    """The auxiliary loss of the last of three random segments."""
    _, losses, _ = read(stack, torch.randn(21, 2, 12), lengths=7)
    return losses[-1]


@pytest.mark.parametrize(
    "settings",
    [*({"positions": p, "norm": n} for p in ("learned", "sinusoidal") for n in ("pre", "post")),
     {"compression": "dilated"}],
)  # fmt: skip
@pytest.mark.parametrize("auxiliary", [False, True])
def test_one_loss_reaches_the_compression_and_the_other_all_else(auxiliary, settings):
    lm = small_lm("compressive", **settings)
    text = tokens(21)
    logits, losses, _ = read(lm, text, through_memory=True)
    loss = losses[-1] if auxiliary else F.cross_entropy(logits.flatten(0, 1), text.flatten())
    assert loss > 0
    for (name, _), grad in zip(lm.named_parameters(), gradients(lm, loss), strict=True):
        assert bool(grad.any()) == ((".f_c." in name) == auxiliary), name


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_attention_loss_compares_memories_with_slots(norm):
    stack = small_compressive(norm=norm)
    layer = stack.layers[0]
    attention = layer.self_attn
    f_c = stack.rules[0].f_c
    h = torch.randn(5, 2, 12)
    mem = torch.randn(6, 2, 12)

    def by_head(project, x):
        """``[B, H, n, E]`` of ``x [n, B, D]``."""
        return project(layer.attention_input(x)).unflatten(-1, (3, 4)).permute(1, 2, 0, 3)

    def content_attention(context):
        query = by_head(attention.query, h)
        key = by_head(attention.key, context)
        value = by_head(attention.value, context)
        return (query @ key.mT / 2.0).softmax(-1) @ value

    wanted = (content_attention(mem) - content_attention(f_c(mem))).square().mean()
    torch.testing.assert_close(AttentionReconstructionLoss([layer])([h], [mem], [f_c(mem)]), wanted)
    assert AttentionReconstructionLoss([layer])([h], [mem[:0]], [mem[:0]]) == 0


@pytest.mark.usefixtures("float64")
def test_the_loss_is_the_mean_over_streams_that_have_slots():
    lm = small_lm("compressive", mem_len=6, segment_len=6, n_layers=1)
    *_, memory = read(lm, tokens(24, 5))
    text = tokens(6, 5)

    def loss(stream, n_valid):
        past = replace(memory.streams([stream]), n_valid=torch.tensor([n_valid]))
        return lm(text[:, [stream]], past).auxiliary_loss

    past = replace(memory, n_valid=torch.tensor([99, 99, 99, 4, 3]))
    together = lm(text, past, doc_starts=documents(6, 5, (0, 1), (4, 2))).auxiliary_loss
    # Stream 1 has just begun and stream 2 does within; of the 6 positions of memory that become two slots,
    # streams 3 and 4 have 4 and 3, and so one whole slot each.
    alone = torch.stack([loss(0, 99), loss(3, 4), loss(4, 3)])
    torch.testing.assert_close(together, alone.mean(), **EXACT)
    assert loss(3, 4) == loss(3, 3) != loss(3, 99)
    assert loss(3, 2) == 0


ALL = [MeanCompression, MaxCompression]
ALL += [partial(f_c, d_model=4) for f_c in (Conv1dCompression, DilatedConvCompression)]


@pytest.mark.parametrize(
    ("do", "word"),
    [*((lambda f_c=f_c: f_c(0), "rate=0") for f_c in ALL),
     *((lambda f_c=f_c: f_c(3)(torch.randn(7, 1, 4)), "7 memories") for f_c in ALL),
     (lambda: DilatedConvCompression(3, 4, dilations=(1, 0)), "dilations"),
     (lambda: stack_of(MAPPED, "squares"), "squares"),
     (lambda: stack_of(MAPPED, "none"), "WithRate"),
     (lambda: AttentionReconstructionLoss(small_compressive().layers)([X], [X, X], [X, X]), "got 1"),
     (lambda: stack_of(nn.Identity()), "compression_rate"),
     (lambda: loss_of(stack_of(WithRate())), "WithRate.forward")],
)  # fmt: skip
def test_a_compression_that_can_not_be_or_learn_is_an_error(do, word):
    with pytest.raises(ValueError, match=word):
        do()
    assert loss_of(stack_of(MaxCompression(3), "none")) == 0
    assert loss_of(stack_of(copy.deepcopy(MAPPED).requires_grad_(False), "none")) == 0
