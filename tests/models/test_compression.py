"""Compression functions, and how a config names them."""

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from memformers import Conv1dCompression, DilatedConvCompression, MaxCompression, MeanCompression
from memformers.commands.train import Train, parse_train
from memformers.generation.decoding import Decoder
from memformers.generation.memory_file import fingerprint
from memformers.models.config import ModelConfig, upgraded
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from tests.builders import SMALL, small_lm


def text(length=40):
    return torch.randint(11, (length, 2))


def read(lm, tokens):
    """The last logits, memory and auxiliary loss."""
    memory = Memory(())
    for part in tokens.split(lm.config.segment_len):
        logits, memory, auxiliary_loss = lm(part, memory)
    return logits, memory, auxiliary_loss


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


@pytest.mark.parametrize("f_c", [MeanCompression, MaxCompression, lambda c: DilatedConvCompression(c, 4)])
def test_every_compression_refuses_a_rate_below_one_and_a_rest(f_c):
    with pytest.raises(ValueError, match="compression_rate=0"):
        f_c(0)
    with pytest.raises(ValueError, match="7 memories don't fill whole slots of compression_rate=3"):
        f_c(3)(torch.randn(7, 1, 4))


def test_a_dilation_below_one_is_an_error():
    with pytest.raises(ValueError, match=r"dilations=\(1, 0\) must be distances"):
        DilatedConvCompression(3, 4, dilations=(1, 0))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("begin", [6, 9])
def test_slots_of_a_dilated_convolution_hold_nothing_of_the_document_before(begin):
    lm, tokens = small_lm("compressive", compression="dilated", segment_len=6, mem_len=6), text(30)
    doc_starts = torch.zeros(30, 2, dtype=torch.bool)
    doc_starts[begin] = True
    edges = [0, *range(6, 36, 6)]
    found, memory = [], Memory(())
    for t, end in pairwise(edges):
        logits, memory, _ = lm(tokens[t:end], memory, doc_starts=doc_starts[t:end])
        found.append(logits)
    fresh, memory = [], Memory(())
    for t, end in pairwise(edges):
        if end > begin:
            logits, memory, _ = lm(tokens[max(t, begin) : end], memory)
            fresh.append(logits)
    torch.testing.assert_close(torch.cat(found)[begin:], torch.cat(fresh), rtol=0, atol=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", [{"compression": "max"}, {"compression": "dilated"},
                                      {"compression_loss": "auto-encoding"}])  # fmt: skip
def test_a_decoder_compresses_as_the_forward_pass_does(settings):
    lm, tokens = small_lm("compressive", **settings).eval(), text()
    decoder = Decoder(lm, 2)
    logits = decoder.read(tokens)
    torch.testing.assert_close(logits, read(lm, tokens)[0][-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("f_c", [Conv1dCompression, DilatedConvCompression])
def test_convolutions_that_start_as_the_mean_are_the_mean_and_learn(f_c):
    f_c, mem = f_c(3, 4, start="mean"), torch.randn(6, 2, 4)
    torch.testing.assert_close(f_c(mem), MeanCompression(3)(mem))
    f_c(mem).square().sum().backward()
    assert all(p.grad.any() for p in f_c.parameters())


def test_a_model_draws_all_else_alike_however_it_compresses():
    states = []
    for settings in ({}, {"compression": "mean"}, {"compression_start": "mean"}):
        lm = MemoryLM(replace(SMALL, model="compressive", **settings))
        torch.manual_seed(5)
        lm.reset_parameters()
        states.append(lm.state_dict())
    drawn, mean, from_mean = states
    assert {name for name in drawn if name not in mean} == {n for n in drawn if ".compress." in n}
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in mean.items())
    for name, tensor in from_mean.items():
        assert torch.equal(tensor, drawn[name]) == (".compress." not in name), name
    weight = from_mean["transformer.layers.1.compress.conv.weight"]
    torch.testing.assert_close(weight, torch.eye(12)[..., None].expand(12, 12, 3) / 3)


def test_a_mean_takes_no_gradient_and_every_other_weight_does():
    lm, tokens = small_lm("compressive", compression="mean"), text()
    logits, memory, auxiliary_loss = read(lm, tokens)
    assert memory.c_mem_len == SMALL.c_mem_len
    assert auxiliary_loss > 0
    (F.cross_entropy(logits.flatten(0, 1), tokens[-len(logits) :].flatten()) + auxiliary_loss).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in lm.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "mean", "compression_loss": "none"},
        {"compression": "max"},
        {"compression_start": "mean"},
        {"compression": "dilated", "compression_loss": "auto-encoding"},
    ],
)
def test_a_model_that_compresses_otherwise_is_saved_and_loaded(settings, tmp_path):
    lm, tokens = small_lm("compressive", **settings), text()
    lm.save_pretrained(tmp_path)
    loaded = MemoryLM.from_pretrained(tmp_path)
    assert loaded.config == lm.config
    assert torch.equal(read(loaded, tokens)[0], read(lm.eval(), tokens)[0])


def test_an_older_config_compresses_by_a_convolution_that_was_drawn():
    saved = asdict(replace(SMALL, model="compressive"))
    of_now = "compression", "compression_start", "compression_loss"
    older = {name: value for name, value in saved.items() if name not in of_now}
    assert upgraded(older) == saved


def test_a_memory_file_tells_a_mean_from_a_convolution_but_not_how_it_started():
    lm = small_lm("compressive")
    same, other = (
        small_lm("compressive", compression_start="mean"),
        small_lm("compressive", compression="mean"),
    )
    same.load_state_dict(lm.state_dict())
    other.load_state_dict(lm.state_dict(), strict=False)
    assert fingerprint(same) == fingerprint(lm)
    assert fingerprint(other) != fingerprint(lm)


def test_a_memory_file_does_not_tell_what_a_compression_without_parameters_was_measured_by():
    measured, silent = (
        small_lm("compressive", compression="max", compression_loss=loss) for loss in ("attention", "none")
    )
    silent.load_state_dict(measured.state_dict())
    assert fingerprint(measured) == fingerprint(silent)


def test_the_command_takes_compression_and_its_loss():
    options = ["--model", "compressive", "--compression", "dilated", "--compression-loss", "auto-encoding"]
    config = parse_train(options, Train()).config.model
    assert (config.compression, config.compression_loss) == ("dilated", "auto-encoding")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "min"}, "compression='min' is unknown; use one of conv, dilated, mean, max"),
        ({"compression_start": "zero"}, "compression_start='zero' is unknown; use one of random, mean"),
        ({"compression_loss": "l2"}, "='l2' is unknown; use one of attention, auto-encoding, none"),
        ({"compression": "mean", "compression_start": "mean"}, "'mean' has nothing that starts"),
        ({"compression": "max", "compression_start": "mean"}, "'max' has nothing that starts"),
        ({"compression": "mean", "compression_loss": "auto-encoding"}, "'mean' has nothing to learn"),
        ({"compression_loss": "none"}, "would leave compression='conv' untrained"),
        ({"compression": "dilated", "compression_loss": "none"}, "compression='dilated' untrained"),
    ],
)
def test_a_compression_that_can_not_be_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)
