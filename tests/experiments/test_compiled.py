"""The fused kernels compile for GPUs that are not here, fit them, and hardly spill registers."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from experiments.benchmarks.compiled import DTYPES, FORMS, GPUS, WIDTHS, report
from experiments.benchmarks.measuring import ROOT
from memformers.common.files import read_json

FOLDER = ROOT / "experiments" / "benchmarks"
MOST_STACK = {"sm_90": 0, "sm_80": 64}
"""Bytes of stack per thread that a kernel in half precision may have."""


def check(rows):
    """Every kernel fits, so that a program of it runs at all, and spills no more than it may."""
    for row in rows:
        assert row["programs"] >= 1, row
        if row["dtype"] != "float32":
            assert row["stack"] <= MOST_STACK.get(row["gpu"], row["stack"]), row


def test_the_table_is_of_every_form_and_every_kernel_of_it_fits():
    results = read_json(FOLDER / "compiled.json")
    assert len(results["kernels"]) == 4 * len(GPUS) * len(FORMS) * (len(WIDTHS) * len(DTYPES) - 1)
    check(results["kernels"])
    assert report(results) == (FOLDER / "COMPILED.md").read_text(encoding="utf-8")


def test_the_kernels_as_they_are_now_compile_and_are_as_the_table_says(tmp_path):
    """With the interpreter, which other tests use, nothing is compiled; so in a process of its own."""
    command = [sys.executable, "-m", "experiments.benchmarks.compiled", "--gpus", "sm_90", "--widths", "32"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(
        [*command, "--dtypes", "bfloat16", "--out", tmp_path], cwd=ROOT, env=environment, check=True
    )
    now, table = (read_json(folder / "compiled.json") for folder in (tmp_path, FOLDER))
    check(now["kernels"])
    if now["triton"] == table["triton"]:
        assert all(row in table["kernels"] for row in now["kernels"])
