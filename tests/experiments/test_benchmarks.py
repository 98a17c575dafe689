"""The benchmarks' own arithmetic, checks and report; nothing is timed here."""

from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch

from experiments.benchmarks import attention, decoding_report, measuring, peers, training, variants
from experiments.benchmarks.cases import MODELS, Case
from experiments.benchmarks.report import boundaries, compressions, report, write_report
from experiments.benchmarks.training import BFLOAT16, COMPILED, LABML_FUSED, OURS
from experiments.scaling.counting import flops
from memformers import MemoryLM, ModelConfig
from memformers.common.files import read_json
from memformers.kernels import naive
from memformers.models.config import WITHOUT_PARAMETERS, CompressionName
from memformers.training.config import TrainConfig

OWN = ("training", "starts", "compressions")
HERE = Path(attention.__file__).parent


def tiny(model="transformer-xl", **changes):
    sizes = {"d_model": 12, "heads": 3, "d_ff": 20, "n_layers": 2, "segment_len": 8, "mem_len": 8}
    sizes |= {"c_mem_len": 6, "compression_rate": 2, "vocab_size": 65, "positions": "learned"}
    return Case("tiny", ModelConfig(model=model, **sizes | changes), 3, 2)


@pytest.mark.parametrize("model", MODELS)
def test_labml_nn_agrees_with_ours_and_a_wrong_peer_is_caught(model):
    case = tiny(model)
    batches = training.random_batches(case)
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


def test_sdpa_with_a_bias_agrees_with_the_definition_and_a_wrong_attention_is_caught():
    inputs = attention.random_inputs(13, queries=7)
    expected = attention.forward_and_backward(naive.relative_attention, inputs)
    assert attention.check_parity(attention.sdpa, inputs, expected) < attention.TOLERANCE
    with pytest.raises(ValueError, match="equal the definition differs"):
        attention.check_parity(
            lambda *q, u, s, **kv: attention.sdpa(*q, u=u, s=0 * s, **kv), inputs, expected
        )


def test_sides_take_turns_forth_and_back_and_memory_is_that_of_a_process_of_its_own():
    called = []
    sides = {name: partial(called.append, name) for name in "ab"}
    seconds = measuring.in_turns(sides, 2, between=partial(called.append, "-"), back_and_forth=True)
    assert called == list("a-b-b-a-")
    assert {name: len(own) for name, own in seconds.items()} == {"a": 2, "b": 2}
    own = measuring.in_child("attention", "extra_memory", attention.OURS, 1)
    assert own is None or 0 <= own < 2**30
    with pytest.raises(RuntimeError, match="has no attribute 'nothing'"):
        measuring.in_child("measuring", "nothing")


def test_a_case_is_measured(monkeypatch):
    monkeypatch.setattr(training, "in_child", lambda *_: 2**30)
    case = tiny("compressive")
    result = training.measure(case, quick=True)
    assert result["flops"] == flops(TrainConfig(case.config, batch_size=case.batch_size)).total()
    assert {OURS, BFLOAT16, peers.LABML, LABML_FUSED} <= set(result["seconds"])
    assert sum(result["profile"].values()) == pytest.approx(1.0)
    assert result["peak memory"][OURS] == 2**30
    assert COMPILED in result["not run"]


@pytest.mark.parametrize("model", MODELS)
def test_steps_with_starts_are_measured_beside_those_without_once_they_agree(model, monkeypatch):
    case = tiny(model)
    result = variants.measure_starts(case, quick=True)
    assert result["error"] <= peers.TOLERANCE
    assert {side: len(seconds) for side, seconds in result["seconds"].items()} == dict.fromkeys(
        (*variants.PLAIN_OF, *variants.PLAIN_OF.values()), 2
    )
    monkeypatch.setattr(variants.torch, "zeros_like", torch.ones_like)
    with pytest.raises(ValueError, match="in which no document begins differs"):
        variants.error_without_documents(MemoryLM(case.config), training.random_batches(case))


def test_each_compression_is_measured_and_those_without_parameters_also_without_a_loss():
    seconds = variants.measure_compressions(tiny("compressive"), quick=True)["seconds"]
    assert next(iter(seconds)) == "conv, attention"
    assert {name.split(", ")[0] for name in seconds} == set(get_args(CompressionName))
    assert {name for name in seconds if name.endswith(" none")} == {f"{n}, none" for n in WITHOUT_PARAMETERS}


def test_the_report_says_by_how_much_starts_and_compressions_are_slower():
    seconds = {"ours": [0.1, 0.2], "with starts": [0.104, 0.208], "ours, bfloat16": [0.1, 0.1],
               "with starts, bfloat16": [0.11, 0.11]}  # fmt: skip
    doc_starts = {"case": "mid", "model": "compressive", "error": 1e-7, "seconds": seconds}
    compressed = {"case": "compare", "seconds": {"conv, attention": [0.1, 0.2], "max, none": [0.05, 0.1]}}
    lines = "\n".join([*boundaries([doc_starts]), *compressions(compressed)]).splitlines()
    assert "| mid | compressive | float32 | 150.0 | 156.0 | 4.0 (4.0 – 4.0) |" in lines
    assert "| mid | compressive | bfloat16 | 100.0 | 110.0 | 10.0 (10.0 – 10.0) |" in lines
    assert "| max | none | 75.0 | 0.50 (0.50 – 0.50) |" in lines


@pytest.mark.drawn
def test_the_reports_are_those_of_the_numbers_that_were_measured(tmp_path):
    results, decoded = (read_json(HERE / name) for name in ("results.json", "decoding.json"))
    write_report(results, tmp_path)
    assert (tmp_path / "figures" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "RESULTS.md").read_text("utf-8") == (HERE / "RESULTS.md").read_text("utf-8")
    assert decoding_report.report(decoded) == (HERE / "DECODING.md").read_text("utf-8")


def test_the_report_of_a_part_has_only_that_part():
    results = read_json(HERE / "results.json")
    whole, part = report(results), report({n: results[n] for n in results if n not in OWN})
    headings = [[line for line in text.splitlines() if line.startswith("## ")] for text in (whole, part)]
    assert headings[1] == [heading for heading in headings[0] if "Attention alone" in heading]
