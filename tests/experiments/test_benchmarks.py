"""The benchmarks' own arithmetic, checks and reports; nothing is timed here."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments.benchmarks import __main__ as program
from experiments.benchmarks import attention, decoding, peers, reports, rotary
from experiments.benchmarks.training import MODELS, Case
from memformers import ModelConfig
from memformers.common.files import read_json

HERE = Path(attention.__file__).parent


def tiny(model="transformer-xl", **changes):
    sizes = {"d_model": 12, "n_heads": 3, "d_ff": 20, "n_layers": 2, "segment_len": 8, "mem_len": 8}
    sizes |= {"c_mem_len": 6, "compression_rate": 2, "vocab_size": 65, "positions": "learned"}
    return Case("tiny", ModelConfig(model=model, **sizes | changes), 3, 2)


@pytest.mark.parametrize("model", MODELS)
def test_labml_nn_agrees_with_ours_or_is_caught(model):
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
def test_an_attention_agrees_with_the_definition_or_is_caught(name):
    inputs = attention.random_inputs(13, queries=7)
    kernel = attention.IMPLEMENTATIONS[name]
    expected = attention.forward_and_backward(attention.IMPLEMENTATIONS[attention.NAIVE], inputs)
    assert attention.check_parity(kernel, inputs, expected) < attention.TOLERANCE

    def wrong(v, **arguments):
        return kernel(v=v + 1, **arguments)

    with pytest.raises(ValueError, match="equal the definition differs"):
        attention.check_parity(wrong, inputs, expected)


class Averages(torch.nn.Module):
    """Logits are means over what a query reads: the memory and, unless it ``skips`` some or ``peeks``, the
    tokens so far."""

    def __init__(self, skips=0, peeks=False):
        super().__init__()
        self.skips = skips
        self.peeks = peeks

    def forward(self, tokens, memory):
        past = memory[0][:, self.skips :, 0].sum(1)  # [B]
        read = tokens.sum(0).expand_as(tokens) if self.peeks else tokens.cumsum(0)
        return (past + read.float())[..., None], memory, torch.zeros(())


@pytest.mark.parametrize(
    ("peer", "mem_len", "words"),
    [
        (Averages(), 7, "remembers .6. positions in place of 7"),
        (Averages(peeks=True), 6, "reads the future"),
        (Averages(skips=1), 6, "does not read its oldest position"),
    ],
)
def test_a_peer_that_reads_other_keys_is_caught(peer, mem_len, words):
    tokens = torch.randint(65, (4, 3))
    memory = [torch.randn(3, 6, 2)]
    rotary.check_keys(Averages(), tokens, memory, 6)
    with pytest.raises(ValueError, match=words):
        rotary.check_keys(peer, tokens, memory, mem_len)


def test_without_x_transformers_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(rotary, "find_spec", lambda name: None)
    assert rotary.measure_all(quick=True) == []
    assert rotary.installed_version() == {}
    assert capsys.readouterr().out.count("\n") == 1


def test_x_transformers_reads_the_memory_that_ours_reads():
    pytest.importorskip("x_transformers")
    case = tiny(d_model=64, n_heads=2, d_ff=128, positions="sinusoidal", position_features=None)
    result = rotary.measure(case, quick=True)
    assert list(result["seconds"]) == list(result["CPU seconds"]) == list(result["parameters"])
    assert rotary.PEER in result["parameters"]


def test_speed_beside_a_peer_is_by_rounds():
    sides = {rotary.OURS: [1.0, 2.0, 3.0], rotary.PEER: [2.0, 2.0, 9.0]}
    parameters = dict.fromkeys(sides, 1000)
    row = {"case": "tiny", "parameters": parameters, "seconds": sides, "CPU seconds": sides}
    lines = reports.peer_table([row]).splitlines()
    assert "| tiny | ours, P = D | 1,000 | 2000 (1500 – 2500) |" in lines[2]
    assert lines[2].count("2.00 (1.50 – 2.50)") == 2
    assert lines[3].endswith("| – | – |")


@pytest.mark.long
def test_a_step_with_keys_kept_is_checked_and_measured():
    seconds = decoding.stepping(streams=2, rounds=1)["seconds"]
    assert {way: len(times) for way, times in seconds.items()} == {"stepper": 1, "gru": 1, "segment": 1}
    with pytest.raises(ValueError, match="reading step by step differs"):
        decoding.stepping(streams=2, rounds=1, tolerance=-1.0)


def test_reports_are_those_of_the_measured_numbers(tmp_path):
    writers = {"results": reports.write_speeds, "decoding": reports.write_decoding}
    for name, write in writers.items():
        write(read_json(HERE / f"{name}.json"), tmp_path)
        page = f"{name.upper()}.md"
        assert (tmp_path / page).read_text("utf-8") == (HERE / page).read_text("utf-8"), page


@pytest.mark.long
@pytest.mark.parametrize("only", ["speed", "decoding"])
def test_a_quick_run_measures_everything_and_is_reported(only, tmp_path):
    program.main(program.Options(only, quick=True, out=tmp_path))
    (page,) = tmp_path.glob("*.md")
    sections = {"speed": 5 if find_spec("x_transformers") else 4, "decoding": 3}
    assert page.read_text("utf-8").count("\n## ") == sections[only]
