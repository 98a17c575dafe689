"""Compression functions against PyTorch's pooling and convolution."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from memformers import Conv1dCompression, DilatedConvCompression, MaxCompression, MeanCompression


@pytest.mark.parametrize("rate", [1, 2, 5])
def test_compressions_equal_pytorchs_pooling_and_convolution(rate):
    mem, f_c = torch.randn(3 * rate, 2, 4), Conv1dCompression(rate, 4)
    streams = rearrange(mem, "t b d -> b d t")
    wanted = {
        MeanCompression(rate): F.avg_pool1d(streams, rate),
        MaxCompression(rate): F.max_pool1d(streams, rate),
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


ALL = [MeanCompression, MaxCompression]
ALL += [partial(f_c, d_model=4) for f_c in (Conv1dCompression, DilatedConvCompression)]


@pytest.mark.parametrize(
    ("call", "message"),
    [*((lambda f_c=f_c: f_c(0), "rate=0") for f_c in ALL),
     *((lambda f_c=f_c: f_c(3)(torch.randn(7, 1, 4)), "7 memories") for f_c in ALL),
     (lambda: DilatedConvCompression(3, 4, dilations=(1, 0)), "dilations")],
)  # fmt: skip
def test_an_impossible_rate_length_or_dilation_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("f_c", [Conv1dCompression, DilatedConvCompression])
def test_learned_compressions_that_start_as_the_mean_are_the_mean_and_learn(f_c):
    f_c, mem = f_c(3, 4, start="mean"), torch.randn(6, 2, 4)
    torch.testing.assert_close(f_c(mem), MeanCompression(3)(mem))
    f_c(mem).square().sum().backward()
    assert all(p.grad.any() for p in f_c.parameters())
