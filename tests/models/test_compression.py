"""Compression functions, and how a config names them."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from memformers import Conv1dCompression, MeanCompression
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


def test_mean_compression_makes_each_slot_the_mean_of_its_positions():
    mem = torch.randn(6, 2, 4)
    torch.testing.assert_close(MeanCompression(3)(mem), torch.stack([mem[:3].mean(0), mem[3:].mean(0)]))


def test_a_mean_refuses_a_rate_below_one_and_a_rest():
    with pytest.raises(ValueError, match="compression_rate=0"):
        MeanCompression(0)
    with pytest.raises(ValueError, match="7 memories don't fill whole slots of compression_rate=3"):
        MeanCompression(3)(torch.randn(7, 1, 4))


def test_a_convolution_that_starts_as_the_mean_is_the_mean_and_learns():
    f_c, mem = Conv1dCompression(3, 4, start="mean"), torch.randn(6, 2, 4)
    torch.testing.assert_close(f_c(mem), MeanCompression(3)(mem))
    f_c(mem).square().sum().backward()
    assert f_c.conv.weight.grad.abs().sum() > 0


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


@pytest.mark.parametrize("settings", [{"compression": "mean"}, {"compression_start": "mean"}])
def test_a_model_that_compresses_by_the_mean_is_saved_and_loaded(settings, tmp_path):
    lm, tokens = small_lm("compressive", **settings), text()
    lm.save_pretrained(tmp_path)
    loaded = MemoryLM.from_pretrained(tmp_path)
    assert loaded.config == lm.config
    assert torch.equal(read(loaded, tokens)[0], read(lm.eval(), tokens)[0])


def test_an_older_config_compresses_by_a_convolution_that_was_drawn():
    saved = asdict(replace(SMALL, model="compressive"))
    older = {name: value for name, value in saved.items() if not name.startswith("compression_s")}
    older.pop("compression")
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "max"}, "compression='max' is unknown; use 'conv' or 'mean'"),
        ({"compression_start": "zero"}, "compression_start='zero' is unknown; use 'random' or 'mean'"),
        ({"compression": "mean", "compression_start": "mean"}, "'mean' has nothing that starts"),
    ],
)
def test_a_compression_that_can_not_be_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)
