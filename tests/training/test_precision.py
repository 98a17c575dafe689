import json

import pytest
import torch

from memformers.common import machine
from memformers.runs.folder import CONFIG
from memformers.training import distributed
from memformers.training.config import read_train_config
from memformers.training.distributed import with_precision
from tests.builders import small_training
from tests.training.runs import train_run


@pytest.fixture(params=[True, False])
def faster(request, monkeypatch):
    """Whether this machine multiplies bfloat16 faster, as far as trainings know."""
    monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device: request.param)
    return request.param


@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
def test_auto_is_bfloat16_where_it_is_faster_and_else_float32(faster, asked):
    expected = {"auto": "bfloat16" if faster else "float32"}.get(asked, asked)
    assert with_precision(small_training(precision=asked), torch.device("cpu")).step.precision == expected


def test_a_run_says_its_precision_and_keeps_it_on_another_machine(tmp_path, monkeypatch, faster):
    config = small_training(tokens=256, precision="auto")
    train_run(config, tmp_path / "run", dashboard="off")
    taken = read_train_config(tmp_path / "run").step.precision
    assert taken == ("bfloat16" if faster else "float32")
    (tmp_path / "run" / "result.json").unlink()  # as if it had not ended
    monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device: not faster)
    train_run(config, tmp_path / "run", dashboard="off", resume=True)
    assert json.loads((tmp_path / "run" / CONFIG).read_text())["step"]["precision"] == taken


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f", False), ("fpu avx512_bf16 avx", True), ("amx_bf16", True), ("", False)],
)
def test_a_processor_with_instructions_for_bfloat16_takes_it_however_busy_it_is(
    flags, expected, monkeypatch, tmp_path
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n" if flags else "")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.multiplies_bfloat16_faster(torch.device("cpu")) is expected
