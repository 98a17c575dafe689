"""``memformers doctor`` says what the machine is and which kernels may be trusted on it."""

import re

import pytest
import torch
from memformers.kernels.self_test import find_mismatch

from memformers.commands import doctor
from memformers.kernels import dispatch, naive


@pytest.fixture(autouse=True)
def _small_attention_without_the_interpreter(monkeypatch):
    for name, size in (("B", 1), ("H", 1), ("S", 8), ("K", 12)):
        monkeypatch.setattr(doctor, name, size)
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_doctor_shows_the_machine_and_what_auto_takes(capsys):
    doctor.Doctor(device="cpu", d_head=4).run()
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    rows = {tuple(line.split()[:2]) for line in said.splitlines()}
    assert {("naive", "(auto)"), ("blocked", "float32"), ("SDPA", "bfloat16")} <= rows
    assert said.count("agrees with naive") == 2
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert re.search(r"^Training here uses: naive, (float32|bfloat16), \d+ threads?\b", said.splitlines()[-1])


def test_a_kernel_that_is_wrong_is_named(monkeypatch):
    def wrong(query, key, value, r, **others):
        return naive.relative_attention(query, key, value, r, **others) * 1.5

    monkeypatch.setattr("memformers.kernels.blocked.relative_attention", wrong)
    found = doctor.examine(torch.device("cpu"), torch.float32, 4)
    find_mismatch.cache_clear()
    assert "differs in output by 5.0e-01" in found["blocked"][0]
    assert found["blocked"][1] == "–"
    assert set(found) == {"naive (auto)", *dispatch.SUPPORT, "SDPA"} - {"naive"}
