"""The experiments as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import SMALL_RUN

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def start(name, *arguments):
    return run(str(EXPERIMENTS / name), *arguments)


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=EXPERIMENTS.parent, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("name", ["transformer_xl.py", "compressive_transformer.py", "compare.py"])
def test_an_experiment_ends_with_a_report(name, tmp_path):
    result = start(name, "--out", tmp_path / "run", *SMALL_RUN)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert f"report: {tmp_path / 'run' / 'report.html'}" in result.stdout


def test_a_mistake_gets_one_line():
    result = start("transformer_xl.py", "--heads", 3)
    assert result.returncode == 2
    assert "error: d_model=128 is not divisible by heads=3" in result.stderr
    assert "Traceback" not in result.stderr


def test_scaling_writes_its_tables(tmp_path):
    result = start("scaling.py", "--out", tmp_path / "scaling.md", "--teraflops", 100)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert text in result.stdout
    assert "compute at 100 TFLOP/s" in " ".join(text.split())
    assert text.count("| 64 | fsdp |") == 2


def test_the_tables_in_the_docs_are_those_that_scaling_writes(tmp_path):
    start("scaling.py", "--out", tmp_path / "scaling.md")
    assert (tmp_path / "scaling.md").read_bytes() == (EXPERIMENTS.parent / "docs/scaling.md").read_bytes()


def test_no_rate_is_no_time():
    result = start("scaling.py", "--bandwidth", 0)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "bandwidth=0.0 must be above 0" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a rank's process is found in /proc")
def test_a_soak_ends_with_the_bits_of_the_undisturbed_training_and_a_table(tmp_path):
    pytest.importorskip("labml_app", reason="the dashboard's extra is not installed")
    result = run("-m", "experiments.soak", "--steps", 30, "--every", 15, "--out", tmp_path / "soak.md")
    assert result.returncode == 0, result.stdout + result.stderr
    text = (tmp_path / "soak.md").read_text(encoding="utf-8")
    assert "| SIGKILL, rank " in text
    assert "| SIGTERM, rank " in text
    assert "2 faults, 3 starts" in text
    assert "the same bits as the undisturbed one" in " ".join(text.split())


def test_a_soak_without_a_fault_is_a_mistake():
    result = run("-m", "experiments.soak", "--steps", 5)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "every=100 must be between 10 and steps=5" in result.stderr
