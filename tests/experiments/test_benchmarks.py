"""The benchmarks' own arithmetic, checks and reports; nothing is timed here."""

from pathlib import Path

import pytest
import torch

from experiments.benchmarks import __main__ as program
from experiments.benchmarks import attention, decoding, peers
from experiments.benchmarks.training import MODELS, Case
from memformers import ModelConfig
from memformers.common.files import read_json

HERE = Path(attention.__file__).parent


def tiny(model="transformer-xl", **changes):
    sizes = {"d_model": 12, "n_heads": 3, "d_ff": 20, "n_layers": 2, "segment_len": 8, "mem_len": 8}
    sizes |= {"c_mem_len": 6, "compression_rate": 2, "vocab_size": 65, "positions": "learned"}
    return Case("tiny", ModelConfig(model=model, **sizes | changes), 3, 2)


@pytest.mark.parametrize("model", MODELS)
def test_labml_nn_agrees_with_ours_and_a_wrong_peer_is_caught(model):
    case = tiny(model)
    batches = case.batches()
    ours, theirs = peers.two_alike(case.config)
    assert peers.check_parity(ours, theirs, batches) < peers.TOLERANCE
    layer = theirs.transformer.layers[1]
    if model == "compressive":
        layer.compress.requires_grad_(False)
        with pytest.raises(ValueError, match="in the gradient"):
            peers.check_parity(ours, theirs, batches)
    with torch.no_grad():
        layer.self_attn.key_pos_bias += torch.randn(8192, 3)
    with pytest.raises(ValueError, match="labml-nn's model differs"):
        peers.check_parity(ours, theirs, batches)


@pytest.mark.parametrize("name", [attention.SDPA, attention.FLASH])
def test_a_measured_attention_agrees_with_the_definition_and_a_wrong_one_is_caught(name):
    inputs = attention.random_inputs(13, queries=7)
    kernel = attention.IMPLEMENTATIONS[name]
    expected = attention.forward_and_backward(attention.IMPLEMENTATIONS[attention.NAIVE], inputs)
    assert attention.check_parity(kernel, inputs, expected) < attention.TOLERANCE

    def wrong(v, **arguments):
        return kernel(v=v + 1, **arguments)

    with pytest.raises(ValueError, match="equal the definition differs"):
        attention.check_parity(wrong, inputs, expected)


@pytest.mark.long
def test_a_step_with_keys_kept_is_checked_and_measured(monkeypatch):
    seconds = decoding.stepping(streams=2, rounds=1)["seconds"]
    assert {way: len(times) for way, times in seconds.items()} == {"stepper": 1, "gru": 1, "segment": 1}
    monkeypatch.setattr(decoding, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="reading step by step differs"):
        decoding.stepping(streams=2, rounds=1)


def test_the_reports_are_those_of_the_numbers_that_were_measured(tmp_path):
    writers = {"results": program.write_speeds, "decoding": program.write_decoding}
    for name, write in writers.items():
        write(read_json(HERE / f"{name}.json"), tmp_path)
        page = f"{name.upper()}.md"
        assert (tmp_path / page).read_text("utf-8") == (HERE / page).read_text("utf-8"), page


@pytest.mark.long
@pytest.mark.parametrize("only", ["speed", "decoding"])
def test_a_quick_run_measures_everything_and_is_reported(only, tmp_path):
    program.main(program.Options(only, quick=True, out=tmp_path))
    (page,) = tmp_path.glob("*.md")
    assert page.read_text("utf-8").count("\n## ") == {"speed": 4, "decoding": 3}[only]
