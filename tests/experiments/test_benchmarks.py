"""The benchmarks' own arithmetic, checks and reports; nothing is timed here."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.benchmarks import __main__ as program
from experiments.benchmarks import attention, decoding, measuring, peers, report, training
from experiments.benchmarks.training import BFLOAT16, LABML_FUSED, MODELS, OURS, Case
from experiments.scaling import step_of
from memformers import ModelConfig
from memformers.common.files import read_json
from memformers.kernels import naive
from memformers.training.config import TrainConfig
from tests.processes import finish

HERE = Path(attention.__file__).parent
MOST_STACK = {"sm_90": 0, "sm_80": 64}
"""Bytes of stack per thread that a kernel in half precision may have."""


def tiny(model="transformer-xl", **changes):
    sizes = {"d_model": 12, "heads": 3, "d_ff": 20, "n_layers": 2, "segment_len": 8, "mem_len": 8}
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


def test_sdpa_with_a_bias_agrees_with_the_definition_and_a_wrong_attention_is_caught():
    inputs = attention.random_inputs(13, queries=7)
    expected = attention.forward_and_backward(naive.relative_attention, inputs)
    assert attention.check_parity(attention.sdpa, inputs, expected) < attention.TOLERANCE
    with pytest.raises(ValueError, match="equal the definition differs"):
        attention.check_parity(
            lambda *q, u, s, **kv: attention.sdpa(*q, u=u, s=0 * s, **kv), inputs, expected
        )


@pytest.mark.long
def test_sides_take_turns_and_memory_is_that_of_a_process_of_its_own():
    called = []
    sides = {name: partial(called.append, name) for name in "ab"}
    seconds = measuring.in_turns(sides, 2, between=partial(called.append, "-"))
    assert called == list("a-b-a-b-")
    assert {name: len(own) for name, own in seconds.items()} == {"a": 2, "b": 2}
    own = measuring.in_child(attention.extra_memory, attention.OURS, 1)
    assert own is None or 0 <= own < 2**30


def test_a_case_is_measured():
    case = tiny("compressive")
    result = training.measure(case, quick=True)
    assert result["flops"] == step_of(TrainConfig(case.config, batch_size=case.batch_size), 1)["operations"]
    assert {OURS, BFLOAT16, peers.LABML, LABML_FUSED} <= set(result["seconds"])
    assert max(error for name, error in result["errors"].items() if name != BFLOAT16) <= peers.TOLERANCE


def test_a_step_with_keys_kept_is_checked_and_measured(monkeypatch):
    seconds = decoding.stepping(streams=2, rounds=1)["seconds"]
    assert {way: len(times) for way, times in seconds.items()} == {"stepper": 1, "gru": 1, "segment": 1}
    monkeypatch.setattr(decoding, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="reading step by step differs"):
        decoding.stepping(streams=2, rounds=1)


def test_the_reports_are_those_of_the_numbers_that_were_measured(tmp_path):
    writers = {"results": report.write_speeds, "decoding": report.write_decoding}
    for name, write in (writers | {"compiled": report.write_compiled}).items():
        write(read_json(HERE / f"{name}.json"), tmp_path)
        page = f"{name.upper()}.md"
        assert (tmp_path / page).read_text("utf-8") == (HERE / page).read_text("utf-8"), page


def check_kernels(rows):
    """Every kernel fits, so that a program of it runs at all, and spills no more than it may."""
    for row in rows:
        assert row["programs"] >= 1, row
        if row["dtype"] != "float32":
            assert row["stack"] <= MOST_STACK.get(row["gpu"], row["stack"]), row


def test_the_table_of_compiled_kernels_is_of_every_form_and_every_kernel_of_it_fits():
    compiled = pytest.importorskip("experiments.benchmarks.compiled", reason="needs Triton")
    rows, sizes = (
        read_json(HERE / "compiled.json")["kernels"],
        len(compiled.WIDTHS) * len(compiled.DTYPES) - 1,
    )
    assert len(rows) == 4 * len(compiled.GPUS) * len(compiled.FORMS) * sizes
    check_kernels(rows)


@pytest.mark.long
def test_the_kernels_as_they_are_now_compile_and_are_as_the_table_says(tmp_path):
    """With the interpreter, which other tests use, nothing is compiled; so in a process of its own."""
    pytest.importorskip("triton")
    command = ["python", "-m", "experiments.benchmarks", "--only", "compiled", "--quick", "--out", tmp_path]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ended = finish([sys.executable, *command[1:]], cwd=HERE.parents[1], env=environment)
    assert ended.returncode == 0, ended.stderr
    now, table = (read_json(folder / "compiled.json") for folder in (tmp_path, HERE))
    check_kernels(now["kernels"])
    if now["triton"] == table["triton"]:
        assert all(row in table["kernels"] for row in now["kernels"])


@pytest.mark.long
@pytest.mark.parametrize("only", ["speed", "decoding"])
def test_a_quick_run_measures_everything_and_is_reported(only, tmp_path):
    program.main(program.Options(only, quick=True, out=tmp_path))
    (page,) = tmp_path.glob("*.md")
    assert page.read_text("utf-8").count("\n## ") == {"speed": 4, "decoding": 3}[only]
